//! vLLM engines beside which something speaks the migration protocol.

use baton_link::Identity;
use baton_wire::migration::handshake::{Freeze, Hello, KvLayout, Role, VERSION};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::support::{FakeEngine, Front};

#[tokio::test]
async fn a_vllm_engine_that_reports_a_replica_is_attached_to_and_one_that_does_not_is_left_alone() {
    let (plain, beside) = (FakeEngine::start().await, FakeEngine::start().await);
    let control = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = control.local_addr().unwrap().to_string();
    let layout = KvLayout { format: "vllm-1".to_owned(), block_size: 32, block_bytes: 1 << 20 };
    // Of the report of Baton's own replicas this is all that is asked for.
    let migration =
        json!({ "replica": 3, "control_address": address, "kv_address": "127.0.0.1:1", "fleet_key": false, "kv_layout": layout });
    *beside.report.lock().unwrap() = json!({ "incarnation": 7, "engine": "vllm", "migration": migration }).to_string();
    let front = Front::over(&[&plain, &beside]).await;
    let hello = Hello {
        version: VERSION,
        role: Role::Replica,
        id: 3,
        incarnation: 7,
        numerics_id: "vllm".to_owned(),
        kv_layout: Some(layout),
        freeze: Some(Freeze::Final),
        kv_address: Some("127.0.0.1:1".to_owned()),
        nonce: [0; 32],
    };
    let (stream, _) = control.accept().await.unwrap();
    let connection = Identity { hello, fleet_key: None }.accept(stream, Role::Gateway).await.unwrap();
    assert_eq!(connection.hello.role, Role::Gateway);
    let replicas = loop {
        let (_, fleet) = front.get("/baton/v1/fleet").await;
        if fleet["replicas"][1]["migration"]["numerics_id"] == "vllm" {
            break fleet["replicas"].clone();
        }
    };
    assert_eq!(replicas[0]["migration"], Value::Null);
}
