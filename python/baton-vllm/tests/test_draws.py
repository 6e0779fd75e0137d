"""Where torch and vLLM are: the choice of tokens that does not depend on where an answer goes on."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from types import SimpleNamespace  # noqa: E402

from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality  # noqa: E402

from baton_vllm.draws import DRAWS_KEY, KeyedDraws, pick  # noqa: E402
from baton_vllm.engine import draws_of  # noqa: E402
from baton_vllm.wire import Run, Sampling  # noqa: E402

VOCABULARY = 50


def processor():
    config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY))
    return KeyedDraws(config, torch.device("cpu"), False)


def logits_after(tokens):
    """Of a model that knows its last two tokens."""
    generator = torch.Generator().manual_seed(sum(token * 31**place for place, token in enumerate(tokens[-2:])))
    return torch.randn(VOCABULARY + 6, generator=generator) * 2


def added(index, spec, tokens, done):
    params = SimpleNamespace(extra_args={DRAWS_KEY: draws_of(spec, done)})
    output = []
    return (index, params, list(tokens), output), output


def generate(spec, tokens, done, count, beside=0):
    """Tokens as one engine computes them, in a batch with others."""
    ours = processor()
    one, output = added(beside, spec, tokens, done)
    others = [added(place, Run("m", [1], place, Sampling()), [1, 2], 0)[0] for place in range(beside)]
    ours.update_state(BatchUpdate(beside + 1, [], [*others, one], []))
    tokens = list(tokens)
    for _ in range(count):
        logits = torch.stack([logits_after([7, 8])] * beside + [logits_after(tokens)])
        token = int(ours.apply(logits)[beside].argmax())
        output.append(token)
        tokens.append(token)
        ours.update_state(None)
    return output


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"top_p": 0.8},
        {"top_k": 5, "min_p": 0.05},
        {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.0, "frequency_penalty": 0.6},
    ],
)
def test_what_goes_on_elsewhere_reads_as_what_stayed(sampling):
    spec = Run("m", [3, 4, 5], 77, Sampling(**sampling), choice_index=1)
    whole = generate(spec, spec.prompt, 0, 40)
    for done in (1, 17, 39):
        assert generate(spec, spec.prompt + whole[:done], done, 40 - done, beside=3) == whole[done:]
    assert len(set(whole)) > 5 and all(token < VOCABULARY for token in whole)
    other = Run("m", [3, 4, 5], 78, Sampling(**sampling), choice_index=1)
    assert (generate(other, other.prompt, 0, 40) == whole) == (sampling.get("temperature") == 0.0)


def test_a_draw_falls_by_weight_and_never_where_there_is_none():
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], dtype=torch.double)
    assert [int(pick(weights, draw)) for draw in (0.0, 0.2, 0.25, 0.5, 1.0 - 2**-53)] == [1, 1, 3, 3, 3]
    drawn = [int(pick(weights, (place + 0.5) / 1000)) for place in range(1000)]
    assert drawn.count(1) == 250 and drawn.count(3) == 750


def test_filters_leave_what_they_should():
    for sampling, allowed in (({"top_k": 2}, 2), ({"top_p": 1e-6}, 1), ({"min_p": 1.0}, 1)):
        spec = Run("m", [3], 5, Sampling(**sampling))
        logits = logits_after([1, 2])
        likeliest = set(logits[:VOCABULARY].topk(allowed).indices.tolist())
        chosen = set()
        for seed in range(40):
            ours = processor()
            ours.update_state(BatchUpdate(1, [], [added(0, Run("m", [3], seed, spec.sampling), [3], 0)[0]], []))
            chosen.add(int(ours.apply(logits[None].clone())[0].argmax()))
        assert chosen == likeliest, sampling


def test_rows_follow_their_requests_and_others_are_left_alone():
    ours = processor()
    first, _ = added(0, Run("m", [1], 1, Sampling()), [1], 0)
    plain = (1, SimpleNamespace(extra_args=None), [1], [])
    ours.update_state(BatchUpdate(2, [], [first, plain], []))
    logits = torch.stack([logits_after([1, 2])] * 2)
    changed = ours.apply(logits.clone())
    assert changed[0].isinf().sum() == VOCABULARY + 5 and torch.equal(changed[1], logits[1])
    ours.update_state(BatchUpdate(2, [], [], [(0, 1, MoveDirectionality.SWAP)]))
    again = ours.apply(logits.clone())
    assert torch.equal(again[0], logits[0]) and torch.equal(again[1], changed[0])
    ours.update_state(BatchUpdate(1, [0], [], [(1, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    assert torch.equal(ours.apply(logits[:1].clone())[0], changed[0])
    ours.update_state(BatchUpdate(0, [0], [], []))
    assert not ours.rows
