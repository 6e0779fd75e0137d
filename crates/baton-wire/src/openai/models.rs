use serde::{Deserialize, Serialize};

/// `GET /v1/models`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelList {
    pub object: String,
    pub data: Vec<ModelCard>,
}

/// One model. Only `id` can be relied on from servers other than vLLM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelCard {
    pub id: String,
    #[serde(default)]
    pub object: String,
    #[serde(default)]
    pub created: u64,
    #[serde(default)]
    pub owned_by: String,
    #[serde(default)]
    pub root: Option<String>,
    /// Base model of an adapter.
    #[serde(default)]
    pub parent: Option<String>,
    /// Prompt and output together, in tokens; null for an adapter.
    #[serde(default)]
    pub max_model_len: Option<u32>,
    #[serde(default)]
    pub permission: Vec<ModelPermission>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools, reason = "OpenAI's object")]
pub struct ModelPermission {
    pub id: String,
    pub object: String,
    pub created: u64,
    pub allow_create_engine: bool,
    pub allow_sampling: bool,
    pub allow_logprobs: bool,
    pub allow_search_indices: bool,
    pub allow_view: bool,
    pub allow_fine_tuning: bool,
    pub organization: String,
    pub group: Option<String>,
    pub is_blocking: bool,
}

impl ModelList {
    pub fn new(data: Vec<ModelCard>) -> Self {
        Self { object: "list".into(), data }
    }
}

impl ModelCard {
    /// A base model that `owned_by` serves. `created` in seconds since the Unix epoch; `root` is where the weights came from.
    pub fn new(id: &str, owned_by: &str, created: u64, root: Option<String>, max_model_len: u32) -> Self {
        Self {
            id: id.into(),
            object: "model".into(),
            created,
            owned_by: owned_by.into(),
            root,
            parent: None,
            max_model_len: Some(max_model_len),
            permission: vec![ModelPermission::open(id, created)],
        }
    }
}

impl ModelPermission {
    /// What vLLM gives everybody.
    fn open(model: &str, created: u64) -> Self {
        Self {
            id: format!("modelperm-{model}"),
            object: "model_permission".into(),
            created,
            allow_create_engine: false,
            allow_sampling: true,
            allow_logprobs: true,
            allow_search_indices: false,
            allow_view: true,
            allow_fine_tuning: false,
            organization: "*".into(),
            group: None,
            is_blocking: false,
        }
    }
}
