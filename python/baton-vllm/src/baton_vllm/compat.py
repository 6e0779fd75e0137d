"""Which vLLM this goes with. What was not tried is refused, by name and with what to do."""

from __future__ import annotations

from typing import Any

VERSIONS = ("0.32.",)
DRAWS = "baton_vllm.draws:KeyedDraws"


def version_problem(version: str) -> str | None:
    if version.startswith(VERSIONS):
        return None
    known = " and ".join(f"{prefix}x" for prefix in VERSIONS)
    return f"vLLM {version} was not tried with it, and its connector interface is experimental: it goes with {known}"


def config_problems(config: Any) -> list[str]:
    """Of a `VllmConfig`."""
    parallel, scheduler = config.parallel_config, config.scheduler_config
    problems = []
    for name, option in (
        ("tensor_parallel_size", "--tensor-parallel-size"),
        ("pipeline_parallel_size", "--pipeline-parallel-size"),
        ("data_parallel_size", "--data-parallel-size"),
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        if getattr(parallel, name, 1) > 1:
            problems.append(f"KV that is spread over several workers is not moved: {option} must be 1")
    if getattr(scheduler, "async_scheduling", False):
        problems.append("asynchronous scheduling was not tried: start with --no-async-scheduling")
    if not scheduler.disable_hybrid_kv_cache_manager:
        problems.append("the hybrid KV cache manager keeps a request's KV in several tables: start with --disable-hybrid-kv-cache-manager")
    if getattr(config, "use_v2_model_runner", False):
        problems.append("the second model runner takes other logits processors: start with VLLM_USE_V2_MODEL_RUNNER=0 in the environment")
    if DRAWS not in (config.model_config.logits_processors or []):
        problems.append(f"answers that are drawn go on elsewhere by a logits processor: start with --logits-processors {DRAWS}")
    if config.speculative_config is not None:
        problems.append("speculative decoding takes computed tokens back: start without it")
    if config.kv_transfer_config.kv_role != "kv_both":
        problems.append('the connector takes KV out and in: its kv_role must be "kv_both"')
    model = config.model_config
    if getattr(model, "is_encoder_decoder", False):
        problems.append("encoder-decoder models are not moved")
    if getattr(model, "runner_type", "generate") != "generate":
        problems.append("only models that generate are moved")
    return problems


def cache_problems(cache: Any) -> list[str]:
    """Of a `KVCacheConfig`."""
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        return [f"the model keeps its KV in {len(groups)} groups, and one is moved"]
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    if kind != "FullAttentionSpec" or getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
        return [f"only KV of full attention is moved, and this model's is {kind}"]
    return []


def server_problems(args: Any, sampling_defaults: dict) -> list[str]:
    """Of the API server's arguments: answers are made by the gateway from tokens, so what else would change them cannot be kept."""
    problems = []
    if getattr(args, "reasoning_parser", None) or getattr(getattr(args, "structured_outputs_config", None), "reasoning_parser", None):
        problems.append("a reasoning parser splits answers, and the gateway makes them from tokens: start without --reasoning-parser")
    if sampling_defaults:
        names = ", ".join(sorted(sampling_defaults))
        problems.append(f"the model's generation config sets {names} where a client sets nothing, which the gateway does not know: start with --generation-config vllm")
    if getattr(args, "api_server_count", 1) not in (None, 1):
        problems.append("one API server speaks the protocol: --api-server-count must be 1")
    return problems


def refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError("baton-vllm does not run so: " + "; ".join(problems))
