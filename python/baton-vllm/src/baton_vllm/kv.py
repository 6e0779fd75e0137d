"""One attempt to move one request: its KV on its way from the source to the target, over a connection of its own."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from . import wire
from .engine import ExportError
from .link import Connection, dial
from .wire import Entry, Kind, MoveTo, Place, Plan, RequestName, Run, WireError

if TYPE_CHECKING:
    from .replica import Replica

# So few full blocks are left to the time when the request stands still, and so few bytes: its client waits for them.
LAST_BLOCKS, LAST_BYTES = 16, 1 << 20
ROUNDS_MAX = 3
CONNECT_PATIENCE_S = 5.0
# A source that says nothing of what it brings for so long is not waited for.
PATIENCE_S = 10.0
# That a copy goes on is told as often.
ADVANCE_TOLD_S = 1.0
# Blocks that a target takes room for beside those that were announced: the request grows while it is copied.
MARGIN_BLOCKS = 4


class CopyError(Exception):
    """Why a copy ended before the gateway was asked to commit."""


def tokens_of(entries: list[Entry]) -> list[int]:
    return [entry.token for entry in entries if not entry.is_finish]


def blocks_of(tokens: int, size: int) -> int:
    return -(-tokens // size)


def keys_of(tokens: list[int], size: int, salt: str | None) -> list[int]:
    """Names of the full blocks, each of all tokens before its end, too."""
    key, keys = xxh3_64_intdigest((salt or "").encode()), []
    for end in range(size, len(tokens) + 1, size):
        key = xxh3_64_intdigest(struct.pack(f"<{size}I", *tokens[end - size : end]), seed=key)
        keys.append(key)
    return keys


class Source:
    def __init__(self, replica: Replica, request: RequestName, attempt: int, target: Place, to: MoveTo, run: str, spec: Run):
        self.replica, self.request, self.attempt, self.target = replica, request, attempt, target
        self.to, self.run, self.spec = to, run, spec
        self.engine, self.size = replica.engine, replica.engine.layout.block_size
        self.export: Any = None
        self.connection: Connection | None = None
        self.credit, self.sent, self.told = 0, 0, time.monotonic()
        # The request was taken out of the batch.
        self.freezing = False
        # Set when the seat has frozen, so that all entries are known.
        self.stands_still: asyncio.Future = asyncio.get_running_loop().create_future()

    async def copy(self) -> None:
        """Copies, and holds the connection until it is cancelled: its end would tell the target that the request does not come."""
        try:
            await self._copy()
            # From here on the gateway decides, whatever becomes of the connection.
            await asyncio.get_running_loop().create_future()
        except (OSError, WireError, ExportError, CopyError, asyncio.TimeoutError) as error:
            self.replica.copy_failed(self.request, self.attempt, str(error) or type(error).__name__)
        finally:
            if self.export is not None:
                self.export.close()
            if self.connection is not None:
                self.connection.close()

    async def _copy(self) -> None:
        self.connection = await dial(self.to.kv_address, self.replica.identity, "source", CONNECT_PATIENCE_S)
        if self.connection.hello.place != self.target:
            raise CopyError(f"{self.connection.hello.place} answered, and {self.target} was to be reached")
        await self.connection.write(Kind.OPEN, self.request, self.attempt, self.replica.place, self.target, self.to.nonce)
        await self.connection.write(Kind.PREPARE, self._plan(self._entries(), self._computed()))
        held, self.credit = await self._receive(Kind.HAVE)
        self.export = self.engine.export(self.run, held)
        following, rounds = held, 0
        while rounds < ROUNDS_MAX:
            full = self._computed() // self.size
            if full <= following + min(LAST_BLOCKS, LAST_BYTES // self.engine.layout.block_bytes):
                break
            await self._send(following, full)
            following, rounds = full, rounds + 1
        self.freezing, began = True, time.monotonic()
        ended = await self.export.freeze(lambda: len(self.spec.prompt) + len(tokens_of(self._entries())))
        self.replica.froze(self.request, self.attempt, ended)
        entries = await self.stands_still
        tokens = len(self.spec.prompt) + len(tokens_of(entries))
        computed = min(ended.computed, tokens - 1)
        if computed <= following * self.size and computed < tokens - 1:
            raise CopyError("the engine had no room to take the last blocks out")
        await self._send(following, blocks_of(computed, self.size))
        await self.connection.write(Kind.STATE, entries, self._plan(entries, computed))
        (prepared,) = await self._receive(Kind.PREPARED)
        gap_us = int((time.monotonic() - began) * 1e6)
        self.replica.target_prepared(self.request, self.attempt, prepared, (self.sent, held, rounds, gap_us))

    def _entries(self) -> list[Entry]:
        holding = self.replica.seats.holding(self.request)
        if holding is None:
            raise CopyError("the request has ended")
        return holding.entries

    def _computed(self) -> int:
        """Tokens that have KV as far as is known here: all but the last."""
        return len(self.spec.prompt) + len(tokens_of(self._entries())) - 1

    def _plan(self, entries: list[Entry], computed: int) -> Plan:
        progress = replace(self.spec.progress, computed=computed)
        spec = replace(self.spec, model=self.engine.models[0], ends=self.engine.ends, progress=progress)
        tokens = self.spec.prompt + tokens_of(entries)
        return Plan(tokens, keys_of(tokens[:computed], self.size, self.spec.salt), blocks_of(computed, self.size), spec.to_bytes())

    async def _send(self, first: int, last: int) -> None:
        size = self.engine.layout.block_bytes
        for index in range(first, last):
            staged = await self.export.block(index)
            while self.credit < size:
                (more,) = await self._receive(Kind.CREDIT)
                self.credit += more
            view = self.engine.slot(staged.slot)
            await self.connection.write_block(index, staged.tokens, xxh3_64_intdigest(view), view)
            self.export.release(staged.slot)
            self.credit -= size
            self.sent += size
            if time.monotonic() - self.told >= ADVANCE_TOLD_S:
                self.told = time.monotonic()
                self.replica.copy_advanced(self.request)

    async def _receive(self, wanted: Kind) -> tuple:
        while True:
            kind, values = await self.connection.read()
            if kind == Kind.REFUSE:
                raise CopyError(f"the target refuses: {refusal_text(values[0])}")
            if kind == Kind.ABORT:
                raise CopyError(f"the target gave up: {values[0]}")
            if kind == wanted:
                return values
            if kind == Kind.CREDIT and wanted == Kind.PREPARED:
                self.credit += values[0]
                continue
            raise CopyError(f"the target sent {kind.name}, which is not its turn")


class Refuse(Exception):
    def __init__(self, reason: Any):
        super().__init__(refusal_text(reason))
        self.reason = reason


NOT_EXPECTED = "NotExpected"


def other(why: str) -> Refuse:
    return Refuse({"Other": why})


def refusal_text(reason: Any) -> str:
    """A REFUSE in words."""
    if reason == NOT_EXPECTED:
        return "nobody announced this attempt"
    if isinstance(reason, dict) and len(reason) == 1:
        (name, value), = reason.items()
        if name == "NoRoom" and isinstance(value, list) and len(value) == 2:
            return f"it needs {value[0]} blocks, and {value[1]} can be had"
        if name == "OtherNumerics":
            return f"the two replicas do not compute the same bits: {value}"
        if name == "CannotTravel":
            return f"{value} cannot be moved exactly"
        return str(value)
    return str(reason)


class Target:
    """Takes in what a source brings, until the seat lets go or the source does."""

    def __init__(self, replica: Replica, connection: Connection, request: RequestName, attempt: int, source: Place):
        self.replica, self.connection = replica, connection
        self.request, self.attempt, self.source = request, attempt, source
        self.engine, self.size = replica.engine, replica.engine.layout.block_size
        # By index of the block.
        self.slots: list[int] = []
        self.tokens: dict[int, int] = {}
        self.credit = 0
        # Its connection has ended, so that nothing is written to the slots any more.
        self.left = False
        # When all is here.
        self.run: Run | None = None
        self.entries: list[Entry] = []

    async def take(self, plan: Plan) -> None:
        self._check_plan(plan)
        needed = blocks_of(len(plan.tokens), self.size)
        free = self.engine.status().signs.free_blocks
        if needed > free:
            raise Refuse({"NoRoom": [needed, free]})
        if not self._grow(needed + MARGIN_BLOCKS) and not self._grow(needed):
            raise Refuse({"NoRoom": [needed, len(self.engine.slots.free)]})
        if not self.replica.arrived(self):
            raise Refuse(NOT_EXPECTED)
        self.credit = len(self.slots) * self.engine.layout.block_bytes
        await self.connection.write(Kind.HAVE, 0, self.credit)
        told = time.monotonic()
        while True:
            kind, values = await self.connection.read(self._room)
            if kind == Kind.BLOCK:
                await self._block(*values)
                if time.monotonic() - told >= ADVANCE_TOLD_S:
                    told = time.monotonic()
                    self.replica.copy_advanced(self.request)
            elif kind == Kind.STATE:
                self._state(*values)
            elif kind == Kind.ABORT:
                raise CopyError(f"the source gave up: {values[0]}")
            else:
                raise WireError("the source sent what only targets send")

    def _check_plan(self, plan: Plan) -> Run:
        try:
            run = Run.from_bytes(plan.request)
        except WireError as error:
            raise other(str(error)) from None
        if plan.tokens[: len(run.prompt)] != run.prompt or not run.prompt:
            raise other("the tokens do not begin with the prompt")
        if run.model not in self.engine.models:
            raise other(f'it is of the model "{run.model}", and this is {self.engine.models[0]}')
        if run.adapter is not None:
            raise other(f'it asks for the adapter "{run.adapter}", and adapters are not moved here')
        ours = self.engine.ends
        if run.ends is not None and (sorted(run.ends.eos), run.ends.length_limit) != (ours.eos, ours.length_limit):
            raise other(f"outputs end there by {run.ends.eos} and at {run.ends.length_limit} tokens, here by {ours.eos} and at {ours.length_limit}")
        if len(plan.tokens) >= ours.length_limit:
            raise other(f"it has {len(plan.tokens)} tokens, and {ours.length_limit} are taken")
        return run

    def _grow(self, blocks: int) -> bool:
        more = self.engine.slots.take(max(0, blocks - len(self.slots)))
        self.slots += more or []
        return more is not None

    def _room(self, index: int, length: int) -> memoryview:
        wanted = self.engine.layout.block_bytes
        if length != wanted:
            raise WireError(f"block {index} has {length} bytes, a block here {wanted}")
        if length > self.credit:
            raise WireError("more came than was asked for")
        if index >= len(self.slots):
            raise WireError(f"block {index} came, and there is room for {len(self.slots)}")
        return self.engine.slot(self.slots[index])

    async def _block(self, index: int, tokens: int, checksum: int) -> None:
        if xxh3_64_intdigest(self.engine.slot(self.slots[index])) != checksum:
            raise WireError(f"block {index} was altered on its way")
        self.tokens[index] = tokens
        size = self.engine.layout.block_bytes
        self.credit -= size
        # Those that the request may still fill while it is copied.
        if index + MARGIN_BLOCKS >= len(self.slots) and self._grow(len(self.slots) + MARGIN_BLOCKS):
            self.credit += MARGIN_BLOCKS * size
            await self.connection.write(Kind.CREDIT, MARGIN_BLOCKS * size)

    def _state(self, entries: list[Entry], plan: Plan) -> None:
        run = self._check_plan(plan)
        if plan.tokens != run.prompt + tokens_of(entries):
            raise WireError("the tokens of the state are not those of its entries")
        computed = run.progress.computed
        if computed >= len(plan.tokens):
            raise WireError("the state counts on KV of its last token")
        for index in range(blocks_of(computed, self.size)):
            if self.tokens.get(index, 0) < min(self.size, computed - index * self.size):
                raise WireError(f"block {index} of {computed} tokens did not come")
        self.run, self.entries = run, entries
        self.replica.state_came(self, entries)

    def release(self) -> None:
        """What came is not wanted any more."""
        self.engine.slots.give_back(self.slots)
        self.slots = []

    def hand_over(self) -> tuple[list[int], int]:
        """What came is the engine's from here on; room that was not needed is free again."""
        computed = self.run.progress.computed
        used = blocks_of(computed, self.size)
        kept, rest = self.slots[:used], self.slots[used:]
        self.engine.slots.give_back(rest)
        self.slots = []
        return kept, computed


async def serve(replica: Replica, connection: Connection) -> None:
    """A source that has introduced itself."""
    target: Target | None = None
    try:
        request, attempt, source, here, nonce = await asyncio.wait_for(_first(connection, Kind.OPEN), PATIENCE_S)
        kind, (plan,) = await asyncio.wait_for(connection.read(), PATIENCE_S)
        if kind == Kind.PREFIX:
            raise WireError("prefixes are not copied here")
        if kind != Kind.PREPARE:
            raise WireError("the source did not say what it brings")
        _check(replica, connection, source)
        replica.accept(request, attempt, source, here, nonce)
        target = Target(replica, connection, request, attempt, source)
        try:
            await target.take(plan)
        finally:
            replica.source_left(target)
    except Refuse as refusal:
        replica.log.info("a source is refused: %s", refusal)
        await part(connection, Kind.REFUSE, refusal.reason)
    except WireError as error:
        await part(connection, Kind.ABORT, str(error))
        raise
    except (CopyError, asyncio.TimeoutError) as error:
        replica.log.info("a source ends: %s", error)


async def _first(connection: Connection, wanted: Kind) -> tuple:
    kind, values = await connection.read()
    if kind != wanted:
        raise WireError("the source did not open an attempt")
    return values


def _check(replica: Replica, connection: Connection, source: Place) -> None:
    """Whether what the source computes can go on here."""
    ours, theirs = replica.identity.hello, connection.hello
    if theirs.place != source:
        raise Refuse(NOT_EXPECTED)
    if theirs.numerics_id != ours.numerics_id:
        raise Refuse({"OtherNumerics": f'"{theirs.numerics_id}" there and "{ours.numerics_id}" here'})
    if theirs.kv_layout != ours.kv_layout:
        raise Refuse({"OtherNumerics": f"KV lies as {theirs.kv_layout} there and as {ours.kv_layout} here"})


async def part(connection: Connection, kind: Kind, reason: Any) -> None:
    try:
        await connection.write(kind, reason)
    except OSError:
        pass
