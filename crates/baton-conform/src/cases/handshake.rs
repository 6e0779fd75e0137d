use baton_wire::migration::handshake::{FleetKey, Hello, PROOF_BYTES, Role, Side, Transcript, VERSION};

use crate::{
    Checked, Suite,
    raw::{Raw, gateway_hello},
    suite::movable,
    verdict::{demand, skipped},
};

pub(super) async fn introduction(suite: &Suite) -> Checked {
    let (first, place) = suite.attached().await?;
    let (second, again) = suite.attached().await?;
    let (hello, other) = (first.hello(place), second.hello(again));
    demand!(hello.version == VERSION && hello.role == Role::Replica, "it says to be a {:?} of version {}", hello.role, hello.version);
    demand!(hello.id == u64::from(place.replica.0), "its id {} is no 32-bit number, and places name replicas by one", hello.id);
    demand!(!hello.numerics_id.is_empty(), "it does not say what it computes");
    demand!(hello.nonce != other.nonce, "it used its nonce twice");
    demand!(*hello == Hello { nonce: hello.nonce, ..other.clone() }, "it says {hello:?} at first and then {other:?}");
    if let Some(layout) = &hello.kv_layout {
        demand!(layout.block_size > 0 && layout.block_bytes > 0 && !layout.format.is_empty(), "its KV lies as {layout:?}");
        demand!(hello.kv_address.is_some() && hello.freeze.is_some(), "it has KV to move, and says not where to or what freezing does");
    }
    Ok(())
}

pub(super) async fn other_version(suite: &Suite) -> Checked {
    for version in [0, VERSION + 1] {
        let hello = Hello { version, ..gateway_hello()? };
        refused(suite, &suite.options.replica, &hello).await?;
    }
    suite.lives().await
}

pub(super) async fn other_roles(suite: &Suite) -> Checked {
    for role in [Role::Replica, Role::Source] {
        let hello = Hello { role, ..gateway_hello()? };
        refused(suite, &suite.options.replica, &hello).await?;
    }
    suite.lives().await
}

pub(super) async fn kv_roles(suite: &Suite) -> Checked {
    let (gateway, place) = suite.attached().await?;
    let (_, address) = movable(gateway.hello(place))?;
    for role in [Role::Gateway, Role::Replica] {
        let hello = Hello { role, ..gateway_hello()? };
        refused(suite, &address, &hello).await?;
    }
    suite.lives().await
}

/// With the right key, but as nobody who has business there.
async fn refused(suite: &Suite, address: &str, hello: &Hello) -> Checked {
    let mut raw = Raw::connect(suite, address).await?;
    let ours = hello.to_bytes();
    raw.send(&ours).await?;
    if let (Some(key), Ok(theirs)) = (&suite.options.fleet_key, raw.hello_bytes().await) {
        let proof = key.proof(Side::Dialer, &Transcript { dialer: ours, listener: theirs });
        // It may have left already.
        let _ = raw.send(&proof).await;
    }
    let said = raw.ended().await?;
    demand!(!holds_all_held(&said), "a {:?} of version {} was taken in", hello.role, hello.version);
    Ok(())
}

/// `ALL_HELD`, which only who was taken in is told: an empty body, its kind, no flags.
fn holds_all_held(said: &[u8]) -> bool {
    said.windows(8).any(|header| *header == [1, 0, 0, 0, 0x13, 0, 0, 0])
}

pub(super) async fn unreadable(suite: &Suite) -> Checked {
    let mut malformed = 5_u32.to_le_bytes().to_vec();
    malformed.extend([0xc1; 5]);
    let endless = u32::MAX.to_le_bytes().to_vec();
    for bytes in [malformed, endless] {
        let mut raw = Raw::connect(suite, &suite.options.replica).await?;
        raw.send(&bytes).await?;
        raw.ended().await?;
    }
    suite.lives().await
}

pub(super) async fn wrong_key(suite: &Suite) -> Checked {
    if suite.options.fleet_key.is_none() {
        return skipped("the fleet has no key");
    }
    let mut raw = Raw::connect(suite, &suite.options.replica).await?;
    let dialer = gateway_hello()?.to_bytes();
    raw.send(&dialer).await?;
    let listener = raw.hello_bytes().await?;
    let other = FleetKey::new("not the key of any fleet");
    raw.send(&other.proof(Side::Dialer, &Transcript { dialer, listener })).await?;
    let said = raw.ended().await?;
    demand!(said.is_empty(), "{} bytes came after a wrong proof", said.len());
    suite.lives().await
}

pub(super) async fn one_sided_key(suite: &Suite) -> Checked {
    let mut raw = Raw::connect(suite, &suite.options.replica).await?;
    raw.send(&gateway_hello()?.to_bytes()).await?;
    raw.hello_bytes().await?;
    if suite.options.fleet_key.is_some() {
        // A frame where a proof is due, and enough of them.
        for _ in 0..4 {
            let frame = raw.sealed(0x11, &[0x91, 0]);
            if raw.send(&frame).await.is_err() {
                break;
            }
        }
        let said = raw.ended().await?;
        demand!(!holds_all_held(&said), "a gateway without the fleet key was taken in");
    } else {
        raw.send(&[0x5a; PROOF_BYTES]).await?;
        raw.ended().await?;
    }
    suite.lives().await
}
