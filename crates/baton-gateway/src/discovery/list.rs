//! A file that lists engines.

use baton_discovery::{Endpoint, Readiness};
use serde::Deserialize;
use toml::Value;

use super::Own;
use crate::config::{EngineConfig, EngineTemplate, GatewayConfig};

/// The engines of a file, in TOML as in the configuration, or in JSON as a list of the same tables.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a list of engines is [[engines]] in TOML, or [{…}, …] in JSON")]
enum List {
    Bare(Vec<toml::Table>),
    Named(Named),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    engines: Vec<toml::Table>,
}

/// The engines that the text names, each with what the template adds. What is wrong is told without the text itself, which may hold keys.
pub(super) fn parse(text: &str, is_json: bool, template: &EngineTemplate) -> Result<Vec<Endpoint<Own>>, String> {
    let list: List = if is_json {
        serde_json::from_str(text).map_err(|error| format!("line {}: {}", error.line(), what(&error)))?
    } else {
        toml::from_str(text).map_err(|error| error.message().to_owned())?
    };
    let (List::Bare(tables) | List::Named(Named { engines: tables })) = list;
    let engine = |(place, table)| engine(table, template).map_err(|what| format!("engines[{place}]: {what}"));
    let engines = tables.into_iter().enumerate().map(engine).collect::<Result<Vec<_>, _>>()?;
    // What a configuration could not have, no file can.
    let config = GatewayConfig { engines, ..GatewayConfig::default() };
    config.check().map_err(|error| error.to_string())?;
    Ok(config.engines.into_iter().map(endpoint).collect())
}

/// serde's words without the place, which is told before them.
fn what(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what).to_owned()
}

fn engine(mut table: toml::Table, template: &EngineTemplate) -> Result<EngineConfig, String> {
    table.entry("kind").or_insert_with(|| Value::String(template.kind.as_str().to_owned()));
    let own: EngineConfig = table.try_into().map_err(|error: toml::de::Error| error.message().to_owned())?;
    Ok(template.complete(own))
}

fn endpoint(engine: EngineConfig) -> Endpoint<Own> {
    Endpoint {
        address: engine.url.to_string(),
        identity: None,
        label: engine.name.clone().unwrap_or_else(|| format!("{}{}", engine.url.authority(), engine.url.prefix())),
        readiness: Readiness::Ready,
        options: Some(Box::new(engine)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{EngineKind, Secret};

    fn template() -> EngineTemplate {
        let text = "[[discovery]]\ntype = \"file\"\npath = \"/a\"\n[discovery.engine]\nkind = \"vllm\"\nkey = \"fleet\"\ngroup = \"g\"\nkv_blocks = 100\n";
        GatewayConfig::from_toml(text).unwrap().discovery.remove(0).engine
    }

    fn engines(text: &str, is_json: bool) -> Vec<EngineConfig> {
        parse(text, is_json, &template()).unwrap().into_iter().map(|endpoint| *endpoint.options.unwrap()).collect()
    }

    #[test]
    fn a_list_is_toml_or_json_and_the_template_says_the_rest() {
        let toml = "[[engines]]\nurl = \"http://10.0.0.1:8000\"\n[[engines]]\nurl = \"http://b:1/x\"\nkind = \"sglang\"\nname = \"b\"\nkey = \"own\"\nkv_blocks = 7\n";
        let json =
            r#"[{"url": "http://10.0.0.1:8000"}, {"url": "http://b:1/x", "kind": "sglang", "name": "b", "key": "own", "kv_blocks": 7}]"#;
        let read = engines(toml, false);
        assert_eq!(read, engines(json, true));
        assert_eq!(read, engines(&format!("{{\"engines\": {json}}}"), true));
        assert_eq!((read[0].kind, read[0].kv_blocks, read[0].key.clone()), (EngineKind::Vllm, Some(100), Some(Secret::new("fleet"))));
        assert_eq!((read[1].kind, read[1].kv_blocks, read[1].key.clone()), (EngineKind::Sglang, Some(7), Some(Secret::new("own"))));
        assert!(read.iter().all(|engine| engine.group.as_deref() == Some("g")));
        let labels: Vec<String> = parse(toml, false, &template()).unwrap().into_iter().map(|endpoint| endpoint.label).collect();
        assert_eq!(labels, ["10.0.0.1:8000", "b"]);
        assert!(engines("engines = []\n", false).is_empty() && engines("[]", true).is_empty(), "who says none means it");
    }

    #[test]
    fn what_is_no_list_is_refused_without_its_keys() {
        let wrong = |text: &str, is_json| parse(text, is_json, &template()).unwrap_err();
        for (text, is_json) in [("", false), ("", true), ("{}", true), ("[[engine]]\nurl = \"http://a:1\"\n", false), ("[1]", true)] {
            assert!(!wrong(text, is_json).is_empty(), "{text:?} is a list");
        }
        let engine = |options: &str| format!("[[engines]]\nurl = \"http://a:1\"\n{options}\n");
        assert!(wrong(&engine("kv_block = 1"), false).starts_with("engines[0]: unknown field `kv_block`"));
        assert!(wrong("[[engines]]\nurl = \"ftp://a:1\"\n", false).contains("ftp"));
        assert!(wrong(&engine("kv_blocks = 0"), false).contains("engines[0].kv_blocks = 0"));
        assert!(wrong(&engine("").repeat(2), false).contains("an engine is named twice"));
        assert!(wrong("[{\"url\": \"http://a:1\"},\n{]", true).starts_with("line 2: "));
        for broken in ["key = \"se\\ncret\"", "key = secret", "key = [\"secret\"]"] {
            assert!(!wrong(&engine(broken), false).contains("cret"), "{broken}");
        }
    }
}
