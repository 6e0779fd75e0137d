use baton_migration::{GatewayName, Place, RequestName};
use baton_units::{Incarnation, ReplicaId};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, de::DeserializeOwned};

use super::FrameError;

pub(super) type Name = (u64, u64, u64);
pub(super) type WirePlace = (u32, u64);

pub(super) fn body(value: &impl Serialize) -> Vec<u8> {
    rmp_serde::to_vec(value).expect("plain values serialize")
}

pub(super) fn read<T: DeserializeOwned>(kind: u16, body: &[u8]) -> Result<T, FrameError> {
    rmp_serde::from_slice(body).map_err(|error| FrameError::Malformed { kind, why: error.to_string() })
}

pub(super) fn name(request: RequestName) -> Name {
    (request.gateway.id, request.gateway.incarnation, request.sequence)
}

pub(super) fn request((id, incarnation, sequence): Name) -> RequestName {
    RequestName { gateway: GatewayName { id, incarnation }, sequence }
}

pub(super) fn wire_place(place: Place) -> WirePlace {
    (place.replica.0, place.incarnation.0)
}

pub(super) fn place((replica, incarnation): WirePlace) -> Place {
    Place { replica: ReplicaId(replica), incarnation: Incarnation(incarnation) }
}

/// Written as `MessagePack`'s `bin`.
pub(super) struct Bytes<'a>(pub(super) &'a [u8]);

impl Serialize for Bytes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

/// Read from `bin`.
pub(super) struct Payload(pub(super) Vec<u8>);

impl<'de> Deserialize<'de> for Payload {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Payload;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Payload, E> {
                Ok(Payload(bytes.to_vec()))
            }
            fn visit_byte_buf<E>(self, bytes: Vec<u8>) -> Result<Payload, E> {
                Ok(Payload(bytes))
            }
        }
        deserializer.deserialize_byte_buf(Visitor)
    }
}
