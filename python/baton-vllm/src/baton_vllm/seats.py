"""Who computes a request while it moves: all that one replica's life holds of requests, with its gateways' leases and its timers.

Pure: time is an argument, messages come in by `handle_*` and go out by `poll`. It follows `docs/migration-protocol.md` line by line, and the
state machine of `crates/baton-migration` that was checked over every interleaving."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import Any

from .wire import Entry, Kind, Place, RequestName

REPEAT_S, REPEAT_MAX_S = 0.2, 5.0
HEARTBEAT_S = 0.5
STOP_AFTER_S, FREE_AFTER_S = 5.0, 15.0
STAND_STILL_S = 5.0
RECLAIM_AFTER_S = 1.0
WITHDRAW_AFTER_S = 10.0
STALL_AFTER_S = 20.0
# Heartbeats without an answer that are remembered.
SENT_MAX = 256


class Phase(IntEnum):
    RUNNING = 0
    COPYING = 1
    FROZEN = 2
    ASKING = 3
    RECLAIMING = 4
    PREPARING = 5
    PREPARED = 6
    WITHDRAWING = 7

    @property
    def is_arriving(self) -> bool:
        return self >= Phase.PREPARING


# What comes out of it.


@dataclass(frozen=True)
class ToGateway:
    """`values` are the frame's fields after the request; a reason is added by whoever sends it."""

    request: RequestName
    kind: Kind
    values: tuple


@dataclass(frozen=True)
class Heartbeat:
    gateway: tuple[int, int]
    sequence: int


@dataclass(frozen=True)
class AllHeld:
    gateway: tuple[int, int]


@dataclass(frozen=True)
class SendState:
    """To the target: these are all entries; the KV of all but the last is there."""

    request: RequestName
    attempt: int


@dataclass(frozen=True)
class SendPrepared:
    """To the source: all is here and checked."""

    request: RequestName
    attempt: int
    entries: int


@dataclass(frozen=True)
class RunFrom:
    """Let the engine go on with the seat's entries. `kept`: how many of them the KV that came, or is here, is good for; none is computed anew."""

    request: RequestName
    kept: int | None


@dataclass(frozen=True)
class Copy:
    request: RequestName
    attempt: int
    target: Place


@dataclass(frozen=True)
class EndCopy:
    request: RequestName
    attempt: int


@dataclass(frozen=True)
class Thaw:
    request: RequestName


@dataclass(frozen=True)
class Pause:
    request: RequestName


@dataclass(frozen=True)
class Free:
    request: RequestName


@dataclass
class Holding:
    phase: Phase
    tag: int
    # The last attempt that it was part of, in either role.
    attempt: int
    peer: Place | None = None
    entries: list[Entry] = field(default_factory=list)
    acked: int = 0
    # Computes nothing until its gateway has confirmed it as the owner.
    paused: bool = False

    @property
    def has_finished(self) -> bool:
        return bool(self.entries) and self.entries[-1].is_finish

    @property
    def is_computing(self) -> bool:
        return self.phase in (Phase.RUNNING, Phase.COPYING) and not self.has_finished and not self.paused


class Seat:
    """What is known of one request: what is held, and the highest tag that ran here or was stopped."""

    def __init__(self, name: RequestName):
        self.name, self.seen, self.holding = name, 0, None

    # From the gateway.

    def start(self, epoch: int, delivered: list[Entry], out: list) -> None:
        holding, following = self.holding, len(delivered)
        if holding is None or not (holding.tag == epoch and holding.phase.is_arriving):
            if holding is not None and holding.tag == epoch:
                # Heard before; it may not have been answered.
                self._unpause(out)
                return self._outputs_from(following, out)
            if epoch <= self.seen or (holding is not None and holding.tag > epoch):
                return self._tell(Kind.LOST, (epoch, "lost"), out)
        entries, kept = delivered, None
        if holding is not None:
            self._end_of_copy(out)
            if holding.phase == Phase.PREPARING:
                kept = 0
            elif holding.entries[:following] == delivered:
                # What it has beyond the client's entries is as good as those: it was computed from them.
                entries, kept = holding.entries, len(holding.entries)
            else:
                pairs = zip(holding.entries, delivered)
                kept = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(holding.entries), following))
        self.seen = max(self.seen, epoch)
        self.holding = Holding(Phase.RUNNING, epoch, epoch, entries=list(entries), acked=following)
        out.append(RunFrom(self.name, kept) if self.holding.is_computing else Free(self.name))
        self._outputs_from(following, out)

    def keep(self, epoch: int, following: int, out: list) -> None:
        holding = self.holding
        if holding is None:
            self.seen = max(self.seen, epoch)
            self._tell(Kind.LOST, (epoch, "lost"), out)
        elif holding.tag == epoch and not holding.phase.is_arriving:
            self._unpause(out)
            self._outputs_from(following, out)
        # What arrives may have been committed: then its own question is answered.

    def move(self, epoch: int, attempt: int, target: Place, out: list) -> None:
        holding = self.holding
        if holding is None or holding.phase != Phase.RUNNING or holding.tag != epoch:
            return
        if holding.attempt == attempt:
            # It ended here; that it did may not have been heard.
            self._tell(Kind.ABORTED, (epoch, attempt), out)
        if not holding.is_computing or holding.attempt >= attempt:
            return
        holding.phase, holding.attempt, holding.peer = Phase.COPYING, attempt, target
        out.append(Copy(self.name, attempt, target))

    def no(self, epoch: int, attempt: int, out: list) -> None:
        holding = self.holding
        if holding is None or holding.tag != epoch or holding.phase.is_arriving:
            return
        if holding.attempt <= attempt:
            if holding.phase == Phase.ASKING:
                return self.reclaim(out)
            if holding.phase == Phase.RECLAIMING:
                return self._commit(Kind.COMMIT_SOURCE, out)
            if holding.phase in (Phase.COPYING, Phase.FROZEN):
                self.abort(out)
        # A message to move for it may be under way still.
        holding.attempt = max(holding.attempt, attempt)
        answer = ToGateway(self.name, Kind.ABORTED, (epoch, attempt))
        if not out or out[-1] != answer:
            out.append(answer)

    def resume(self, epoch: int, attempt: int, resumed: int, following: int, out: list) -> None:
        holding = self.holding
        if holding is None or (holding.phase, holding.tag, holding.attempt) != (Phase.RECLAIMING, epoch, attempt):
            return
        holding.phase, holding.tag, holding.paused = Phase.RUNNING, resumed, False
        self.seen = max(self.seen, resumed)
        out += [EndCopy(self.name, attempt), Thaw(self.name)]
        self._outputs_from(following, out)

    def stop(self, upto: int, out: list) -> None:
        if self.holding is not None and self.holding.tag <= upto:
            self._drop(out)
        self.seen = max(self.seen, upto)
        self._tell(Kind.STOPPED, (upto,), out)

    def ack(self, epoch: int, following: int, out: list) -> None:
        if self.holding is not None and self.holding.tag == epoch:
            self.holding.acked = max(self.holding.acked, following)

    # From the other side of an attempt.

    def prepare(self, source: Place, attempt: int, out: list) -> bool:
        """Whether it is taken."""
        if self._arriving(attempt) is not None:
            return True
        if attempt <= self.seen or (self.holding is not None and self.holding.tag >= attempt):
            return False
        self._drop(out)
        self.seen = max(self.seen, attempt - 1)
        self.holding = Holding(Phase.PREPARING, attempt, attempt, peer=source)
        return True

    def state(self, attempt: int, entries: list[Entry], out: list) -> None:
        holding = self._arriving(attempt)
        if holding is None:
            return
        if holding.phase == Phase.PREPARING:
            holding.phase, holding.entries = Phase.PREPARED, entries
        out.append(SendPrepared(self.name, attempt, len(holding.entries)))

    def prepared(self, attempt: int, entries: int, out: list) -> None:
        holding = self.holding
        if holding is not None and holding.phase == Phase.FROZEN and holding.attempt == attempt and len(holding.entries) == entries:
            holding.phase = Phase.ASKING
            self._commit(Kind.COMMIT_TARGET, out)

    def peer_abort(self, attempt: int, out: list) -> None:
        if self.holding is None or self.holding.attempt != attempt:
            return
        # Once the gateway may have been asked, only its answer counts.
        if self.holding.phase in (Phase.COPYING, Phase.FROZEN):
            self.abort(out)
        elif self.holding.phase in (Phase.PREPARING, Phase.PREPARED):
            self.withdraw(out)

    # From the engine and by itself.

    def output(self, entry: Entry, out: list) -> None:
        holding = self.holding
        if holding is None or not holding.is_computing:
            return
        self._tell(Kind.OUTPUT, (holding.tag, len(holding.entries), entry), out)
        holding.entries.append(entry)
        if entry.is_finish and holding.phase == Phase.COPYING:
            self.abort(out)

    def frozen(self, out: list) -> None:
        if self.holding is not None and self.holding.phase == Phase.COPYING:
            self.holding.phase = Phase.FROZEN
            out.append(SendState(self.name, self.holding.attempt))

    def abort(self, out: list) -> None:
        """Gives an attempt up that the gateway was not asked to commit. The request goes on here."""
        holding = self.holding
        if holding is None or holding.phase not in (Phase.COPYING, Phase.FROZEN):
            return
        thaw, holding.phase = holding.phase == Phase.FROZEN, Phase.RUNNING
        out.append(EndCopy(self.name, holding.attempt))
        if thaw and not holding.paused:
            out.append(Thaw(self.name))
        self._tell(Kind.ABORTED, (holding.tag, holding.attempt), out)

    def reclaim(self, out: list) -> None:
        if self.holding is not None and self.holding.phase == Phase.ASKING:
            self.holding.phase = Phase.RECLAIMING
            self._commit(Kind.COMMIT_SOURCE, out)

    def withdraw(self, out: list) -> None:
        if self.holding is not None and self.holding.phase in (Phase.PREPARING, Phase.PREPARED):
            self.holding.phase = Phase.WITHDRAWING
            self._tell(Kind.WITHDRAW, (self.holding.tag,), out)

    def pause(self, out: list) -> None:
        holding = self.holding
        if holding is None or holding.phase.is_arriving or holding.paused:
            return
        if holding.is_computing:
            out.append(Pause(self.name))
        holding.paused = True

    def lapse(self, out: list) -> None:
        if self.holding is not None:
            self.seen = max(self.seen, self.holding.tag)
            self._drop(out)

    def cannot_run(self, klass: str, out: list) -> None:
        holding = self.holding
        if holding is None or holding.phase.is_arriving:
            return
        epoch = holding.tag
        self._drop(out)
        self.seen = max(self.seen, epoch)
        self._tell(Kind.LOST, (epoch, klass), out)

    # What the other side may have missed.

    @property
    def is_waiting(self) -> bool:
        holding = self.holding
        if holding is None or holding.phase == Phase.PREPARING:
            return False
        return len(holding.entries) > holding.acked if holding.phase == Phase.RUNNING else True

    def unanswered(self) -> list:
        out: list = []
        holding = self.holding
        if holding is None:
            return out
        if not holding.phase.is_arriving:
            self._outputs_from(holding.acked, out)
        if holding.phase == Phase.FROZEN:
            out.append(SendState(self.name, holding.attempt))
        elif holding.phase == Phase.ASKING:
            self._commit(Kind.COMMIT_TARGET, out)
        elif holding.phase == Phase.RECLAIMING:
            self._commit(Kind.COMMIT_SOURCE, out)
        elif holding.phase == Phase.PREPARED:
            out.append(SendPrepared(self.name, holding.tag, len(holding.entries)))
        elif holding.phase == Phase.WITHDRAWING:
            self._tell(Kind.WITHDRAW, (holding.tag,), out)
        return out

    def _arriving(self, attempt: int) -> Holding | None:
        holding = self.holding
        return holding if holding is not None and holding.tag == attempt and holding.phase.is_arriving else None

    def _unpause(self, out: list) -> None:
        if self.holding.paused:
            self.holding.paused = False
            if self.holding.is_computing:
                out.append(Thaw(self.name))

    def _outputs_from(self, following: int, out: list) -> None:
        holding = self.holding
        for index in range(following, len(holding.entries)):
            self._tell(Kind.OUTPUT, (holding.tag, index, holding.entries[index]), out)

    def _commit(self, kind: Kind, out: list) -> None:
        self._tell(kind, (self.holding.tag, self.holding.attempt, len(self.holding.entries)), out)

    def _end_of_copy(self, out: list) -> None:
        if self.holding.phase in (Phase.COPYING, Phase.FROZEN, Phase.ASKING, Phase.RECLAIMING):
            out.append(EndCopy(self.name, self.holding.attempt))

    def _drop(self, out: list) -> None:
        if self.holding is not None:
            self._end_of_copy(out)
            self.holding = None
            out.append(Free(self.name))

    def _tell(self, kind: Kind, values: tuple, out: list) -> None:
        out.append(ToGateway(self.name, kind, values))


@dataclass
class Lease:
    """What a gateway's requests may do. It counts from when the answered heartbeat was sent, so that no delay makes it longer."""

    answered: float
    following: float
    sequence: int = 0
    sent: deque = field(default_factory=deque)
    standing: str = "valid"

    def ends(self) -> float:
        """When it covers less than now, or is forgotten."""
        after = {"valid": STOP_AFTER_S, "stopped": FREE_AFTER_S, "freed": 2 * FREE_AFTER_S}[self.standing]
        return self.answered + after + 1e-9


@dataclass
class Held:
    seat: Seat
    # When the phase began, its copy advanced last, or the seat became empty.
    since: float
    phase: Phase | None = None
    repeat_at: float = inf
    repeat_after: float = 0.0

    def waits(self) -> float:
        """How long the phase waits for somebody."""
        return {
            None: 2 * FREE_AFTER_S,
            Phase.COPYING: STALL_AFTER_S,
            Phase.FROZEN: STAND_STILL_S,
            Phase.ASKING: RECLAIM_AFTER_S,
            Phase.PREPARING: WITHDRAW_AFTER_S,
            Phase.PREPARED: WITHDRAW_AFTER_S,
        }.get(self.phase, inf)

    def due(self) -> float:
        return min(self.since + self.waits(), self.repeat_at)


class Seats:
    def __init__(self) -> None:
        self.gateways: dict[tuple[int, int], Lease] = {}
        self.requests: dict[RequestName, Held] = {}
        self.outputs: deque = deque()

    def holding(self, request: RequestName) -> Holding | None:
        held = self.requests.get(request)
        return None if held is None else held.seat.holding

    def is_over(self, request: RequestName, attempt: int) -> bool:
        """Whether an attempt was stopped here, or something newer is held."""
        held = self.requests.get(request)
        if held is None:
            return False
        return held.seat.seen >= attempt or (held.seat.holding is not None and held.seat.holding.tag >= attempt)

    def poll(self) -> Any:
        return self.outputs.popleft() if self.outputs else None

    def poll_timeout(self) -> float:
        leases = (min(lease.following, lease.ends()) for lease in self.gateways.values())
        return min((*leases, *(held.due() for held in self.requests.values())), default=inf)

    def attached(self, gateway: tuple[int, int], now: float) -> None:
        """Its connection is there; what an older life of it left can be asked for by nobody."""
        self._look_at_leases(now)
        for name in [name for name in self.requests if name.gateway == gateway[0] and name.incarnation != gateway[1]]:
            self._with(name, now, Seat.lapse)
        for older in [other for other in self.gateways if other[0] == gateway[0] and other != gateway]:
            del self.gateways[older]
        former = self.gateways.get(gateway)
        self.gateways[gateway] = Lease(now, now, sequence=former.sequence if former else 0)
        self._tell_holdings(gateway)
        self._look_at_leases(now)

    def leased(self, gateway: tuple[int, int], sequence: int, now: float) -> None:
        self._look_at_leases(now)
        lease = self.gateways.get(gateway)
        if lease is None:
            return
        while lease.sent and lease.sent[0][0] <= sequence:
            number, sent = lease.sent.popleft()
            if number == sequence:
                lease.answered = max(lease.answered, sent)
        # The answer to an old heartbeat says nothing of now.
        if lease.standing != "valid" and now - lease.answered <= STOP_AFTER_S:
            lease.standing = "valid"
            self._tell_holdings(gateway)

    def from_gateway(self, request: RequestName, message: str, now: float, *values: Any) -> None:
        """`message`: a verb of `Seat`."""
        self._look_at_leases(now)
        self._with(request, now, lambda seat, out: getattr(seat, message)(*values, out))
        self._cover(request, now)

    def prepare(self, request: RequestName, source: Place, attempt: int, now: float) -> bool:
        self._look_at_leases(now)
        self._with(request, now, lambda seat, out: seat.prepare(source, attempt, out))
        self._cover(request, now)
        holding = self.holding(request)
        return holding is not None and (holding.phase, holding.tag) == (Phase.PREPARING, attempt)

    def change(self, request: RequestName, verb: str, now: float, *values: Any) -> None:
        """From the other side of an attempt, or the engine."""
        self._look_at_leases(now)
        self._with(request, now, lambda seat, out: getattr(seat, verb)(*values, out))

    def copy_advanced(self, request: RequestName, now: float) -> None:
        """What is prepared to the end does not wait longer for it."""
        held = self.requests.get(request)
        if held is not None and held.phase in (Phase.COPYING, Phase.FROZEN, Phase.PREPARING):
            held.since = now

    def timeout(self, now: float) -> None:
        self._look_at_leases(now)
        for name in [name for name, held in self.requests.items() if held.due() <= now]:
            held = self.requests[name]
            if now - held.since >= held.waits():
                if held.phase is None:
                    del self.requests[name]
                    continue
                ends = {Phase.COPYING: Seat.abort, Phase.FROZEN: Seat.abort, Phase.ASKING: Seat.reclaim}
                self._with(name, now, ends.get(held.phase, Seat.withdraw))
            if held.repeat_at <= now:
                held.repeat_after = min(2 * held.repeat_after, REPEAT_MAX_S)
                held.repeat_at = now + held.repeat_after
                self.outputs.extend(held.seat.unanswered())

    def _cover(self, request: RequestName, now: float) -> None:
        """A message that was long under way, or that comes for a gateway which is not attached, begins nothing that no lease would end."""
        lease = self.gateways.get((request.gateway, request.incarnation))
        if lease is None or lease.standing == "freed":
            self._with(request, now, Seat.lapse)
        elif lease.standing == "stopped":
            self._with(request, now, Seat.pause)

    def _tell_holdings(self, gateway: tuple[int, int]) -> None:
        for name, held in self.requests.items():
            holding = held.seat.holding
            if name[:2] == gateway and holding is not None:
                self.outputs.append(ToGateway(name, Kind.HOLDS, (int(holding.phase), holding.tag, len(holding.entries))))
        self.outputs.append(AllHeld(gateway))

    def _look_at_leases(self, now: float) -> None:
        """Sends heartbeats, and ends what leases do not cover any more. Before anything else: after a suspension nothing computes on a lease
        that has run out."""
        for gateway, lease in list(self.gateways.items()):
            age, ended = now - lease.answered, None
            if age > FREE_AFTER_S and lease.standing != "freed":
                lease.standing, ended = "freed", Seat.lapse
            elif age > STOP_AFTER_S and lease.standing == "valid":
                lease.standing, ended = "stopped", Seat.pause
            if lease.following <= now:
                lease.sequence += 1
                lease.sent.append((lease.sequence, now))
                if len(lease.sent) > SENT_MAX:
                    lease.sent.popleft()
                lease.following = now + HEARTBEAT_S
                self.outputs.append(Heartbeat(gateway, lease.sequence))
            if age > 2 * FREE_AFTER_S:
                del self.gateways[gateway]
            if ended is not None:
                for name in [name for name in self.requests if name[:2] == gateway]:
                    self._with(name, now, ended)

    def _with(self, request: RequestName, now: float, change: Any) -> None:
        held = self.requests.setdefault(request, Held(Seat(request), now))
        out: list = []
        change(held.seat, out)
        holding = held.seat.holding
        phase = None if holding is None else holding.phase
        if phase != held.phase:
            held.phase, held.since, held.repeat_at = phase, now, inf
        if not held.seat.is_waiting:
            held.repeat_at = inf
        elif held.repeat_at == inf:
            held.repeat_at, held.repeat_after = now + REPEAT_S, REPEAT_S
        self.outputs.extend(out)
