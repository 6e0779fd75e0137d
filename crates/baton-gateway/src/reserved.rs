//! Body fields that a client may not simply hand to an engine. This table is the published list (docs/gateway.md); everything else in
//! a body passes untouched.

use crate::config::EngineKind;

/// What becomes of a reserved field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Removed: it would let a client steer the engine's insides, other requests, or other tenants.
    Strip,
    /// Read, kept within bounds, and sent on where the engine orders by it.
    Clamp,
    /// Replaced by the gateway's own value; what the client wanted is honoured in the answer.
    Override,
}

/// One reserved field.
#[derive(Debug, Clone, Copy)]
pub struct Reserved {
    pub field: &'static str,
    pub rule: Rule,
    pub why: &'static str,
}

const fn reserved(field: &'static str, rule: Rule, why: &'static str) -> Reserved {
    Reserved { field, rule, why }
}

/// The published list.
pub const RESERVED: &[Reserved] = &[
    reserved("stream", Rule::Override, "an answer that is not streamed may be streamed from the engine and assembled"),
    reserved("stream_options", Rule::Override, "usage is asked for always; the client sees it when it asked"),
    reserved("return_token_ids", Rule::Override, "token ids are asked for where the engine has them; the client sees them when it asked"),
    reserved(
        "cache_salt",
        Rule::Override,
        "replaced by a value derived from it and the client's tenant, so that no client can name another's cache domain",
    ),
    reserved(
        "cache_public",
        Rule::Override,
        "says how far the salt does not count; set for Baton's engines where the operator declared public prefixes",
    ),
    reserved("priority", Rule::Clamp, "kept within ±1000, lower is more important; sent to engines that order by it"),
    reserved("chat_template", Rule::Strip, "a program that runs on the engine; `client_chat_template = true` lets it pass"),
    reserved("request_id", Rule::Strip, "engines abort and account by it; the gateway mints one per attempt"),
    reserved("rid", Rule::Strip, "SGLang's request id"),
    reserved("kv_transfer_params", Rule::Strip, "names other engines' KV"),
    reserved("ec_transfer_params", Rule::Strip, "names other engines' encoder cache"),
    reserved("bootstrap_host", Rule::Strip, "SGLang's way to name another engine's KV"),
    reserved("bootstrap_port", Rule::Strip, "as bootstrap_host"),
    reserved("bootstrap_room", Rule::Strip, "as bootstrap_host"),
    reserved("data_parallel_rank", Rule::Strip, "placement inside the engine"),
    reserved("routed_dp_rank", Rule::Strip, "placement inside the engine"),
    reserved("session_params", Rule::Strip, "SGLang's sessions live in one engine"),
    reserved("id_slot", Rule::Strip, "placement inside llama.cpp"),
    reserved("lora_path", Rule::Strip, "a path on the engine's disk; name the adapter as `model`"),
    reserved("vllm_xargs", Rule::Strip, "arguments of the engine's plug-ins"),
    reserved("mm_processor_kwargs", Rule::Strip, "arguments of the engine's processors"),
    reserved("media_io_kwargs", Rule::Strip, "arguments of the engine's loaders"),
    reserved("logits_processors", Rule::Strip, "names code on the engine"),
    reserved("custom_logit_processor", Rule::Strip, "carries code for the engine"),
    reserved("custom_params", Rule::Strip, "arguments of custom_logit_processor"),
    reserved("return_hidden_states", Rule::Strip, "internal state of the model"),
];

/// Bound on the client's priority, both ways.
pub(crate) const PRIORITY_MAX: i32 = 1000;

/// Fields to remove from a body.
pub(crate) fn stripped(client_chat_template: bool) -> impl Iterator<Item = &'static str> {
    RESERVED
        .iter()
        .filter(move |reserved| reserved.rule == Rule::Strip && !(client_chat_template && reserved.field == "chat_template"))
        .map(|reserved| reserved.field)
}

/// Whether the engine takes `priority` in a body.
pub(crate) fn takes_priority(kind: EngineKind, configured: Option<bool>) -> bool {
    configured.unwrap_or(kind == EngineKind::Baton)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_list_is_the_table() {
        let page = include_str!("../../../docs/gateway.md");
        for reserved in RESERVED {
            let rule = format!("{:?}", reserved.rule).to_lowercase();
            let row = format!("| `{}` | {rule} | {} |", reserved.field, reserved.why);
            assert!(page.contains(&row), "docs/gateway.md lacks: {row}");
        }
    }

    #[test]
    fn a_template_passes_only_where_allowed() {
        assert!(stripped(false).any(|field| field == "chat_template"));
        assert!(!stripped(true).any(|field| field == "chat_template"));
    }
}
