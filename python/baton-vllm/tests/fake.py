"""An engine whose next token and whose KV follow from the tokens alone, and a gateway that knows the frames: what a move needs beside the
package, without vLLM. Run as a program it is two replicas that wait, for `baton-conform`."""

import asyncio
import hashlib
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "src"))

from baton_vllm import link
from baton_vllm.engine import EndedRun, ExportError, Output, Staged, Status
from baton_vllm.link import Identity
from baton_vllm.replica import Replica
from baton_vllm.staging import Signs, Slots
from baton_vllm.wire import ALL, Ends, Entry, Hello, Kind, Layout, MoveTo, RequestName, Run, Sampling

BLOCK, BLOCK_BYTES, VOCABULARY, LIMIT = 16, 96, 200, 2048


def digest(tokens, size):
    return hashlib.shake_128(b"".join(token.to_bytes(4, "little") for token in tokens)).digest(size)


def next_token(tokens):
    return int.from_bytes(digest(tokens, 8), "little") % VOCABULARY


def block_of(tokens, index, computed):
    """KV of a block: of all tokens before its end."""
    return digest(tokens[: min(computed, (index + 1) * BLOCK)], BLOCK_BYTES)


class FakeEngine:
    layout = Layout("fake-1", BLOCK, BLOCK_BYTES)
    numerics_id = "fake-1"
    models = ["fake", "alias"]
    ends = Ends(eos=[], length_limit=LIMIT)
    vocabulary, blocks, max_running, token_budget = VOCABULARY, 1000, 64, 2048

    def __init__(self, slots=64, step_s=0.0005):
        self.slots, self.memory, self.step_s = Slots(slots), bytearray(slots * BLOCK_BYTES), step_s
        self.runs, self.steps = {}, 0
        # Tokens whose KV was computed at the start of each run.
        self.prefills = []
        # What the engine computed and nobody heard of when a run is frozen.
        self.ahead = 0

    def slot(self, index):
        return memoryview(self.memory)[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]

    def status(self):
        return Status(Signs(self.steps, 0, 1000, 500, 500), 0, len(self.runs))

    def start(self, run, spec, output, arrived, sink):
        tokens = spec.prompt + output
        computed = 0
        if arrived is not None:
            for index, slot in enumerate(arrived.slots):
                assert bytes(self.slot(slot)) == block_of(tokens, index, arrived.computed), f"block {index} is another one's"
            self.slots.give_back(arrived.slots)
            computed = arrived.computed
        self.prefills.append(len(tokens) - computed)
        self.runs[run] = FakeRun(self, run, spec, tokens, len(output), sink)

    def abort(self, run):
        if (known := self.runs.pop(run, None)) is not None:
            known.task.cancel()
            known.sink(run, None)

    def export(self, run, first):
        if run not in self.runs:
            raise ExportError("it has ended")
        return FakeExport(self, self.runs[run])


class FakeRun:
    def __init__(self, engine, name, spec, tokens, done, sink):
        self.engine, self.name, self.spec, self.tokens, self.done, self.sink = engine, name, spec, list(tokens), done, sink
        self.task = asyncio.ensure_future(self.compute())

    async def compute(self):
        first = True
        while True:
            await asyncio.sleep(self.engine.step_s)
            self.engine.steps += 1
            entries = self.step()
            if entries[-1].is_finish:
                self.engine.runs.pop(self.name)
            self.sink(self.name, Output(entries, 0 if first else None))
            first = False
            if entries[-1].is_finish:
                return self.sink(self.name, None)

    def step(self):
        token = next_token(self.tokens)
        self.tokens.append(token)
        self.done += 1
        sampling = self.spec.sampling
        logprobs = None if sampling.logprobs is None else [-0.5, [[(token + place) % VOCABULARY, -0.5 - place] for place in range(sampling.logprobs)]]
        entries = [Entry(token=token, logprobs=logprobs)]
        if token in sampling.stop_token_ids and self.done >= sampling.min_tokens:
            entries.append(Entry(finish=("stop", token)))
        elif self.done >= (sampling.max_tokens or LIMIT) or len(self.tokens) >= LIMIT:
            entries.append(Entry(finish="length"))
        return entries


class FakeExport:
    def __init__(self, engine, run):
        self.engine, self.run, self.lent, self.computed = engine, run, set(), None

    async def block(self, index):
        computed = self.computed or len(self.run.tokens) - 1
        slots = self.engine.slots.take(1)
        if slots is None:
            raise ExportError("no slot")
        self.engine.slot(slots[0])[:] = block_of(self.run.tokens, index, computed)
        self.lent.add(slots[0])
        return Staged(slots[0], min(BLOCK, computed - index * BLOCK))

    def release(self, slot):
        if slot in self.lent:
            self.lent.discard(slot)
            self.engine.slots.give_back([slot])

    async def freeze(self, told):
        self.engine.abort(self.run.name)
        for _ in range(self.engine.ahead):
            if self.run.step()[-1].is_finish:
                break
        await asyncio.sleep(0)
        self.computed = len(self.run.tokens) - 1
        extra = self.run.tokens[told() :]
        limit = self.run.spec.sampling.max_tokens or LIMIT
        status = "FINISHED_LENGTH_CAPPED" if self.run.done >= limit else "FINISHED_ABORTED"
        return EndedRun(extra, status, None, self.computed)

    def close(self):
        self.engine.slots.give_back(list(self.lent))
        self.lent.clear()


class Fleet:
    """Replicas over real sockets."""

    def __init__(self, count=2, key=None, **options):
        self.engines = [FakeEngine(**options) for _ in range(count)]
        self.replicas = [
            Replica(engine, f"fake-{index}", key, link.bind("127.0.0.1", 0, key), link.bind("127.0.0.1", 0, key))
            for index, engine in enumerate(self.engines)
        ]
        self.key = key

    async def __aenter__(self):
        self.tasks = [asyncio.ensure_future(replica.serve()) for replica in self.replicas]
        return self

    async def __aexit__(self, *_):
        for task in self.tasks:
            task.cancel()
        for replica in self.replicas:
            if replica.timer is not None:
                replica.timer.cancel()
            replica.control.close()
            replica.kv_socket.close()

    async def settled(self):
        """Nothing is held any more, and all slots are free."""
        while any(replica.requests or replica.runs for replica in self.replicas) or any(len(engine.slots.free) < engine.slots.total for engine in self.engines):
            await asyncio.sleep(0.002)


class Gateway:
    """One that does as it is told by a test."""

    def __init__(self, fleet, id=7):
        self.fleet, self.name, self.sequence, self.connections = fleet, (id, 1), 0, []
        self.frames = [asyncio.Queue() for _ in fleet.replicas]
        self.leases = True

    async def __aenter__(self):
        hello = Hello("gateway", *self.name)
        for index, replica in enumerate(self.fleet.replicas):
            connection = await link.dial(replica.control_address, Identity(hello, self.fleet.key), "gateway", 5)
            assert connection.hello.freeze == "final"
            self.connections.append(connection)
        self.readers = [asyncio.ensure_future(self.read(index)) for index in range(len(self.connections))]
        return self

    async def __aexit__(self, *_):
        for reader in self.readers:
            reader.cancel()
        for connection in self.connections:
            connection.close()

    async def read(self, index):
        while True:
            kind, values = await self.connections[index].read()
            if kind == Kind.HEARTBEAT:
                if self.leases:
                    await self.tell(index, Kind.LEASE, values[0])
            else:
                self.frames[index].put_nowait((kind, values))

    async def tell(self, index, kind, *values):
        await self.connections[index].write(kind, *values)

    async def heard(self, index, *kinds):
        """The next frame of these kinds; others are passed over."""
        while True:
            kind, values = await self.frames[index].get()
            if kind in kinds:
                return kind, values

    def new(self):
        self.sequence += 1
        return RequestName(*self.name, self.sequence)

    async def outputs(self, index, request, entries, until):
        """Adds what comes to `entries`, in order, until there are so many or the finish came."""
        while len(entries) < until and not (entries and entries[-1].is_finish):
            _, (name, _, place, entry) = await self.heard(index, Kind.OUTPUT)
            if name == request and place == len(entries):
                entries.append(entry)
                if len(entries) % 64 == 0:
                    await self.tell(index, Kind.ACK, request, _tag(self, request), len(entries))

    async def move(self, source, target, request, epoch, attempt, nonce=bytes(range(16)), wrong=None):
        places = [replica.place for replica in self.fleet.replicas]
        await self.tell(target, Kind.EXPECT, request, attempt, places[source], nonce)
        to = MoveTo(self.fleet.replicas[target].kv_address, wrong or nonce)
        await self.tell(source, Kind.MOVE, request, epoch, attempt, places[target], to.to_bytes())


def _tag(gateway, request):
    return getattr(gateway, "epochs", {}).get(request, 1)


def greedy(prompt=40, output=100, **sampling):
    options = Sampling(temperature=0.0, max_tokens=output, **sampling)
    return Run("fake", [(7 * index + 11) % VOCABULARY for index in range(prompt)], 1, options)


def alone(spec):
    """What it gives where nothing moves."""
    tokens = list(spec.prompt)
    while len(tokens) < len(spec.prompt) + spec.sampling.max_tokens:
        tokens.append(next_token(tokens))
    return [Entry(token=token) for token in tokens[len(spec.prompt) :]] + [Entry(finish="length")]


async def main():
    async with Fleet(step_s=0.004) as fleet:
        print(json.dumps([replica.report()["migration"]["control_address"] for replica in fleet.replicas]), flush=True)
        await asyncio.gather(*fleet.tasks)


if __name__ == "__main__":
    asyncio.run(main())
