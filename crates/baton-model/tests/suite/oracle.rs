//! Small models of every family against a slow and obvious forward pass in f64.

use baton_gguf::TensorKind;
use baton_model::{CpuExecutor, testing};

use crate::support::{Sequence, batch, config, free_blocks, greedy};
use crate::tiny::{EPS, FFN, Family, Folder, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, ROPE_BASE, Tiny};

type Vector = Vec<f64>;

struct Oracle<'a>(&'a Tiny);

impl Oracle<'_> {
    fn find(&self, name: &str) -> Option<Vector> {
        let weights = self.0.tensors.get(name)?;
        Some(testing::dequantise(weights.kind, &weights.bytes).into_iter().map(f64::from).collect())
    }

    fn get(&self, name: &str) -> Vector {
        self.find(name).unwrap_or_else(|| panic!("no {name}"))
    }

    fn project(&self, name: &str, x: &[f64]) -> Vector {
        let weights = self.get(&format!("{name}.weight"));
        let bias = self.find(&format!("{name}.bias"));
        let row = |(index, row): (usize, &[f64])| dot(row, x) + bias.as_ref().map_or(0.0, |bias| bias[index]);
        weights.chunks_exact(x.len()).enumerate().map(row).collect()
    }

    /// Logits after each token.
    fn logits(&self, tokens: &[u32]) -> Vec<Vector> {
        let embedding = self.get("token_embd.weight");
        let mut hidden: Vec<Vector> = tokens.iter().map(|&token| embedding[token as usize * HIDDEN..][..HIDDEN].to_vec()).collect();
        for layer in 0..LAYERS {
            self.layer(&format!("blk.{layer}"), &mut hidden);
        }
        let head = if self.find("output.weight").is_some() { "output" } else { "token_embd" };
        let norm = self.get("output_norm.weight");
        hidden.iter().map(|x| self.project(head, &rms_norm(x, &norm))).collect()
    }

    fn layer(&self, layer: &str, hidden: &mut [Vector]) {
        let norm = self.get(&format!("{layer}.attn_norm.weight"));
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (position, x) in hidden.iter_mut().enumerate() {
            let normed = rms_norm(x, &norm);
            let queries = self.rotated(&format!("{layer}.attn_q"), &normed, position);
            keys.push(self.rotated(&format!("{layer}.attn_k"), &normed, position));
            values.push(self.project(&format!("{layer}.attn_v"), &normed));
            let attended: Vector = (0..HEADS).flat_map(|head| attend(head, &queries, &keys, &values)).collect();
            add(x, &self.project(&format!("{layer}.attn_output"), &attended));
        }
        let norm = self.get(&format!("{layer}.ffn_norm.weight"));
        for x in hidden {
            let normed = rms_norm(x, &norm);
            let gate = self.project(&format!("{layer}.ffn_gate"), &normed);
            let up = self.project(&format!("{layer}.ffn_up"), &normed);
            let gated: Vector = gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
            assert_eq!(gated.len(), FFN);
            add(x, &self.project(&format!("{layer}.ffn_down"), &gated));
        }
    }

    fn rotated(&self, name: &str, x: &[f64], position: usize) -> Vector {
        let norm = self.find(&format!("{name}_norm.weight"));
        let head = |head: &[f64]| {
            let head = norm.as_ref().map_or_else(|| head.to_vec(), |norm| rms_norm(head, norm));
            rotate(&head, position)
        };
        self.project(name, x).chunks_exact(HEAD_DIM).flat_map(head).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn rms_norm(x: &[f64], weight: &[f64]) -> Vector {
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + EPS).sqrt();
    x.iter().zip(weight).map(|(x, weight)| x * scale * weight).collect()
}

fn rotate(head: &[f64], position: usize) -> Vector {
    let half = HEAD_DIM / 2;
    let turned = |i: usize| {
        let pair = i % half;
        let angle = position as f64 * ROPE_BASE.powf(-2.0 * pair as f64 / HEAD_DIM as f64);
        let (a, b) = (head[pair], head[pair + half]);
        if i < half { a * angle.cos() - b * angle.sin() } else { b * angle.cos() + a * angle.sin() }
    };
    (0..HEAD_DIM).map(turned).collect()
}

fn attend(head: usize, queries: &[f64], keys: &[Vector], values: &[Vector]) -> Vector {
    let of = |vector: &[f64], head: usize| vector[head * HEAD_DIM..][..HEAD_DIM].to_vec();
    let (query, shared) = (of(queries, head), head / (HEADS / KV_HEADS));
    let weights: Vector = keys.iter().map(|key| (dot(&query, &of(key, shared)) / (HEAD_DIM as f64).sqrt()).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; HEAD_DIM];
    for (weight, value) in weights.iter().zip(values) {
        add(&mut out, &of(value, shared).iter().map(|value| value * weight / sum).collect::<Vector>());
    }
    out
}

/// Logits after each token, decoding token by token.
fn logits(executor: &mut CpuExecutor, tokens: &[u32]) -> Vec<Vec<f32>> {
    let params = greedy();
    let mut free = free_blocks(16);
    let mut sequence = Sequence::default();
    let mut all = Vec::new();
    for &token in tokens {
        sequence.tokens.push(token);
        sequence.reserve(sequence.tokens.len(), 16, &mut free);
        all.extend(executor.logits(&batch(vec![sequence.row(1, &params)])));
        sequence.computed += 1;
    }
    all
}

#[test]
fn every_family_equals_a_plain_forward_pass() {
    let folder = Folder::new();
    let tokens: Vec<u32> = (0..40).map(|i| i * 37 % 250).collect();
    for family in Family::ALL {
        for kind in [TensorKind::F32, TensorKind::BF16, TensorKind::Q4_1, TensorKind::Q6_K] {
            let tiny = Tiny::new(family, kind, 5);
            let path = folder.file("model.gguf", &tiny.to_gguf());
            let found = logits(&mut CpuExecutor::load(&path, &config()).unwrap(), &tokens);
            for (position, (found, expected)) in found.iter().zip(Oracle(&tiny).logits(&tokens)).enumerate() {
                for (found, expected) in found.iter().zip(expected) {
                    let close = (f64::from(*found) - expected).abs() <= 1e-4 * (1.0 + expected.abs());
                    assert!(close, "{family:?} {kind} after token {position}: {found} against {expected}");
                }
            }
        }
    }
}

/// The rows of Q and K lie in another order in the two formats, yet the arithmetic is the same.
#[test]
fn gguf_and_safetensors_of_the_same_weights_give_the_same_bits() {
    let folder = Folder::new();
    let tokens: Vec<u32> = (0..20).map(|i| i * 53 % 250).collect();
    for family in Family::ALL {
        for (shards, kind) in [(1, TensorKind::F32), (3, TensorKind::F16), (2, TensorKind::BF16)] {
            let tiny = Tiny::new(family, kind, 9);
            let gguf = folder.file("same.gguf", &tiny.to_gguf());
            let hugging_face = folder.path().join(format!("{}-{shards}", family.name()));
            tiny.write_hugging_face(&hugging_face, shards);
            let from = |path| logits(&mut CpuExecutor::load(path, &config()).unwrap(), &tokens);
            assert_eq!(from(&gguf), from(&hugging_face), "{family:?} {kind} in {shards} files");
        }
    }
}
