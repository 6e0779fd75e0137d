"""One vLLM server as a replica of the migration protocol: carries out what the seats want, and tells them what the engine does."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, NamedTuple

from . import kv, link, seats as of_seats
from .engine import Arrived, EndedRun, Engine, Output, Refused, stopped_by
from .kv import tokens_of
from .link import Connection, Identity
from .seats import Seats
from .wire import CONTROL_FROM_GATEWAY, Entry, Hello, Kind, MoveTo, Place, RequestName, Run, WireError

# Entries that a gateway need not have acknowledged before no more are given; they are given again when half of them are.
CREDIT = 256
# Announced attempts; beyond these the oldest is not expected any more, and its source is refused.
EXPECTED_MAX = 4096
WHY_MAX = 256
CONNECTIONS_MAX = 64
# Sources, and strangers that have not introduced themselves; more wait.
KV_CONNECTIONS_MAX = 16
# Frames on their way to a gateway. One that does not take them is disconnected, and told all again when it comes back.
QUEUED_FRAMES = 1 << 16


@dataclass
class EngineRun:
    """The engine's part of a request."""

    id: str
    # When it was to start, of one whose prompt is computed here, until its gateway was told when it did.
    heard: float | None
    # Told by the engine and not taken by the seat yet.
    computed: deque = field(default_factory=deque)
    throttled: bool = False


@dataclass
class Copy:
    attempt: int
    source: kv.Source
    task: asyncio.Task


@dataclass
class Here:
    """What there is of a request beside its seat."""

    spec: Run | None = None
    run: EngineRun | None = None
    arrival: kv.Target | None = None
    move_to: tuple[int, MoveTo] | None = None
    copy: Copy | None = None


class Gateway(NamedTuple):
    name: tuple[int, int]
    connection: Connection
    frames: deque
    more: asyncio.Event


class Expected(NamedTuple):
    attempt: int
    source: Place
    nonce: bytes


def number(name: str) -> int:
    """A replica's number in places, the same over restarts."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


class Replica:
    def __init__(self, engine: Engine, name: str, fleet_key: bytes | None, control: socket.socket, kv_socket: socket.socket):
        self.engine, self.name = engine, name
        self.place = Place(number(name), time.time_ns())
        self.control, self.kv_socket = control, kv_socket
        self.control_address, self.kv_address = (link.join_address(*one.getsockname()[:2]) for one in (control, kv_socket))
        hello = Hello("replica", self.place.replica, self.place.incarnation, engine.numerics_id, engine.layout, "final", self.kv_address)
        self.identity = Identity(hello, fleet_key)
        self.seats = Seats()
        self.gateways: dict[int, Gateway] = {}
        self.requests: dict[RequestName, Here] = {}
        self.runs: dict[str, RequestName] = {}
        self.expected: OrderedDict[RequestName, Expected] = OrderedDict()
        # The one request that is taken in now.
        self.arriving: tuple[RequestName, int] | None = None
        # Why attempts end and requests cannot be run, until it is told.
        self.reasons: dict[RequestName, str] = {}
        self.tasks: set[asyncio.Task] = set()
        self.timer: asyncio.TimerHandle | None = None
        self.performing = False
        self.log = logging.getLogger("vllm.baton")

    def report(self) -> dict:
        """What a gateway finds it by: as of Baton's own replicas, though of a vLLM engine it reads where requests move alone."""
        layout, engine = self.engine.layout, self.engine
        signs, waiting, running = engine.status()
        # A step's time as vLLM's worker measured it, as far as it can be told apart.
        step = {"fixed_s": signs.step_us / 1e6, "per_token_s": signs.token_us / 1e6, "per_attended_s": 0.0, "per_kv_token_s": 0.0, "weights_s": 0.0}
        return {
            "id": self.name,
            "incarnation": self.place.incarnation,
            "engine": "vllm",
            "model": engine.models[0],
            "numerics_id": engine.numerics_id,
            "block_size": layout.block_size,
            "kv_blocks_total": engine.blocks,
            "kv_blocks_free": signs.free_blocks,
            "waiting": waiting,
            "running": running,
            "prefill_backlog_tokens": 0,
            "max_model_len": engine.ends.length_limit,
            "max_running": engine.max_running,
            "token_budget": engine.token_budget,
            "time_scale": 1.0,
            "step": step,
            "step_prior": step,
            "step_error": 0.0,
            "steps": signs.steps,
            "kv_events": None,
            "held": {"requests": len(self.requests), "slots": engine.slots.total - len(engine.slots.free)},
            "migration": {
                "replica": self.place.replica,
                "control_address": self.control_address,
                "kv_address": self.kv_address,
                "fleet_key": self.identity.fleet_key is not None,
                "kv_layout": {"format": layout.format, "block_size": layout.block_size, "block_bytes": layout.block_bytes},
                "copies_prefixes": False,
            },
        }

    async def serve(self) -> None:
        """Until it is cancelled."""
        await asyncio.gather(
            link.listen(self.control, self.identity, "gateway", self._serve_gateway, CONNECTIONS_MAX, self.log),
            link.listen(self.kv_socket, self.identity, "source", partial(kv.serve, self), KV_CONNECTIONS_MAX, self.log),
        )

    def now(self) -> float:
        # Runs while the machine is suspended, as leases must.
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    # Gateways.

    async def _serve_gateway(self, connection: Connection) -> None:
        name = (connection.hello.id, connection.hello.incarnation)
        if (former := self.gateways.get(name[0])) is not None:
            former.connection.shut()
        gateway = self.gateways[name[0]] = Gateway(name, connection, deque(), asyncio.Event())
        self.log.info("gateway %x attached", name[0])
        for request in [known for known in self.expected if known.gateway == name[0] and known.incarnation != name[1]]:
            del self.expected[request]
        self._feed(self.seats.attached, name)
        writer = asyncio.ensure_future(self._write(gateway))
        try:
            while self.gateways.get(name[0]) is gateway:
                kind, values = await connection.read()
                if self.gateways.get(name[0]) is gateway:
                    self._heard(name, kind, values)
        finally:
            writer.cancel()
            if self.gateways.get(name[0]) is gateway:
                del self.gateways[name[0]]

    async def _write(self, gateway: Gateway) -> None:
        try:
            while True:
                await gateway.more.wait()
                gateway.more.clear()
                frames = list(gateway.frames)
                gateway.frames.clear()
                if frames:
                    await gateway.connection.write_all(frames)
        except OSError:
            # Either end closes both directions.
            gateway.connection.shut()

    def _send(self, gateway: tuple[int, int], kind: Kind, *values: Any) -> None:
        attached = self.gateways.get(gateway[0])
        if attached is None or attached.name != gateway:
            return
        if len(attached.frames) >= QUEUED_FRAMES:
            attached.connection.shut()
            del self.gateways[gateway[0]]
            return
        attached.frames.append((kind, values))
        attached.more.set()

    def _heard(self, gateway: tuple[int, int], kind: Kind, values: tuple) -> None:
        if kind >= Kind.OPEN:
            raise WireError(f"{kind.name} came on a control connection")
        if kind not in CONTROL_FROM_GATEWAY:
            self.log.warning("gateway %x sent %s, which only replicas send; it is not heard", gateway[0], kind.name)
            return
        if kind == Kind.LEASE:
            return self._feed(self.seats.leased, gateway, values[0])
        request, *rest = values
        if request[:2] != gateway:
            self.log.warning("gateway %x spoke of another one's request; it is not heard", gateway[0])
            return
        if kind == Kind.EXPECT:
            if len(self.expected) >= EXPECTED_MAX:
                self.expected.popitem(last=False)
            self.expected[request] = Expected(*rest)
        elif kind == Kind.COPY:
            # As its report says.
            raise WireError("prefixes are not copied here")
        else:
            self._told(request, kind, rest)

    def _told(self, request: RequestName, kind: Kind, values: list) -> None:
        here = self.requests.setdefault(request, Here())
        if kind == Kind.START:
            try:
                here.spec = Run.from_bytes(values.pop())
            except WireError as error:
                # The seat decides whether it matters.
                self.log.warning("request %s was to be started and cannot be read: %s", request, error)
        elif kind == Kind.MOVE:
            try:
                here.move_to = (values[1], MoveTo.from_bytes(values.pop()))
            except WireError as error:
                self.log.warning("request %s was to be moved to where cannot be read: %s", request, error)
        elif kind == Kind.STOP and request in self.expected and self.expected[request].attempt <= values[0]:
            del self.expected[request]
        verbs = {Kind.START: "start", Kind.KEEP: "keep", Kind.MOVE: "move", Kind.NO: "no", Kind.RESUME: "resume", Kind.STOP: "stop", Kind.ACK: "ack"}
        self._from_gateway(request, verbs[kind], *values)

    def _from_gateway(self, request: RequestName, verb: str, *values: Any) -> None:
        self.seats.from_gateway(request, verb, self.now(), *values)
        self._settle(request)
        self._perform_all()
        self._forget(request)
        if request not in self.requests:
            self.reasons.pop(request, None)

    # From copies that leave.

    def copy_advanced(self, request: RequestName) -> None:
        self.seats.copy_advanced(request, self.now())

    def copy_failed(self, request: RequestName, attempt: int, why: str) -> None:
        here = self.requests.get(request)
        if here is None or here.copy is None or here.copy.attempt != attempt:
            return
        self.log.info("request %s: a move ends before it is committed: %s", request, why)
        self.reasons[request] = why
        self._change(request, "abort")
        self._go_on(request)

    def froze(self, request: RequestName, attempt: int, ended: EndedRun) -> None:
        """The engine computes it no more; what it computed beside what was told is told first."""
        here = self.requests.get(request)
        if here is None or here.copy is None or here.copy.attempt != attempt:
            return
        self._settle(request)
        whole = here.run is None or not here.run.computed
        if here.run is not None:
            self.runs.pop(here.run.id, None)
            here.run = None
        with_logprobs = here.spec.sampling.logprobs is not None
        if whole and not with_logprobs:
            for token in ended.extra:
                self.seats.change(request, "output", self.now(), Entry(token=token))
            if finish := finish_of(ended, here.spec):
                self.seats.change(request, "output", self.now(), finish)
        if whole:
            self._change(request, "frozen")
        else:
            self.copy_failed(request, attempt, "its gateway takes nothing")

    def target_prepared(self, request: RequestName, attempt: int, entries: int, moved: tuple) -> None:
        self._change(request, "prepared", attempt, entries)
        holding = self.seats.holding(request)
        if holding is not None and holding.phase == of_seats.Phase.ASKING and holding.attempt == attempt:
            self._send(request[:2], Kind.MOVED, request, attempt, *moved)

    # From copies that come.

    def accept(self, request: RequestName, attempt: int, source: Place, target: Place, nonce: bytes) -> None:
        """Only what its gateway announced, one at a time."""
        if target != self.place or self.expected.get(request) != Expected(attempt, source, nonce):
            raise kv.Refuse(kv.NOT_EXPECTED)
        if self.seats.is_over(request, attempt):
            raise kv.other("the attempt is over")
        if self.arriving is not None:
            raise kv.other(f"{self.arriving[0]} is taken in, and one at a time is")
        self.arriving = (request, attempt)

    def arrived(self, target: kv.Target) -> bool:
        """Whether the seat takes it."""
        here = self.requests.setdefault(target.request, Here())
        taken = self.seats.prepare(target.request, target.source, target.attempt, self.now())
        self._perform_all()
        if taken:
            here.arrival = target
            self.requests[target.request] = here
        else:
            self._forget(target.request)
        return taken

    def state_came(self, target: kv.Target, entries: list[Entry]) -> None:
        self._change(target.request, "state", target.attempt, entries)

    def source_left(self, target: kv.Target) -> None:
        """The connection is gone, or was let go of. If it was let go of here this says nothing new."""
        target.left = True
        if self.arriving == (target.request, target.attempt):
            self.arriving = None
        here = self.requests.get(target.request)
        if here is not None and here.arrival is target:
            self._change(target.request, "peer_abort", target.attempt)
        else:
            target.release()

    # Seats.

    def _change(self, request: RequestName, verb: str, *values: Any) -> None:
        self.seats.change(request, verb, self.now(), *values)
        self._settle(request)
        self._perform_all()

    def _feed(self, change: Any, *values: Any) -> None:
        change(*values, self.now())
        self._perform_all()

    def _perform_all(self) -> None:
        """Carries out what the seats want, until they want nothing more."""
        if self.performing:
            return
        self.performing = True
        try:
            while (output := self.seats.poll()) is not None:
                self._perform(output)
        finally:
            self.performing = False
        self._wind()

    def _wind(self) -> None:
        """Looks again when something is due."""
        if self.timer is not None:
            self.timer.cancel()
        due = self.seats.poll_timeout()
        # Timers of the loop stand while the machine is suspended, and are late then; leases are looked at before anything else.
        self.timer = None if due == inf else asyncio.get_running_loop().call_later(max(0.0, due - self.now()), self._feed, self.seats.timeout)

    def _perform(self, output: Any) -> None:
        if isinstance(output, of_seats.Heartbeat):
            signs, waiting, running = self.engine.status()
            self._send(output.gateway, Kind.HEARTBEAT, output.sequence, signs.steps, signs.predicted_us, waiting, running)
        elif isinstance(output, of_seats.AllHeld):
            self._send(output.gateway, Kind.ALL_HELD)
        elif isinstance(output, of_seats.ToGateway):
            why = (self._why(output.request),) if output.kind in (Kind.ABORTED, Kind.LOST) else ()
            self._send(output.request[:2], output.kind, output.request, *output.values, *why)
        elif isinstance(output, of_seats.SendState):
            self._send_state(output)
        elif isinstance(output, of_seats.SendPrepared):
            arrival = self._here(output.request).arrival
            if arrival is not None and arrival.attempt == output.attempt:
                task = asyncio.ensure_future(kv.part(arrival.connection, Kind.PREPARED, output.entries))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
        elif isinstance(output, of_seats.RunFrom):
            self._run(output.request, output.kept)
        elif isinstance(output, of_seats.Copy):
            self._copy(output)
        elif isinstance(output, of_seats.EndCopy):
            self._end_copy(output.request, output.attempt)
        elif isinstance(output, of_seats.Thaw):
            self._go_on(output.request)
        elif isinstance(output, of_seats.Pause):
            # There is no standing still in the engine: it computes on from its prefix cache when it may.
            self._free_run(output.request)
        elif isinstance(output, of_seats.Free):
            self._free_run(output.request)
            self._free_arrival(output.request)
            self._forget(output.request)

    def _here(self, request: RequestName) -> Here:
        return self.requests.setdefault(request, Here())

    def _why(self, request: RequestName) -> str:
        holding, why = self.seats.holding(request), self.reasons.pop(request, "")
        if not why and holding is not None and holding.has_finished:
            why = "it finished first"
        return why.encode()[:WHY_MAX].decode(errors="ignore")

    def _send_state(self, output: of_seats.SendState) -> None:
        copy = self._here(output.request).copy
        # The connection loses nothing, so that what is repeated was heard.
        if copy is not None and copy.attempt == output.attempt and not copy.source.stands_still.done():
            copy.source.stands_still.set_result(list(self.seats.holding(output.request).entries))

    def _run(self, request: RequestName, kept: int | None) -> None:
        """Lets the engine go on with the entries that the seat has."""
        holding, here = self.seats.holding(request), self._here(request)
        if holding is None:
            return
        if kept == len(holding.entries) and here.run is not None:
            return
        self._free_run(request)
        arrival = here.arrival
        if arrival is not None and arrival.run is not None and kept == len(holding.entries) and tokens_of(arrival.entries) == tokens_of(holding.entries):
            here.spec = arrival.run
            slots, computed = arrival.hand_over()
            here.arrival = None
            # Its source hears by the gateway that it can let go.
            arrival.connection.shut()
            return self._begin(request, here, holding, Arrived(slots, computed))
        self._free_arrival(request)
        if why := self._cannot_run(here.spec, holding.entries):
            return self._give_up(request, *why)
        if finish := self._is_complete(here.spec, tokens_of(holding.entries)):
            return self.seats.change(request, "output", self.now(), finish)
        self._begin(request, here, holding, None)

    def _begin(self, request: RequestName, here: Here, holding: of_seats.Holding, arrived: Arrived | None) -> None:
        run = f"baton-{os.urandom(12).hex()}"
        here.run = EngineRun(run, heard=time.monotonic() if arrived is None and not holding.entries else None)
        self.runs[run] = request
        self.engine.start(run, here.spec, tokens_of(holding.entries), arrived, self._engine_told)

    def _cannot_run(self, spec: Run | None, entries: list[Entry]) -> tuple[str, str] | None:
        if spec is None:
            return "refused", "nothing that can be read was said of what to run"
        if spec.adapter is not None:
            return "refused", f'it asks for the adapter "{spec.adapter}", and adapters are served over HTTP here'
        if spec.model not in self.engine.models:
            return "busy", f'it is of the model "{spec.model}", and this is {self.engine.models[0]}'
        if not spec.prompt:
            return "refused", "its prompt is empty"
        if max(spec.prompt) >= self.engine.vocabulary:
            return "refused", f"token {max(spec.prompt)} is outside of the vocabulary of {self.engine.vocabulary}"
        if len(spec.prompt) >= self.engine.ends.length_limit:
            return "busy", f"it has {len(spec.prompt)} tokens, and {self.engine.ends.length_limit} are taken"
        return None

    def _is_complete(self, spec: Run, output: list[int]) -> Entry | None:
        """The finish of what has all its tokens, when it is started from them."""
        sampling = spec.sampling
        if output and len(output) >= sampling.min_tokens:
            if output[-1] in sampling.stop_token_ids:
                return Entry(finish=("stop", output[-1]))
            if output[-1] in self.engine.ends.eos and not sampling.ignore_eos:
                return Entry(finish="eos")
        limit = inf if sampling.max_tokens is None else sampling.max_tokens
        if len(output) >= limit or len(spec.prompt) + len(output) >= self.engine.ends.length_limit:
            return Entry(finish="length")
        return None

    def _give_up(self, request: RequestName, klass: str, why: str) -> None:
        self.log.info("request %s cannot be run here: %s", request, why)
        self.reasons[request] = f"cannot be run here: {why}"
        self.seats.change(request, "cannot_run", self.now(), klass)

    def _go_on(self, request: RequestName) -> None:
        """What the seat wants computed and the engine does not have is computed again, from its tokens."""
        holding, here = self.seats.holding(request), self.requests.get(request)
        if holding is None or here is None or not holding.is_computing or here.run is not None:
            return
        self._run(request, None)
        self._perform_all()

    def _copy(self, output: of_seats.Copy) -> None:
        here = self._here(output.request)
        to = here.move_to[1] if here.move_to is not None and here.move_to[0] == output.attempt else None
        here.move_to = None
        busy = any(other.copy is not None for other in self.requests.values())
        if to is None or here.run is None or busy:
            why = "another request leaves, and one at a time does" if busy else "it was not said where to" if to is None else "it is not computed"
            self.reasons[output.request] = why
            return self.seats.change(output.request, "abort", self.now())
        source = kv.Source(self, output.request, output.attempt, output.target, to, here.run.id, here.spec)
        here.copy = Copy(output.attempt, source, asyncio.ensure_future(source.copy()))

    def _end_copy(self, request: RequestName, attempt: int) -> None:
        here = self.requests.get(request)
        if here is None or here.copy is None or here.copy.attempt != attempt:
            return
        copy, here.copy = here.copy, None
        if copy.task is not asyncio.current_task():
            copy.task.cancel()
        elif not copy.source.stands_still.done():
            copy.source.stands_still.cancel()
        if copy.source.freezing:
            # The engine has let go of it, or is about to.
            self._free_run(request)
            self._go_on(request)

    def _free_run(self, request: RequestName) -> None:
        here = self.requests.get(request)
        if here is not None and here.run is not None:
            self.runs.pop(here.run.id, None)
            self.engine.abort(here.run.id)
            here.run = None

    def _free_arrival(self, request: RequestName) -> None:
        here = self.requests.get(request)
        if here is not None and here.arrival is not None:
            arrival, here.arrival = here.arrival, None
            if arrival.left:
                arrival.release()
            else:
                arrival.connection.shut()

    def _forget(self, request: RequestName) -> None:
        here = self.requests.get(request)
        if self.seats.holding(request) is not None:
            return
        if here is not None and here.run is None and here.arrival is None and here.copy is None:
            del self.requests[request]

    # The engine.

    def _engine_told(self, run: str, news: Output | Refused | None) -> None:
        request = self.runs.get(run)
        here = None if request is None else self.requests.get(request)
        if here is None or here.run is None or here.run.id != run:
            return
        if isinstance(news, Output):
            if here.run.heard is not None and news.cached is not None:
                waited = int((time.monotonic() - here.run.heard) * 1e6)
                here.run.heard = None
                holding = self.seats.holding(request)
                if holding is not None:
                    self._send(request[:2], Kind.SCHEDULED, request, holding.tag, news.cached, waited)
            here.run.computed.extend(news.entries)
            self._settle(request)
        elif isinstance(news, Refused):
            self._give_up(request, news.klass, str(news))
        self._perform_all()

    def _settle(self, request: RequestName) -> None:
        """Gives the seat what was computed, as far as it takes it."""
        here = self.requests.get(request)
        if here is None or here.run is None:
            return
        run = here.run
        while run.computed:
            holding = self.seats.holding(request)
            if holding is None or not holding.is_computing:
                return
            unacknowledged = len(holding.entries) - holding.acked
            run.throttled = unacknowledged > (CREDIT // 2 if run.throttled else CREDIT)
            if run.throttled:
                return
            entry = run.computed.popleft()
            if entry.is_finish:
                self.runs.pop(run.id, None)
                here.run = None
            self.seats.change(request, "output", self.now(), entry)
            if entry.is_finish:
                return


def finish_of(ended: EndedRun, spec: Run) -> Entry | None:
    """How a run had ended before it could be taken out."""
    if ended.status == "FINISHED_ABORTED":
        return None
    return stopped_by(ended.stop, spec) if ended.status == "FINISHED_STOPPED" else Entry(finish="length")
