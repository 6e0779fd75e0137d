"""What was not tried is refused before anything runs."""

import json
from types import SimpleNamespace

import pytest

from baton_vllm import cli, compat
from baton_vllm.draw_keys import draw_key, uniform
from baton_vllm.engine import draws_of, entries_of
from baton_vllm.wire import Entry, Run, Sampling


def config(**changes):
    good = {
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
        "scheduler_config": SimpleNamespace(async_scheduling=False, disable_hybrid_kv_cache_manager=True),
        "speculative_config": None,
        "kv_transfer_config": SimpleNamespace(kv_role="kv_both"),
        "model_config": SimpleNamespace(is_encoder_decoder=False, runner_type="generate", logits_processors=[compat.DRAWS]),
    }
    return SimpleNamespace(**(good | changes))


def test_what_was_tried_is_taken():
    assert compat.config_problems(config()) == [] and compat.version_problem("0.32.0") is None


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"parallel_config": SimpleNamespace(tensor_parallel_size=2)}, "--tensor-parallel-size"),
        ({"scheduler_config": SimpleNamespace(async_scheduling=True, disable_hybrid_kv_cache_manager=True)}, "--no-async-scheduling"),
        ({"scheduler_config": SimpleNamespace(async_scheduling=False, disable_hybrid_kv_cache_manager=False)}, "--disable-hybrid-kv-cache-manager"),
        ({"speculative_config": object()}, "speculative"),
        ({"kv_transfer_config": SimpleNamespace(kv_role="kv_producer")}, "kv_role"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True, logits_processors=[compat.DRAWS])}, "encoder-decoder"),
        ({"model_config": SimpleNamespace(logits_processors=None)}, "--logits-processors"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER"),
    ],
)
def test_what_was_not_tried_is_refused_by_name(changes, names):
    problems = compat.config_problems(config(**changes))
    with pytest.raises(ValueError, match=names):
        compat.refuse(problems)


def test_other_versions_and_caches_are_refused():
    assert "0.33.0" in compat.version_problem("0.33.0")
    windowed = type("SlidingWindowSpec", (), {"sliding_window": 128})()
    assert compat.cache_problems(SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=windowed)]))
    full = type("FullAttentionSpec", (), {"sliding_window": None})()
    group = SimpleNamespace(kv_cache_spec=full)
    assert compat.cache_problems(SimpleNamespace(kv_cache_groups=[group])) == []
    assert compat.cache_problems(SimpleNamespace(kv_cache_groups=[group, group]))


def test_what_would_change_answers_that_the_gateway_makes_is_refused():
    assert compat.server_problems(SimpleNamespace(), {}) == []
    assert "reasoning" in compat.server_problems(SimpleNamespace(reasoning_parser="x"), {})[0]
    assert "--generation-config vllm" in compat.server_problems(SimpleNamespace(), {"temperature": 0.6})[0]


def test_vllm_is_started_as_it_is_with_what_it_loads():
    command = cli.command(["--model", "m", "--baton-name", "a", "--port", "1"], "/tmp/x")
    assert command[1:3] == ["-m", cli.SERVER] and command[3:7] == ["--model", "m", "--port", "1"]
    connector = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert connector["kv_connector_module_path"] == "baton_vllm.connector"
    assert connector["kv_connector_extra_config"] | {"baton_folder": "/tmp/x", "baton_name": "a"} == connector["kv_connector_extra_config"]
    with pytest.raises(ValueError, match="kv-transfer-config"):
        cli.command(["--kv-transfer-config", "{}"], "/tmp/x")
    assert cli.plugins("a,b") == "a,b,baton" and cli.plugins(None).endswith("baton")


def run(**sampling):
    return Run("m", [1], 7, Sampling(**sampling))


def test_only_what_vllm_would_choose_otherwise_elsewhere_is_chosen_by_keys():
    assert draws_of(run(temperature=0.0, repetition_penalty=1.2), 3) is None
    assert draws_of(run(temperature=0.0, presence_penalty=0.1), 3)["done"] == 3 and draws_of(run(), 0)["key"] == draw_key(7, 0, 0)


def test_draws_are_of_their_place_alone_and_spread():
    key = draw_key(2**64 - 1, 1, 2)
    drawn = [uniform(key, index) for index in range(20000)]
    assert all(0 <= one < 1 for one in drawn) and len(set(drawn)) == len(drawn)
    shares = [sum(tenth / 10 <= one < (tenth + 1) / 10 for one in drawn) for tenth in range(10)]
    # Of 20,000, six deviations around a tenth.
    assert all(abs(share - 2000) < 6 * 42.5 for share in shares)
    assert uniform(key, 5) == drawn[5] and uniform(draw_key(2**64 - 1, 2, 1), 5) != drawn[5]


def test_vllms_outputs_are_entries():
    known = lambda rank, value: SimpleNamespace(rank=rank, logprob=value)
    out = SimpleNamespace(token_ids=[5, 9], logprobs=[{5: known(2, -1.0), 6: known(1, -0.5)}, {9: known(1, -0.25)}], finish_reason="stop", stop_reason=9)
    first, second, finish = entries_of(out, run(logprobs=1, stop_token_ids=[9]))
    assert (first.token, first.logprobs) == (5, [-1.0, [[6, -0.5]]]) and second.logprobs == [-0.25, [[9, -0.25]]]
    assert finish == Entry(finish=("stop", 9))
    ends = [("length", None), ("stop", None), ("stop", 2), ("abort", None), (None, None)]
    found = [entries_of(SimpleNamespace(token_ids=[], logprobs=None, finish_reason=reason, stop_reason=by), run()) for reason, by in ends]
    assert found == [[Entry(finish="length")], [Entry(finish="eos")], [Entry(finish="eos")], [], []]
