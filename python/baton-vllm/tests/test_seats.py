"""The rules of the protocol's page, as the Rust side's tests have them."""

from baton_vllm.seats import Copy, EndCopy, Free, Heartbeat, Pause, Phase, RunFrom, Seats, Thaw, ToGateway
from baton_vllm.wire import Entry, Kind, Place, RequestName

GATEWAY = (1, 1)
REQUEST = RequestName(1, 1, 1)
TARGET, SOURCE = Place(1, 1), Place(0, 1)


def seats_at(now=0.0):
    seats = Seats()
    seats.attached(GATEWAY, now)
    drain(seats)
    return seats


def drain(seats, heartbeats=False):
    out = []
    while (output := seats.poll()) is not None:
        if heartbeats or not isinstance(output, Heartbeat):
            out.append(output)
    return out


def start(seats, now=1.0, epoch=1, entries=()):
    seats.from_gateway(REQUEST, "start", now, epoch, list(entries))


def token(number):
    return Entry(token=number)


def told(out, kind):
    return [output.values for output in out if isinstance(output, ToGateway) and output.kind == kind]


def test_a_request_runs_moves_and_is_released():
    seats = seats_at()
    start(seats)
    assert drain(seats) == [RunFrom(REQUEST, None)]
    seats.change(REQUEST, "output", 1.0, token(5))
    assert told(drain(seats), Kind.OUTPUT) == [(1, 0, token(5))]
    seats.from_gateway(REQUEST, "move", 1.0, 1, 2, TARGET)
    assert drain(seats) == [Copy(REQUEST, 2, TARGET)]
    seats.change(REQUEST, "frozen", 1.0)
    drain(seats)
    seats.change(REQUEST, "prepared", 1.0, 2, 7)
    assert drain(seats) == [], "the target has other entries"
    seats.change(REQUEST, "prepared", 1.0, 2, 1)
    assert told(drain(seats), Kind.COMMIT_TARGET) == [(1, 2, 1)]
    seats.from_gateway(REQUEST, "stop", 1.0, 1)
    out = drain(seats)
    assert out[:2] == [EndCopy(REQUEST, 2), Free(REQUEST)] and told(out, Kind.STOPPED) == [(1,)]
    start(seats)
    assert told(drain(seats), Kind.LOST) == [(1, "lost")], "the epoch is over"


def test_a_target_prepares_runs_and_is_not_had_again():
    seats = seats_at()
    assert seats.prepare(REQUEST, SOURCE, 2, 1.0)
    seats.change(REQUEST, "state", 1.0, 2, [token(5), token(6)])
    assert seats.holding(REQUEST).phase == Phase.PREPARED
    drain(seats)
    start(seats, epoch=2, entries=[token(5)])
    out = drain(seats)
    assert out[0] == RunFrom(REQUEST, 2) and told(out, Kind.OUTPUT) == [(2, 1, token(6))]
    assert not seats.prepare(REQUEST, SOURCE, 2, 1.0) and seats.is_over(REQUEST, 2)


def test_it_goes_on_from_the_common_beginning():
    seats = seats_at()
    start(seats)
    for number in (5, 6, 7):
        seats.change(REQUEST, "output", 1.0, token(number))
    drain(seats)
    start(seats, epoch=3, entries=[token(5), token(9)])
    assert drain(seats) == [RunFrom(REQUEST, 1)]
    assert seats.holding(REQUEST).entries == [token(5), token(9)]


def test_a_source_goes_on_when_it_is_told_no_whether_it_copies_is_frozen_or_asked():
    for phase in (Phase.COPYING, Phase.FROZEN):
        seats = seats_at()
        start(seats)
        seats.from_gateway(REQUEST, "move", 1.0, 1, 2, TARGET)
        if phase == Phase.FROZEN:
            seats.change(REQUEST, "frozen", 1.0)
        drain(seats)
        seats.from_gateway(REQUEST, "no", 1.0, 1, 2)
        out = drain(seats)
        assert told(out, Kind.ABORTED) == [(1, 2)] and (Thaw(REQUEST) in out) == (phase == Phase.FROZEN)
        assert seats.holding(REQUEST).is_computing
    seats = seats_at()
    start(seats)
    seats.from_gateway(REQUEST, "move", 1.0, 1, 2, TARGET)
    seats.change(REQUEST, "frozen", 1.0)
    seats.change(REQUEST, "prepared", 1.0, 2, 0)
    drain(seats)
    seats.from_gateway(REQUEST, "no", 1.0, 1, 2)
    assert told(drain(seats), Kind.COMMIT_SOURCE) == [(1, 2, 0)]
    seats.from_gateway(REQUEST, "resume", 1.0, 1, 2, 3, 0)
    assert Thaw(REQUEST) in drain(seats) and seats.holding(REQUEST).tag == 3


def test_an_attempt_is_honoured_once_and_not_after_no():
    seats = seats_at()
    start(seats)
    seats.from_gateway(REQUEST, "no", 1.0, 1, 2)
    drain(seats)
    seats.from_gateway(REQUEST, "move", 1.0, 1, 2, TARGET)
    assert told(drain(seats), Kind.ABORTED) == [(1, 2)] and seats.holding(REQUEST).phase == Phase.RUNNING


def test_leases_pause_and_free_and_a_suspension_is_noticed_first():
    seats = seats_at()
    start(seats, now=1.0)
    drain(seats)
    seats.timeout(5.5)
    assert Pause(REQUEST) in drain(seats) and not seats.holding(REQUEST).is_computing
    seats.from_gateway(REQUEST, "keep", 6.0, 1, 0)
    assert Thaw(REQUEST) in drain(seats)
    assert seats.holding(REQUEST).paused, "its lease has run out still"
    heartbeats = seats.gateways[GATEWAY].sequence
    seats.leased(GATEWAY, heartbeats, 6.1)
    out = drain(seats)
    assert told(out, Kind.HOLDS) == [(0, 1, 0)]
    seats.from_gateway(REQUEST, "keep", 6.2, 1, 0)
    assert seats.holding(REQUEST).is_computing
    seats.change(REQUEST, "output", 100.0, token(1))
    assert seats.holding(REQUEST) is None and Free(REQUEST) in drain(seats) and GATEWAY not in seats.gateways


def test_what_is_unanswered_is_said_again_and_a_gateway_that_is_gone_hears_nothing():
    seats = seats_at()
    start(seats, now=0.0)
    seats.change(REQUEST, "output", 0.0, token(5))
    drain(seats)
    seats.timeout(0.2)
    assert told(drain(seats), Kind.OUTPUT) == [(1, 0, token(5))]
    heartbeats = 0
    while (due := seats.poll_timeout()) < float("inf"):
        assert due < 62
        seats.timeout(due)
        heartbeats += sum(isinstance(output, Heartbeat) for output in drain(seats, heartbeats=True))
    assert heartbeats == 60 and not seats.requests


def test_timers_end_what_does_not_advance():
    def frozen():
        seats = seats_at()
        start(seats, now=0.0)
        seats.from_gateway(REQUEST, "move", 0.0, 1, 2, TARGET)
        seats.change(REQUEST, "frozen", 0.0)
        drain(seats)
        return seats

    seats = frozen()
    seats.timeout(4.9)
    assert seats.holding(REQUEST).phase == Phase.FROZEN
    seats.timeout(5.0)
    assert seats.holding(REQUEST).phase == Phase.RUNNING, "its target says nothing"
    seats = frozen()
    seats.change(REQUEST, "prepared", 0.0, 2, 0)
    seats.timeout(1.0)
    assert seats.holding(REQUEST).phase == Phase.RECLAIMING
    seats = seats_at()
    seats.prepare(REQUEST, SOURCE, 2, 0.0)
    seats.copy_advanced(REQUEST, 4.0)
    seats.gateways[GATEWAY].answered = 13.0
    seats.timeout(13.9)
    assert seats.holding(REQUEST).phase == Phase.PREPARING
    seats.timeout(14.0)
    assert seats.holding(REQUEST).phase == Phase.WITHDRAWING and told(drain(seats), Kind.WITHDRAW) == [(2,)]


def test_another_life_of_a_gateway_frees_what_the_older_one_left():
    seats = seats_at()
    start(seats)
    drain(seats)
    seats.attached((1, 2), 2.0)
    assert Free(REQUEST) in drain(seats) and GATEWAY not in seats.gateways
    assert not seats.prepare(RequestName(9, 1, 1), SOURCE, 2, 2.0), "its gateway is not attached"
