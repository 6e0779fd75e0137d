//! The real weights against an independent implementation (`reference/greedy_reference.py`).

use baton_engine::Executor;
use baton_model::CpuExecutor;

use crate::support::{Sequence, batch, config, free_blocks, greedy};

struct Case {
    text: String,
    prompt: Vec<u32>,
    output: Vec<u32>,
}

fn cases() -> Vec<Case> {
    let all: serde_json::Value = serde_json::from_str(include_str!("../reference/greedy_reference.json")).expect("the fixture is JSON");
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        value.as_array().expect("a list").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    let case = |case: &serde_json::Value| Case {
        text: case["text"].as_str().expect("text").to_owned(),
        prompt: ids(&case["prompt"]),
        output: ids(&case["output"]),
    };
    all.as_array().expect("a list of cases").iter().map(case).collect()
}

#[test]
fn greedy_continuations_equal_transformers_in_float32() {
    let mut executor = CpuExecutor::load(&baton_testkit::smollm2(), &config()).unwrap();
    let params = greedy();
    let cases = cases();
    assert_eq!(cases.len(), 20);
    let mut free = free_blocks(256);
    let mut sequences: Vec<Sequence> = cases.iter().map(|case| Sequence::new(&case.prompt)).collect();
    let steps = cases[0].output.len();
    for _ in 0..steps {
        for sequence in &mut sequences {
            sequence.reserve(sequence.tokens.len(), 16, &mut free);
        }
        let rows = sequences.iter().map(|sequence| sequence.row(sequence.tokens.len() - sequence.computed, &params)).collect();
        let result = executor.step(&batch(rows));
        for (sequence, sample) in sequences.iter_mut().zip(result.samples) {
            sequence.computed = sequence.tokens.len();
            sequence.tokens.push(sample.expect("every row samples").token);
        }
    }
    for (case, sequence) in cases.iter().zip(&sequences) {
        assert_eq!(sequence.tokens[case.prompt.len()..], case.output, "{}", case.text);
    }
}
