//! What tenants find in each other's caches at a real replica, as the replica counts it.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic like tests")]

mod common;

use std::{fs, path::PathBuf};

use common::{Server, http_as, until};
use serde_json::{Value, json};

const BLOCK: u64 = 16;
/// Of the tokenizer that takes four bytes for a token.
const TOKEN_BYTES: usize = 4;

/// A system prompt that all may know of.
fn system() -> String {
    "You answer in the manner of the house. ".repeat(40)
}

/// One replica behind a gateway with the tenants `a` and `b`, who are kept apart, and `open`, who is not.
struct House {
    gateway: Server,
    replica: Server,
    folder: PathBuf,
}

impl House {
    /// `control`: requests run over the replica's control connection, else over HTTP.
    fn build(control: bool, config: &str) -> Self {
        let mut args = vec!["replica", "--port", "0", "--engine", "timed", "--tokenizer", "bytes4", "--time-scale", "0.1"];
        args.extend(["--blocks", "4096", "--max-model-len", "8192"]);
        args.extend(control.then_some(["--migration-port", "0"]).into_iter().flatten());
        let replica = Server::start(&args);
        let folder = std::env::temp_dir().join(format!("baton-isolation-{}-{}", std::process::id(), replica.pid()));
        fs::create_dir_all(&folder).unwrap();
        let tenant = |name: &str, isolation: &str| {
            let key = folder.join(name);
            fs::write(&key, format!("key-{name}")).unwrap();
            format!("[[tenants]]\nname = \"{name}\"\nkeys = [{{ file = \"{}\" }}]\nisolation = \"{isolation}\"\n", key.display())
        };
        let front = "[gateway]\nbind = \"127.0.0.1:0\"\nsalt_secret = \"a secret of the test\"\n";
        let engine = format!("[[engines]]\nurl = \"{}\"\nkind = \"baton\"\n", replica.url);
        let tenants = [tenant("a", "salt"), tenant("b", "salt"), tenant("open", "none")].concat();
        let path = folder.join("baton.toml");
        fs::write(&path, [front, &engine, &tenants, config].concat()).unwrap();
        let gateway = Server::start(&["serve", "--config", path.to_str().unwrap(), "--tokenizer", "bytes4"]);
        until("replica that is ready and reached", || {
            let replica = &gateway.replicas()[0];
            let reached = !control || replica["migration"]["connected"] == true;
            (replica["state"] == "ready" && replica["tokens"] == "same" && reached).then_some(())
        });
        Self { gateway, replica, folder }
    }

    /// Has the tenant ask this. Gives the prompt's tokens and how many of them the replica found, which it says in its answer and in its
    /// counters, and the gateway had foretold.
    fn ask(&self, tenant: &str, user: &str) -> (u64, u64) {
        let messages = json!([{ "role": "system", "content": system() }, { "role": "user", "content": user }]);
        let body = json!({ "messages": messages, "max_tokens": 1 }).to_string();
        let before = self.hits();
        let (status, answer) =
            http_as(&self.gateway.url, &format!("authorization: Bearer key-{tenant}\r\n"), "POST", "/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let usage = &answer["usage"];
        let (prompt, cached) =
            (usage["prompt_tokens"].as_u64().unwrap(), usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap());
        until("counters with the request", || (self.hits() == before + cached).then_some(()));
        let id = answer["id"].as_str().unwrap().strip_prefix("chatcmpl-").unwrap();
        let foretold = until("decision with its outcome", || {
            let (_, decision) = self.gateway.get(&format!("/baton/v1/decisions/{id}"));
            let decision: Value = serde_json::from_str(&decision).unwrap();
            (!decision["realised"]["outcome"].is_null()).then(|| decision["quotes"][0]["hit_tokens"].as_u64().unwrap())
        });
        assert_eq!(foretold, cached, "{tenant} asks {user}");
        (prompt, cached)
    }

    fn hits(&self) -> u64 {
        let (_, page) = self.replica.get("/metrics");
        let line = page.lines().find(|line| line.starts_with("vllm:prefix_cache_hits_total{")).unwrap();
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64
    }

    /// Once the index is of so many blocks, which the replica told under the keys that the gateway expected.
    fn until_indexed(&self, blocks: u64) {
        until("index of the replica's blocks", || {
            let replica = &self.gateway.replicas()[0];
            (replica["kv_blocks_indexed"] == blocks).then_some(())
        });
    }
}

impl Drop for House {
    fn drop(&mut self) {
        // What is left in the temporary folder harms nobody.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// What a prompt finds that was sent before: all blocks but that of its last token.
fn all_of(prompt: u64) -> u64 {
    (prompt - 1) / BLOCK * BLOCK
}

#[test]
fn without_public_prefixes_a_prompt_is_found_by_its_own_tenant_alone() {
    for control in [false, true] {
        let house = House::build(control, "");
        let user = "the secret of a ".repeat(30);
        let mut blocks = 0;
        for tenant in ["a", "b", "open"] {
            assert_eq!(house.ask(tenant, &user).1, 0, "{tenant} sent it never before");
            let (prompt, cached) = house.ask(tenant, &user);
            assert_eq!(cached, all_of(prompt), "{tenant}");
            blocks += prompt / BLOCK;
        }
        house.until_indexed(blocks);
    }
}

#[test]
fn tenants_share_what_is_public_and_nothing_behind_it() {
    let public = format!("[[public_prefixes]]\nsystem = \"{}\"\n", system());
    // As far as the template writes it whatever the user says, in whole blocks.
    let written = format!("<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n", system());
    let shared = (written.len() / TOKEN_BYTES) as u64 / BLOCK * BLOCK;
    for control in [false, true] {
        let house = House::build(control, &public);
        let user = "the secret of a ".repeat(30);
        let mut blocks = shared / BLOCK;
        for (place, tenant) in ["a", "b", "open"].into_iter().enumerate() {
            assert_eq!(house.ask(tenant, &user).1, if place == 0 { 0 } else { shared }, "{tenant} finds what is public alone");
            let (prompt, cached) = house.ask(tenant, &user);
            assert_eq!(cached, all_of(prompt), "{tenant} finds its own");
            assert!(cached > shared);
            blocks += prompt / BLOCK - shared / BLOCK;
        }
        house.until_indexed(blocks);
        let (status, _) = house.gateway.get("/metrics");
        assert_eq!(status, 200, "operators see the numbers of all");
    }
}
