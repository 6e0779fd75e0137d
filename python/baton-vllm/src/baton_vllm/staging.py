"""Memory that the API server and the engine's worker share: blocks on their way out and in lie in it, and the worker's signs of life.

The API server makes it and hands its descriptor over, so that it has no name and goes with the processes."""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

HEAD_BYTES = 4096
HEAD = struct.Struct("<QQQQQ")


class Signs(NamedTuple):
    """Of life, as the worker tells them. Spans in microseconds."""

    # That have ended.
    steps: int
    # Of the step that runs; 0 when none does.
    predicted_us: int
    # That can be had.
    free_blocks: int
    # Moving averages: of a step, and of a token in steps of many.
    step_us: int
    token_us: int


class Staging:
    def __init__(self, descriptor: int, slots: int, block_bytes: int):
        self.descriptor, self.slots, self.block_bytes = descriptor, slots, block_bytes
        self.map = mmap.mmap(descriptor, HEAD_BYTES + slots * block_bytes)
        self.bytes = memoryview(self.map)

    @classmethod
    def create(cls, slots: int, block_bytes: int) -> Staging:
        descriptor = os.memfd_create("baton-staging")
        os.ftruncate(descriptor, HEAD_BYTES + slots * block_bytes)
        return cls(descriptor, slots, block_bytes)

    def slot(self, index: int) -> memoryview:
        start = HEAD_BYTES + index * self.block_bytes
        return self.bytes[start : start + self.block_bytes]

    def tell(self, signs: Signs) -> None:
        HEAD.pack_into(self.map, 0, *signs)

    def told(self) -> Signs:
        return Signs(*HEAD.unpack_from(self.map, 0))


class Slots:
    """Which of them are free."""

    def __init__(self, total: int):
        self.total, self.free = total, list(range(total - 1, -1, -1))

    def take(self, wanted: int) -> list[int] | None:
        """All of them or none."""
        if wanted > len(self.free):
            return None
        return [self.free.pop() for _ in range(wanted)]

    def give_back(self, slots: list[int]) -> None:
        self.free.extend(slots)
