use std::time::Duration;

use baton_policy::PolicyName;

use super::*;

const ENGINE: &str = "[[engines]]\nurl = \"http://127.0.0.1:1\"\nkind = \"vllm\"\n";

fn faults(text: &str) -> Vec<Fault> {
    match GatewayConfig::from_toml(text) {
        Err(ConfigError::Faults(faults)) => faults,
        other => panic!("{other:?}"),
    }
}

/// All of them, one a line.
fn error(text: &str) -> String {
    faults(text).iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

#[test]
fn durations_sizes_and_names_are_read() {
    let text = format!("[gateway]\ndrain_timeout = \"250ms\"\nbody_limit = \"2KiB\"\n{ENGINE}[policy]\nname = \"round-robin\"\n");
    let config = GatewayConfig::from_toml(&text).unwrap();
    assert_eq!(config.gateway.drain_timeout, Duration::from_millis(250));
    assert_eq!(config.gateway.body_limit, 2048);
    assert_eq!(config.policy.name, PolicyName::RoundRobin);
    assert_eq!(config.engines[0].kind, EngineKind::Vllm);
    assert!(config.moves.enabled && !GatewayConfig::from_toml(&format!("{ENGINE}[moves]\nenabled = false\n")).unwrap().moves.enabled);
}

#[test]
fn what_cannot_work_is_refused_with_its_name() {
    assert!(error(&format!("[gateway]\nattemps = 3\n{ENGINE}")).contains("attemps"));
    assert!(error(&format!("[gateway]\nattempts = 0\n{ENGINE}")).contains("gateway.attempts"));
    assert!(error(&format!("[gateway]\ndrain_timeout = 3\n{ENGINE}")).contains("drain_timeout"));
    assert!(error(&format!("[policy]\nname = \"cheapest\"\n{ENGINE}")).contains("cheapest"));
    assert!(error("[gateway]\n").contains("[[engines]]"));
    assert!(error(&format!("{ENGINE}[moves]\nenable = true\n")).contains("enable"));
    assert!(error("[[engines]]\nurl = \"ftp://a\"\nkind = \"vllm\"\n").contains("https"));
    assert!(error(&format!("{ENGINE}ca = \"/no/such/file\"\n")).contains("/no/such/file gives no certificate"));
    assert!(error(&format!("[gateway]\nconnections = 0\n{ENGINE}")).contains("gateway.connections"));
    let too_little = error(&format!("[gateway]\ntext_cache_bytes = \"1KiB\"\n{ENGINE}"));
    assert!(too_little.contains("line 2: gateway.text_cache_bytes = 1024") && too_little.contains("64KiB"), "{too_little}");
    assert!(error(&format!("[gateway]\nreceive_timeout = \"0s\"\n{ENGINE}")).contains("gateway.receive_timeout"));
    assert!(error(&format!("{ENGINE}[policy]\nindex_snapshot = \"\"\n")).contains("policy.index_snapshot = \"\""));
    let class = |options: &str| format!("{ENGINE}[[policy.classes]]\nname = \"a\"\nstart_within = \"1s\"\n{options}\n");
    assert!(error(&class("slo_ttft = \"0s\"")).contains("policy.classes[0].slo_ttft"));
    let objective = GatewayConfig::from_toml(&class("slo_ttft = \"300ms\"")).unwrap().policy.router().classes[0].slo_ttft;
    assert_eq!(objective, Some(Duration::from_millis(300)));
    let key = error(&format!("{ENGINE}key = \"top\\nsecret\"\n"));
    assert!(key.contains("line 4: engines[0].key") && !key.contains("secret"), "{key}");
    assert!(error(&format!("[gateway]\nstall_timeout = \"0s\"\n{ENGINE}")).contains("gateway.stall_timeout"));
    assert!(error(&format!("{ENGINE}[policy.weights]\nwaste = -1\n")).contains("policy.weights.waste = -1"));
    assert!(error(&format!("{ENGINE}{ENGINE}")).contains("line 5: engines[1].url = http://127.0.0.1:1"));
    let other = ENGINE.replace(":1\"", ":2\"");
    assert!(error(&format!("{ENGINE}name = \"r1\"\n{other}")).contains("engines[1].name = r1"), "the second one's default name");
}

#[test]
fn a_key_is_not_printed() {
    let mut engine = EngineConfig::new("http://h:1".parse().unwrap(), EngineKind::OpenAi);
    engine.key = Some(Secret::new("secret"));
    assert!(!format!("{engine:?}").contains("secret"));
}

#[test]
fn every_mistake_is_told_with_its_line_and_the_nearest_name() {
    let text =
        "[gateway]\nattemps = 3\nqueue = 5\n\n[[engines]]\nurl = \"http://127.0.0.1:1\"\nkind = \"vlm\"\n\n[polcy]\nname = \"price\"\n";
    let told: Vec<(Option<usize>, String)> =
        faults(text).into_iter().map(|fault| (fault.line, format!("{} = {}", fault.option, fault.what))).collect();
    assert_eq!(told[0], (Some(2), "gateway.attemps = unknown; did you mean attempts?".to_owned()));
    assert_eq!(told[1], (Some(3), "gateway.queue = unknown; it belongs in [policy]".to_owned()));
    assert!(told[2].0 == Some(7) && told[2].1.starts_with("engines[0].kind = \"vlm\": ") && told[2].1.contains("vllm"), "{told:?}");
    assert_eq!(told[3], (Some(9), "polcy = unknown; did you mean policy?".to_owned()));
    assert_eq!(told.len(), 4);
    let one = GatewayConfig::from_toml(text).unwrap_err().to_string();
    assert_eq!(one, "line 2: gateway.attemps = unknown; did you mean attempts? (and 3 more; `baton check-config` lists all)");
}

#[test]
fn what_is_no_toml_is_told_by_its_line() {
    let broken = faults(&format!("{ENGINE}\nname = \n"));
    assert_eq!(broken.len(), 1);
    assert_eq!(broken[0].line, Some(5), "{broken:?}");
}

#[test]
fn a_wrong_type_is_told_with_its_option() {
    let told = error(&format!("{ENGINE}[gateway]\n\nattempts = \"three\"\n"));
    assert!(told.starts_with("line 6: gateway.attempts = \"three\": "), "{told}");
}

#[test]
fn keys_come_from_the_file_an_environment_or_another_file() {
    let path = std::env::temp_dir().join(format!("baton-key-{}", std::process::id()));
    std::fs::write(&path, "from a file\n").unwrap();
    let key =
        |value: &str| GatewayConfig::from_toml(&format!("{ENGINE}key = {value}\n")).map(|config| config.engines[0].key.clone().unwrap());
    assert_eq!(key("\"plain\"").unwrap().reveal(), "plain");
    assert_eq!(key(&format!("{{ file = {path:?} }}")).unwrap().reveal(), "from a file");
    // Set wherever a shell or cargo runs.
    assert_eq!(key("{ env = \"PATH\" }").unwrap().reveal(), std::env::var("PATH").unwrap());
    std::fs::remove_file(&path).unwrap();
    let missing = key(&format!("{{ file = {path:?} }}")).unwrap_err().to_string();
    assert!(missing.contains("cannot be read"), "{missing}");
    let unset = key("{ env = \"BATON_NO_SUCH_KEY\" }").unwrap_err().to_string();
    assert!(unset.contains("BATON_NO_SUCH_KEY is not set"), "{unset}");
    assert!(key("{ enw = \"PATH\" }").is_err() && key("\"\"").is_err() && key("3").is_err());
    let wrong = key("[\"hidden\"]").unwrap_err().to_string();
    assert!(!wrong.contains("hidden"), "{wrong}");
}

#[test]
fn clients_keys_are_hashes_in_the_file_and_are_never_told() {
    let key = |value: &str| {
        let text = format!("{ENGINE}[[tenants]]\nname = \"a\"\nkeys = [{value}]\nisolation = \"none\"\n");
        GatewayConfig::from_toml(&text).map(|config| config.tenants[0].keys[0])
    };
    let hash = KeyHash::of(b"secret");
    assert_eq!(hash.to_string(), "sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b");
    assert_eq!(key(&format!("\"{hash}\"")).unwrap(), hash);
    let path = std::env::temp_dir().join(format!("baton-client-key-{}", std::process::id()));
    for held in ["secret\n".to_owned(), format!("{hash}\n")] {
        std::fs::write(&path, held).unwrap();
        assert_eq!(key(&format!("{{ file = {path:?} }}")).unwrap(), hash);
    }
    std::fs::remove_file(&path).unwrap();
    for wrong in
        ["\"secret\"".to_owned(), format!("\"{}\"", &hash.to_string()[..70]), "\"sha256:secret\"".to_owned(), "[\"secret\"]".to_owned()]
    {
        let told = key(&wrong).unwrap_err().to_string();
        assert!(told.contains("tenants[0].keys") && !told.contains("secret") && !told.contains("2bb8"), "{told}");
    }
}

#[test]
fn tenants_that_cannot_be_are_refused() {
    let hash = KeyHash::of(b"secret");
    let tenant = |options: &str| format!("[[tenants]]\nname = \"a\"\nkeys = [\"{hash}\"]\nisolation = \"none\"\n{options}\n");
    let told = |options: &str| error(&format!("{ENGINE}{}", tenant(options)));
    assert!(GatewayConfig::from_toml(&format!("{ENGINE}{}", tenant("priority_max = 5"))).is_ok());
    assert!(told("concurrency = 0").contains("line 8: tenants[0].concurrency = 0"));
    assert!(told("weight = 0").contains("tenants[0].weight = 0") && told("weight = nan").contains("tenants[0].weight"));
    assert!(told("tokens_per_minute = 0").contains("tenants[0].tokens_per_minute"));
    assert!(told("classes = [\"night\"]").contains("tenants[0].classes = \"night\": no [[policy.classes]]"));
    let class = "[[policy.classes]]\nname = \"first\"\nstart_within = \"1s\"\n[[policy.classes]]\nname = \"rest\"\nfrom = 0\nstart_within = \"1s\"\n";
    let contradiction = told(&format!("classes = [\"first\"]\npriority_max = 3\n{class}"));
    assert!(contradiction.contains("no priority is both in its classes"), "{contradiction}");
    let twice = error(&format!("{ENGINE}{}{}", tenant(""), tenant("")));
    assert!(twice.contains("tenants[1].name = a") && twice.contains("tenants[1].keys = (not shown)"), "{twice}");
    assert!(error(&format!("{ENGINE}[[tenants]]\nname = \"a\"\nkeys = []\n")).contains("nobody can be this tenant"));
    assert!(error(&format!("{ENGINE}[[tenants]]\nname = \"a\"\n")).contains("keys"));
}

#[test]
fn tenants_are_kept_apart_only_where_that_is_possible() {
    let tenants = format!("[[tenants]]\nname = \"a\"\nkeys = [\"{}\"]\n", KeyHash::of(b"secret"));
    let secret = |secret: &str| format!("[gateway]\nsalt_secret = \"{secret}\"\n");
    let long = secret("0123456789abcdef");
    assert!(GatewayConfig::from_toml(&format!("{ENGINE}{long}{tenants}")).is_ok());
    assert!(
        error(&format!("{ENGINE}{tenants}"))
            .contains("line 4: tenants[0].isolation = \"salt\": salts need a secret; set [gateway] salt_secret")
    );
    let short = error(&format!("{ENGINE}{}{tenants}", secret("0123456789")));
    assert!(short.contains("line 5: gateway.salt_secret = (not shown)") && !short.contains("01234"), "{short}");
    let llama = ENGINE.replace("vllm", "llamacpp");
    assert!(
        error(&format!("{llama}{long}{tenants}")).contains("line 3: engines[0].kind = \"llamacpp\": engines of this kind take no salt")
    );
}

#[test]
fn public_prefixes_are_texts_or_files_with_them() {
    let read = |table: &str| GatewayConfig::from_toml(&format!("{ENGINE}[[public_prefixes]]\n{table}\n"));
    let file = std::env::temp_dir().join(format!("baton-public-{}", std::process::id()));
    std::fs::write(&file, "Be kind.\n").unwrap();
    let config = read(&format!("system = {{ file = \"{}\" }}\ntext = \"Be brief.\"", file.display())).unwrap();
    std::fs::remove_file(&file).unwrap();
    let [prefix] = &config.public_prefixes[..] else { panic!("{config:?}") };
    assert_eq!((prefix.system.as_ref().unwrap().as_str(), prefix.text.as_ref().unwrap().as_str()), ("Be kind.\n", "Be brief."));
    let told = |table: &str| read(table).unwrap_err().to_string();
    assert!(told("").contains("line 4: public_prefixes[0].system = (none): nothing is public by this"), "{}", told(""));
    assert!(told("system = \"\"").contains("at least one character"));
    assert!(told("system = { file = \"/nowhere\" }").contains("/nowhere cannot be read"));
    assert!(told("system = 5").contains("public_prefixes[0].system"));
}

#[test]
fn the_skeleton_is_valid_and_has_the_defaults() {
    let config = GatewayConfig::from_toml(&skeleton()).unwrap();
    assert_eq!(config.engines.len(), 1);
    assert_eq!(GatewayConfig { engines: Vec::new(), ..config }, GatewayConfig::default());
}

#[test]
fn every_example_of_the_skeleton_is_valid() {
    let skeleton = skeleton();
    // Sources of several types are not one.
    let (text, _) = skeleton.split_once("\n# [[discovery]]\n").unwrap();
    let text: Vec<String> = text
        .lines()
        // The one names a file that is read with the configuration, the other is for another kind of engine.
        .filter(|line| !line.starts_with("# ca = ") && !line.starts_with("# slot_path = "))
        .map(|line| {
            let is_name = |name: &str| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
            let is_example = |text: &&str| text.starts_with('[') || text.split_once(" = ").is_some_and(|(name, _)| is_name(name));
            line.strip_prefix("# ").filter(is_example).unwrap_or(line).to_owned()
        })
        .collect();
    let names = ["BATON_ADMIN_KEY", "BATON_SALT_SECRET", "VLLM_API_KEY", "TEAM_A_KEY"];
    let text = names.iter().fold(text.join("\n"), |text, name| text.replace(name, "PATH"));
    let config = GatewayConfig::from_toml(&text).unwrap();
    assert!(config.gateway.admin_key.is_some() && config.engines[0].group.is_some() && config.policy.classes[0].slo_ttft.is_some());
    assert!(config.tenants[0].concurrency.is_some() && config.gateway.tls.is_some());
}

/// Options of a table as the skeleton shows them, by name.
fn examples(of: &str) -> Vec<(String, String)> {
    let skeleton = skeleton();
    let (_, rest) = skeleton.split_once(&format!("\n# {of}\n")).unwrap();
    let options = rest.lines().take_while(|line| !line.starts_with("# [")).filter_map(|line| line.strip_prefix("# ")?.split_once(" = "));
    let plain = |name: &str| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    options.filter(|(name, _)| plain(name)).map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn source(options: &str) -> String {
    format!("[[discovery]]\n{options}\nengine.kind = \"vllm\"\n")
}

#[test]
fn every_example_of_a_source_is_valid_for_its_type() {
    let (of_source, of_engine) = (examples("[[discovery]]"), examples("[discovery.engine]"));
    assert_eq!((of_source.len(), of_engine.len()), (13, 15));
    for (of, options) in [
        ("dns", &["name", "port"][..]),
        ("file", &["path"]),
        ("kubernetes", &["port", "service", "namespace", "kubeconfig"]),
        ("kubernetes", &["selector", "api", "token_file", "ca_file"]),
    ] {
        let options = options.iter().chain(&["every", "max_engines"]);
        let value = |name: &str| &of_source.iter().find(|(known, _)| known == name).unwrap().1;
        let options: Vec<String> = options.map(|name| format!("{name} = {}", value(name))).collect();
        // The example is of another kind of engine.
        let of_kind = of_engine.iter().filter(|(name, _)| name != "slot_path");
        let engine: Vec<String> = of_kind.map(|(name, value)| format!("{name} = {value}")).collect();
        let text = format!("[[discovery]]\ntype = \"{of}\"\n{}\n[discovery.engine]\n{}\n", options.join("\n"), engine.join("\n"));
        let config = GatewayConfig::from_toml(&text.replace("VLLM_API_KEY", "PATH")).unwrap();
        assert!(config.discovery[0].source().is_ok() && config.discovery[0].engine.key.is_some());
        let engine = config.discovery[0].engine.at("http://h:1".parse().unwrap());
        assert_eq!(config.discovery[0].engine.complete(engine.clone()), engine);
        assert!(engine.group.is_some() && engine.priorities == Some(false) && engine.kv_replay.is_some());
    }
}

#[test]
fn a_source_needs_what_it_looks_for_and_nothing_else() {
    let told = |options: &str| error(&source(options));
    assert!(told("type = \"consul\"").contains("discovery[0].type = \"consul\": "));
    assert!(told("type = \"dns\"\nport = 1").contains("discovery[0].name = (missing): say which name"));
    assert!(told("type = \"dns\"\nname = \"a\"").contains("discovery[0].port = (missing)"));
    assert!(told("type = \"dns\"\nname = \"a\"\nport = \"http\"").contains("discovery[0].port = http: must be a number"));
    assert!(told("type = \"dns\"\nname = \"a\"\nport = 70000").contains("a port is a number up to 65535"));
    assert!(told("type = \"file\"").contains("discovery[0].path = (missing)"));
    let foreign = told("type = \"file\"\npath = \"/a\"\nservice = \"s\"");
    assert_eq!(foreign, "line 4: discovery[0].service = s: means nothing to a source of type file");
    assert!(told("type = \"kubernetes\"").contains("discovery[0].service = (missing)"));
    let kubernetes = |options: &str| told(&format!("type = \"kubernetes\"\nservice = \"s\"\n{options}"));
    assert!(kubernetes("selector = \"a=b\"").contains("not both"));
    assert!(kubernetes("token_file = \"/t\"").contains("goes with `api`"));
    assert!(kubernetes("api = \"ftp://h\"").contains("give https://HOST:PORT"));
    assert!(kubernetes("api = \"https://h\"\nkubeconfig = \"/k\"").contains("not both"));
    assert!(kubernetes("every = \"0s\"").contains("discovery[0].every"));
    assert!(kubernetes("every = \"25h\"").contains("discovery[0].every = 1day 1h: "));
    assert!(kubernetes("max_engines = 0").contains("discovery[0].max_engines"));
    assert!(kubernetes("max_engines = 5000").contains("at most 4096"));
    assert!(kubernetes("engine.kv_blocks = 0").contains("discovery[0].engine.kv_blocks = 0: must be at least 1"));
    assert!(kubernetes("engine.kv_events = \"tcp://10.0.0.1:5557\"").contains("give tcp://*:PORT"));
    assert!(kubernetes("servce = \"s\"").contains("discovery.servce = unknown; did you mean service?"));
    assert!(kubernetes("engine.kin = \"s\"").contains("discovery.engine.kin = unknown; did you mean kind?"));
    let twice = source("type = \"file\"\npath = \"/a\"");
    assert!(error(&format!("{twice}{twice}")).contains("line 6: discovery[1].type = file:/a: a source is named twice"));
    let ports = ["1", "2"].map(|port| source(&format!("type = \"dns\"\nname = \"a\"\nport = {port}")));
    assert_eq!(GatewayConfig::from_toml(&ports.concat()).unwrap().discovery.len(), 2, "another port is another source");
}

#[test]
fn ranks_are_replicas_with_names_and_ports_of_their_own() {
    let engine = |options: &str| format!("[[engines]]\nurl = \"http://a:1\"\nkind = \"vllm\"\n{options}\n");
    let two = engine("name = \"a\"\ndata_parallel_size = 2\nkv_events = \"tcp://*:5557\"");
    assert_eq!(GatewayConfig::from_toml(&two).unwrap().engines[0].replicas(), 2);
    let other = "[[engines]]\nurl = \"http://b:1\"\nkind = \"vllm\"\nname = \"a-dp1\"\n";
    assert!(error(&(two + other)).contains("engines[1].name = a-dp1: each engine needs a name of its own"));
    let told = |options: &str| error(&engine(options));
    assert!(told("data_parallel_size = 0").contains("data_parallel_size = 0: must be at least 1"));
    assert!(told("data_parallel_size = 5000").contains("a fleet has at most 4096 replicas"));
    assert!(told("data_parallel_size = 2\nkv_events = \"ipc://a\"").contains("give tcp://HOST:PORT"));
    let llamacpp = engine("data_parallel_size = 2").replace("vllm", "llamacpp");
    assert!(error(&llamacpp).contains("only vllm and sglang engines have ranks"));
    let sources = "data_parallel_size = 8".to_owned();
    assert!(error(&source(&format!("type = \"file\"\npath = \"/a\"\nengine.{sources}"))).contains("each rank of an engine counted"));
}

#[test]
fn the_published_reference_is_that_of_the_types() {
    let page = include_str!("../../../../docs/configuration.md");
    assert!(page == reference(), "`cargo run -p baton -- check-config --reference > docs/configuration.md` makes it anew");
}

/// As in `docs/engines.md`.
fn table_of_engines() -> String {
    use crate::{config::EngineKind, intake::Api};
    const KINDS: [EngineKind; 5] = [EngineKind::Baton, EngineKind::Vllm, EngineKind::Sglang, EngineKind::LlamaCpp, EngineKind::OpenAi];
    type Shows = fn(EngineKind) -> bool;
    let rows: [(&str, Shows); 8] = [
        ("token ids in streams of chats", |kind| kind.gives_token_ids(Api::Chat)),
        ("token ids in streams of completions", |kind| kind.gives_token_ids(Api::Completions)),
        ("computes from token ids, so that it can go on with streams", |kind| kind.token_api().is_some()),
        ("an answer in one piece is streamed and put together here, and may begin anew", EngineKind::streams_fully),
        ("usage with each stream", EngineKind::gives_usage),
        ("cache salts, so that tenants may be kept apart", EngineKind::takes_salt),
        ("several ranks behind one address, each a replica here", EngineKind::has_ranks),
        ("tells its speed; that of others is fitted to first tokens", EngineKind::reports_steps),
    ];
    let line = |cells: Vec<&str>| format!("| {} |\n", cells.join(" | "));
    let mut table = line([vec![""], KINDS.map(EngineKind::as_str).to_vec()].concat());
    table += &line(["---"; KINDS.len() + 1].to_vec());
    for (what, shows) in rows {
        table += &line([vec![what], KINDS.map(|kind| if shows(kind) { "yes" } else { "-" }).to_vec()].concat());
    }
    table
}

#[test]
fn the_published_table_of_engines_is_that_of_their_contract() {
    let page = include_str!("../../../../docs/engines.md");
    let table = table_of_engines();
    assert!(page.contains(&table), "docs/engines.md should have this table:\n{table}");
}
