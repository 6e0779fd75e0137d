"""Where torch and vLLM are: blocks between a cache and the staging memory, whatever the layers' shapes."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from baton_vllm.connector import Layer, natural  # noqa: E402

BLOCKS, SLOTS = 12, 5


@pytest.mark.parametrize("word", [torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(BLOCKS, 3, 4, 8), (2, BLOCKS, 4, 3, 8), (4 * BLOCKS, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_travel_unchanged_to_other_places(word, shape, dtype):
    caches = [torch.randn(shape).to(dtype) for _ in range(3)]
    targets = [torch.zeros_like(cache) for cache in caches]
    layers, size = [], 0
    for cache in caches:
        layers.append(Layer(cache, BLOCKS, size))
        size += layers[-1].bytes
    arriving = [Layer(target, BLOCKS, layer.offset) for target, layer in zip(targets, layers)]
    staging = torch.zeros(SLOTS, size // word.itemsize, dtype=word)
    there, slots, here = torch.tensor([7, 2, 11]), torch.tensor([4, 0, 2]), torch.tensor([1, 9, 3])
    for one, other in zip(layers, arriving):
        one.out(there, slots, staging)
        other.into(here, slots, staging)
        assert torch.equal(other.blocks[here], one.blocks[there])
        assert not other.blocks[[0, 2, 4]].any(), "other blocks are as they were"
    assert not staging[[1, 3]].any(), "other slots are as they were"


def test_a_cache_without_the_blocks_is_refused():
    with pytest.raises(ValueError, match="12 blocks are not found"):
        Layer(torch.zeros(7, 5, 3), BLOCKS, 0)


def test_layers_are_in_the_order_of_their_numbers():
    assert sorted(["layers.10.attn", "layers.9.attn", "layers.1.attn"], key=natural) == ["layers.1.attn", "layers.9.attn", "layers.10.attn"]
