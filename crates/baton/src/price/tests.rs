use clap::Parser;
use serde_json::Value;

use super::*;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: PriceArgs,
}

fn run_with(line: &str) -> anyhow::Result<String> {
    let args = Cli::try_parse_from(std::iter::once("price").chain(line.split_whitespace()))?.args;
    let mut out = Vec::new();
    run(&args, &mut out)?;
    Ok(String::from_utf8(out)?)
}

fn json(line: &str) -> Value {
    serde_json::from_str(&run_with(line).unwrap()).unwrap()
}

fn close(value: &Value, want: f64) -> bool {
    (value.as_f64().unwrap() / want - 1.0).abs() < 0.005
}

#[test]
fn the_example_of_the_readme_prices_the_reference_machine() {
    let quote = json("--model llama-2-7b-gqa8 --device h100 --tokens 4096 --link nvlink --json");
    assert!(close(&quote["prefill"]["prefill_ms"], 129.44), "{quote}");
    assert!(close(&quote["migration"]["migration_ms"], 1.342), "{quote}");
    assert!(close(&quote["migration"]["break_even_bytes_per_s"], 4.1475e9), "{quote}");
    assert!(close(&quote["affinity"]["affinity_budget_ms"], 129.44), "{quote}");
    let text = run_with("--model llama-2-7b-gqa8 --device h100 --tokens 4096 --link nvlink").unwrap();
    for part in ["llama-2-7b-gqa8 on h100, link nvlink", "129.4 ms", "536.9 MB", "1.342 ms", "4.148 GB/s"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn options_reach_the_prices() {
    let quote = json("--tokens 4850 --cached 4465 --batch 164 --context 2500 --bandwidth 25 --json");
    assert!(close(&quote["prefill"]["prefill_ms"], 12.47), "{quote}");
    assert!(close(&quote["decode"]["decode_memory_ms"], 20.07), "{quote}");
    assert_eq!(quote["link"]["bytes_per_s"], 25e9);
    let halved = json("--tokens 4096 --kv-bytes 1 --mfu 0.25 --json");
    assert_eq!(halved["memory"]["kv_bytes_per_token"], 65536.0);
    assert!(close(&halved["prefill"]["prefill_ms"], 258.88), "{halved}");
    let chunked = json("--tokens 4096 --chunk 1024 --json");
    let whole = json("--tokens 4096 --json");
    assert!(chunked["prefill"]["prefill_steps_ms"] != whole["prefill"]["prefill_steps_ms"]);
}

#[test]
fn adapters_experts_and_agent_tasks_are_priced_on_request() {
    let quote = json("--model llama-2-7b --lora-rank 16 --link pcie --json");
    assert!(close(&quote["adapters"]["adapter_load_ms"], 0.5243), "{quote}");
    assert!(close(&quote["adapters"]["adapter_hit_rate"], 0.6623), "{quote}");
    let quote = json("--model mixtral-8x7b --device h200 --batch 30 --json");
    assert!(close(&quote["experts"]["saturation_batch"], 10.41), "{quote}");
    let quote = json("--agent 20,2000,300 --json");
    assert!(close(&quote["agent"]["hit_rate_random"], 0.1151), "{quote}");
    assert!(json("--json")["agent"].is_null());
}

#[test]
fn a_move_is_priced_by_each_way_and_link() {
    let prices = json("move --json");
    let links = prices["links"].as_array().unwrap();
    let copies: Vec<f64> = links.iter().map(|link| link["copy_ms"].as_f64().unwrap()).collect();
    for (got, want) in copies.iter().zip([1.342, 8.389, 21.47]) {
        assert!((got / want - 1.0).abs() < 0.02, "{copies:?}");
    }
    for link in links {
        assert!(link["cheapest"] == "kv" && close(&link["recompute"]["compute_ms"], 129.44), "{link}");
    }
    let waiting = json("move --waiting --bandwidth 1 --latency 2ms --held 1024 --queue 50ms --json");
    let link = &waiting["links"][0];
    assert!(waiting["links"].as_array().unwrap().len() == 1 && link["kv"].is_null() && link["cheapest"] == "recompute", "{waiting}");
    assert!(link["recompute"]["gap_ms"].as_f64() > link["recompute"]["compute_ms"].as_f64().map(|ms| ms + 50.0), "{waiting}");
    let text = run_with("move --link ethernet").unwrap();
    for part in ["4096 tokens that decodes", "ethernet, 25 GB/s", "2 rounds", "copied live", "cheapest", "above 4.148 GB/s"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(text.matches("cheapest").count(), 1, "{text}");
}

#[test]
fn a_wrong_name_or_number_is_told_in_one_line_that_helps() {
    for (line, part) in [
        ("--model gpt-9", "no model is named \"gpt-9\"; the names are llama-2-7b, "),
        ("--device h900", "the names are a100, h100, h200, b200, l40s, a10, cpu"),
        ("--link ropes", "the names are nvlink, pcie, ethernet"),
        ("--tokens 10 --cached 11", "--cached is 11, more than the 10 tokens of the prompt"),
        ("--bandwidth 0", "--bandwidth is 0; give a number above 0"),
        ("--tokens 4000000000", "--tokens is 4000000000; give at most 10000000"),
        ("--batch 0", "--batch is 0; give at least 1"),
        ("--mfu 2", "--mfu is 2"),
        ("move --link ropes", "the names are nvlink, pcie, ethernet"),
        ("move --tokens 10 --held 11", "--held is 11, more than the 10 tokens of the sequence"),
    ] {
        let error = run_with(line).unwrap_err();
        let bad = error.downcast_ref::<BadInput>().unwrap_or_else(|| panic!("{line}: {error}"));
        assert!(bad.to_string().contains(part) && !bad.to_string().contains('\n'), "{line}: {bad}");
    }
    for line in ["--agent 20,2000", "--agent 0,1,1", "--link nvlink --bandwidth 3", "lecture --tokens 3"] {
        assert!(run_with(line).is_err(), "{line}");
    }
}

#[test]
fn the_lecture_prints_every_row_and_says_what_is_disputed() {
    let rows = json("lecture --json");
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), lecture::rows().len());
    let disputed = rows.iter().find(|row| row["id"] == "prefill_32k").unwrap();
    assert!(close(&disputed["value"], 2.0317) && disputed["status"] == "disputed" && disputed["note"].is_string(), "{disputed}");
    let text = run_with("lecture").unwrap();
    assert!(text.lines().any(|line| line.starts_with("prefill_4k") && line.contains("129.4 ms")), "{text}");
}

#[test]
fn a_model_is_read_from_a_config_or_a_gguf_file() {
    let folder = std::env::temp_dir().join(format!("baton-price-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let config = r#"{"model_type":"llama","hidden_size":576,"intermediate_size":1536,"num_hidden_layers":30,"num_attention_heads":9,
        "num_key_value_heads":3,"vocab_size":49152,"tie_word_embeddings":true}"#;
    std::fs::write(folder.join("config.json"), config).unwrap();
    std::fs::write(folder.join("broken.gguf"), b"GGUF\x03\0\0\0").unwrap();
    let by_folder = find_model(folder.to_str().unwrap()).unwrap();
    let by_file = find_model(folder.join("config.json").to_str().unwrap()).unwrap();
    let broken = find_model(folder.join("broken.gguf").to_str().unwrap()).unwrap_err();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(by_folder, by_file);
    assert_eq!(by_file.params(), ModelShape::preset("smollm2-135m").unwrap().params());
    assert!(broken.downcast_ref::<BadInput>().unwrap().to_string().contains("broken.gguf: the file ends at byte 8"), "{broken}");
}
