"""What a draw is made by; without torch, so that it can be tested anywhere."""

from __future__ import annotations

import hashlib

# In a request's `extra_args`.
DRAWS_KEY = "baton_draws"
WORD = 8


def draw_key(seed: int, prompt_index: int, choice_index: int) -> str:
    return b"".join(number.to_bytes(WORD, "little") for number in (seed, prompt_index, choice_index)).hex()


def uniform(key: str, index: int) -> float:
    """A number from [0, 1), the same wherever the output index is computed."""
    digest = hashlib.blake2b(index.to_bytes(WORD, "little"), key=bytes.fromhex(key), digest_size=WORD).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
