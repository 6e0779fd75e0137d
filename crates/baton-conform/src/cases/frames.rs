use baton_migration::{GatewayName, LostClass, RequestName, Tag, ToGateway, ToSeat};
use baton_wire::migration::{
    ControlFrame, HEADER_BYTES,
    handshake::{Hello, Role},
};

use crate::{
    Checked, Suite,
    raw::{Raw, gateway_hello},
    suite::movable,
    verdict::{demand, failed, skipped},
};

const LEASE: u16 = 0x11;
/// `[0]`.
const LEASE_BODY: &[u8] = &[0x91, 0];
const START: u16 = 0x20;
const STATE: u16 = 0x43;

async fn introduced(suite: &Suite) -> Checked<Raw> {
    Raw::introduced(suite, &suite.options.replica, &gateway_hello()?).await
}

/// The connection ends, and the replica takes gateways still.
async fn ends(suite: &Suite, raw: Raw) -> Checked {
    raw.ended().await?;
    suite.lives().await
}

pub(super) async fn gap(suite: &Suite) -> Checked {
    let mut raw = introduced(suite).await?;
    raw.sealed(LEASE, LEASE_BODY);
    raw.frame(LEASE, LEASE_BODY).await?;
    ends(suite, raw).await
}

pub(super) async fn repetition(suite: &Suite) -> Checked {
    let mut raw = introduced(suite).await?;
    let frame = raw.sealed(LEASE, LEASE_BODY);
    raw.send(&frame).await?;
    raw.send(&frame).await?;
    ends(suite, raw).await
}

pub(super) async fn bad_mac(suite: &Suite) -> Checked {
    if suite.options.fleet_key.is_none() {
        return skipped("the fleet has no key");
    }
    for altered in [0, HEADER_BYTES] {
        let mut raw = introduced(suite).await?;
        let mut frame = raw.sealed(LEASE, LEASE_BODY);
        // Of the MAC, and of the body.
        let at = frame.len() - 1 - altered;
        frame[at] ^= 1;
        raw.send(&frame).await?;
        ends(suite, raw).await?;
    }
    Ok(())
}

pub(super) async fn oversized(suite: &Suite) -> Checked {
    let mut raw = introduced(suite).await?;
    let mut header = raw.sealed(LEASE, &[])[..HEADER_BYTES].to_vec();
    header[..4].copy_from_slice(&((64_u32 << 20) + 1).to_le_bytes());
    raw.send(&header).await?;
    ends(suite, raw).await
}

pub(super) async fn unknown_kind(suite: &Suite) -> Checked {
    let mut raw = introduced(suite).await?;
    raw.frame(0x7f, &[0x90]).await?;
    ends(suite, raw).await
}

pub(super) async fn malformed(suite: &Suite) -> Checked {
    for body in [&[0xc1][..], &[], &[0x91, 0xa1, b'x']] {
        let mut raw = introduced(suite).await?;
        raw.frame(START, body).await?;
        ends(suite, raw).await?;
    }
    Ok(())
}

pub(super) async fn foreign(suite: &Suite) -> Checked {
    let (mut gateway, place) = suite.attached().await?;
    let request = RequestName { gateway: GatewayName { id: gateway.name.id ^ 1, incarnation: 1 }, sequence: 1 };
    let start = ToSeat::Start { epoch: Tag(1), delivered: Vec::new() };
    let frame = ControlFrame::ToSeat { request, message: start, with: suite.greedy(8).to_bytes() };
    gateway.send(place, &frame).await?;
    gateway.send(place, &ControlFrame::ToSeat { request, message: ToSeat::Stop { upto: Tag::ALL }, with: Vec::new() }).await?;
    // The answer to what comes after them is the first that comes.
    gateway.tell(place, 2, ToSeat::Keep { epoch: Tag(1), next: 0 }).await?;
    let own = gateway.request(2);
    let (named, message) = gateway
        .until("LOST", |_, frame| match frame {
            ControlFrame::ToGateway { request, message, .. } => Some((request, message)),
            _ => None,
        })
        .await?;
    demand!((named, &message) == (own, &ToGateway::Lost { epoch: Tag(1), class: LostClass::Lost }), "{message:?} came of {named}");
    Ok(())
}

pub(super) async fn kv_first(suite: &Suite) -> Checked {
    let (gateway, place) = suite.attached().await?;
    let hello = gateway.hello(place);
    let (_, address) = movable(hello)?;
    let identity = suite.like(hello, None);
    let source = Hello { role: Role::Source, nonce: gateway_hello()?.nonce, ..identity.hello };
    for (kind, body) in [(STATE, &[0x90][..]), (0x7f, &[0x90]), (LEASE, LEASE_BODY)] {
        let mut raw = Raw::introduced(suite, &address, &source).await?;
        raw.frame(kind, body).await?;
        let said = raw.ended().await?;
        let prepared = said.windows(8).any(|header| header[4..] == [0x53, 0, 0, 0] || header[4..] == [0x50, 0, 0, 0]);
        if prepared {
            return failed("the target answered what was never opened");
        }
    }
    suite.lives().await
}
