#!/usr/bin/env python3
"""Greedy continuations of 20 prompts by an independent implementation: transformers in float32 on the dequantised weights.

    pip install torch transformers gguf numpy
    python3 greedy_reference.py MODEL.gguf > greedy_reference.json

The GGUF's own tensors are dequantised by the `gguf` package and loaded into `LlamaForCausalLM`; nothing of Baton takes part.
For each prompt: its token ids, 64 greedy tokens (end-of-sequence does not stop it), and the smallest gap between the best and the
second best logit. A gap below 1e-3 could be decided by rounding alone; such a prompt is refused here rather than excused later.
"""
import json
import sys

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = 64
SMALLEST_GAP = 1e-3
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are",
    "1, 1, 2, 3, 5, 8, 13,",
    "In 1969, the first human being",
    "To make a good cup of coffee, you need",
    "SELECT name, age FROM users WHERE",
    "Water boils at 100 degrees Celsius because",
    "Dear hiring manager,\n\nI am writing to",
    "La tour Eiffel est située à",
    "The mitochondria is",
    "Photosynthesis is the process by which plants",
    "import numpy as np\n\nx = np.",
    "Q: What is 7 times 8?\nA:",
    CHAT.format("What is the capital of France? One short sentence."),
    CHAT.format("Write a haiku about rain."),
    CHAT.format("Explain what a load balancer does, in two sentences."),
    CHAT.format("List three prime numbers."),
    CHAT.format("Why is the sky blue?"),
    # Spares, used in order where a prompt above is decided by rounding.
    "The quick brown fox",
    "A neural network is a",
    "Shakespeare wrote",
    "The largest planet in the solar system is",
    CHAT.format("Give me a recipe for pancakes."),
    CHAT.format("What is recursion?"),
]


def unpermute(weight, heads):
    """GGUF stores llama's q and k rows in the order of interleaved rope; transformers wants halves."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def load(path):
    reader = GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    llama = lambda key: fields[f"llama.{key}"]
    heads, kv_heads = llama("attention.head_count"), llama("attention.head_count_kv")
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in reversed(tensor.shape)])
        part = tensor.name.split(".")
        if part[0] == "token_embd":
            name = "model.embed_tokens.weight"
        elif part[0] == "output_norm":
            name = "model.norm.weight"
        elif part[0] == "blk":
            weight = unpermute(weight, {"attn_q": heads, "attn_k": kv_heads}[part[2]]) if part[2] in ("attn_q", "attn_k") else weight
            name = f"model.layers.{part[1]}.{names[part[2]]}.weight"
        else:
            sys.exit(f"no place for tensor {tensor.name}")
        state[name] = torch.from_numpy(np.ascontiguousarray(weight, dtype=np.float32))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    config = LlamaConfig(
        vocab_size=state["lm_head.weight"].shape[0], hidden_size=llama("embedding_length"), intermediate_size=llama("feed_forward_length"),
        num_hidden_layers=llama("block_count"), num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=llama("context_length"), rms_norm_eps=float(llama("attention.layer_norm_rms_epsilon")),
        rope_theta=float(llama("rope.freq_base")), tie_word_embeddings=True, attention_bias=False, mlp_bias=False,
    )
    model = LlamaForCausalLM(config).float().eval()
    model.load_state_dict(state)
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds) if kind in (3, 4)])
    return model, tokenizer


@torch.no_grad()
def continue_greedily(model, prompt):
    ids, gap, cache, output = torch.tensor([prompt]), float("inf"), None, []
    for _ in range(TOKENS):
        result = model(ids, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        best = result.logits[0, -1].topk(2)
        gap = min(gap, (best.values[0] - best.values[1]).item())
        output.append(best.indices[0].item())
        ids = best.indices[:1].view(1, 1)
    return output, gap


def main():
    torch.set_num_threads(1)
    model, tokenizer = load(sys.argv[1])
    rows = []
    for text in PROMPTS:
        prompt = tokenizer.encode(text).ids
        output, gap = continue_greedily(model, prompt)
        print(f"gap {gap:.5f} {text!r} -> {tokenizer.decode(output)!r}", file=sys.stderr)
        if gap >= SMALLEST_GAP and len(rows) < 20:
            rows.append({"text": text, "prompt": prompt, "output": output, "smallest_gap": round(gap, 6)})
    assert len(rows) == 20, f"only {len(rows)} prompts are decided by more than rounding"
    print("[\n " + ",\n ".join(json.dumps(row) for row in rows) + "\n]")


main()
