"""Two replicas over real sockets move what a fake engine computes."""

import asyncio

import pytest
from fake import Fleet, Gateway, alone, greedy

from baton_vllm.wire import ALL, Entry, Kind


async def started(gateway, spec, tokens=5):
    request, entries = gateway.new(), []
    await gateway.tell(0, Kind.START, request, 1, [], spec.to_bytes())
    await gateway.outputs(0, request, entries, tokens)
    return request, entries


async def moved(gateway, request, entries, epoch=1, attempt=2, source=0, target=1):
    """Until the source asks; then as its gateway would, until the target has said something."""
    await gateway.move(source, target, request, epoch, attempt)
    while True:
        kind, values = await gateway.heard(source, Kind.OUTPUT, Kind.COMMIT_TARGET, Kind.ABORTED)
        if kind == Kind.ABORTED:
            raise AssertionError(values)
        if kind == Kind.OUTPUT and values[2] == len(entries):
            entries.append(values[3])
        if kind == Kind.COMMIT_TARGET:
            assert values[3] == len(entries)
            break
    await gateway.tell(target, Kind.START, request, attempt, entries, greedy().to_bytes())
    await gateway.tell(source, Kind.STOP, request, epoch)


async def ended(gateway, fleet, request):
    for index in range(len(fleet.replicas)):
        await gateway.tell(index, Kind.STOP, request, ALL)
    await fleet.settled()


@pytest.mark.parametrize("key, ahead, output", [(None, 0, 100), (b"secret", 0, 100), (None, 3, 100), (None, 0, 250)])
async def test_a_moved_stream_reads_as_one_that_stayed_and_nothing_is_computed_twice(key, ahead, output):
    async with Fleet(key=key) as fleet, Gateway(fleet) as gateway:
        fleet.engines[0].ahead = ahead
        spec = greedy(output=output)
        request, entries = await started(gateway, spec)
        await moved(gateway, request, entries)
        await gateway.outputs(1, request, entries, output + 1)
        assert entries == alone(spec)
        assert fleet.engines[1].prefills == [1], "all but the last token came with its KV"
        await ended(gateway, fleet, request)


async def test_it_moves_there_and_back():
    async with Fleet() as fleet, Gateway(fleet) as gateway:
        spec = greedy(output=200)
        request, entries = await started(gateway, spec)
        for attempt in range(2, 8):
            source = attempt % 2
            await gateway.outputs(source, request, entries, len(entries) + 10)
            await moved(gateway, request, entries, attempt - 1, attempt, source, 1 - source)
        await gateway.outputs(0, request, entries, 201)
        assert entries == alone(spec)
        assert fleet.engines[0].prefills == [40, 1, 1, 1] and fleet.engines[1].prefills == [1, 1, 1]
        await ended(gateway, fleet, request)


async def test_a_source_whose_target_refuses_goes_on_as_if_nothing_had_been():
    async with Fleet() as fleet, Gateway(fleet) as gateway:
        spec = greedy()
        request, entries = await started(gateway, spec)
        await gateway.move(0, 1, request, 1, 2, wrong=bytes(16))
        kind, values = None, None
        while kind != Kind.ABORTED:
            kind, values = await gateway.heard(0, Kind.OUTPUT, Kind.ABORTED)
            if kind == Kind.OUTPUT and values[2] == len(entries):
                entries.append(values[3])
        assert values[3] == "the target refuses: nobody announced this attempt"
        await gateway.outputs(0, request, entries, 101)
        assert entries == alone(spec) and fleet.engines[0].prefills == [40]
        await ended(gateway, fleet, request)


async def test_a_frozen_source_that_is_told_no_computes_again_and_its_target_lets_go():
    async with Fleet() as fleet, Gateway(fleet) as gateway:
        spec = greedy(output=150)
        request, entries = await started(gateway, spec)
        await gateway.move(0, 1, request, 1, 2)
        while True:
            kind, values = await gateway.heard(0, Kind.OUTPUT, Kind.COMMIT_TARGET)
            if kind == Kind.COMMIT_TARGET:
                break
            if values[2] == len(entries):
                entries.append(values[3])
        await gateway.tell(0, Kind.NO, request, 1, 2)
        _, (_, epoch, attempt, frozen) = await gateway.heard(0, Kind.COMMIT_SOURCE)
        assert (epoch, attempt, frozen) == (1, 2, len(entries))
        await gateway.tell(0, Kind.RESUME, request, 1, 2, 3, frozen)
        await gateway.tell(1, Kind.STOP, request, 2)
        await gateway.outputs(0, request, entries, 151)
        assert entries == alone(spec)
        assert len(fleet.engines[0].prefills) == 2, "a freeze is final"
        await ended(gateway, fleet, request)


async def test_a_finish_that_races_the_freeze_ends_it_where_it_was():
    async with Fleet() as fleet, Gateway(fleet) as gateway:
        fleet.engines[0].ahead = 1000
        spec = greedy(output=60)
        request, entries = await started(gateway, spec)
        await gateway.move(0, 1, request, 1, 2)
        await gateway.outputs(0, request, entries, 61)
        assert entries == alone(spec)
        _, values = await gateway.heard(0, Kind.ABORTED)
        assert values[3] == "it finished first"
        await ended(gateway, fleet, request)


async def test_a_target_whose_source_has_gone_asks_and_keeps_what_it_has():
    async with Fleet() as fleet, Gateway(fleet) as gateway:
        spec = greedy(output=300)
        request, entries = await started(gateway, spec)
        await gateway.move(0, 1, request, 1, 2)
        await gateway.heard(0, Kind.COMMIT_TARGET)
        await gateway.tell(0, Kind.STOP, request, ALL)
        _, values = await gateway.heard(1, Kind.WITHDRAW)
        assert values == (request, 2) and len(fleet.engines[1].slots.free) < fleet.engines[1].slots.total
        await ended(gateway, fleet, request)


async def test_without_room_for_blocks_a_target_refuses_and_a_source_goes_on():
    async with Fleet(slots=2) as fleet, Gateway(fleet) as gateway:
        request, entries = await started(gateway, greedy())
        await gateway.move(0, 1, request, 1, 2)
        _, values = await gateway.heard(0, Kind.ABORTED)
        assert "blocks, and 2 can be had" in values[3]
        await ended(gateway, fleet, request)


async def test_nothing_is_run_that_cannot_be_and_it_is_said_of_what_class_it_is():
    async with Fleet() as fleet, Gateway(fleet) as gateway:
        for change, klass in (
            ({"model": "other"}, "busy"),
            ({"adapter": "a"}, "refused"),
            ({"prompt": []}, "refused"),
            ({"prompt": [200]}, "refused"),
            ({"prompt": [1] * 3000}, "busy"),
        ):
            spec = greedy()
            for name, value in change.items():
                setattr(spec, name, value)
            request = gateway.new()
            await gateway.tell(0, Kind.START, request, 1, [], spec.to_bytes())
            _, values = await gateway.heard(0, Kind.LOST)
            assert values[:3] == (request, 1, klass) and values[3].startswith("cannot be run here")
        await fleet.settled()


async def test_what_has_all_its_tokens_is_finished_and_not_run():
    async with Fleet() as fleet, Gateway(fleet) as gateway:
        spec = greedy(output=3)
        entries = [Entry(token=token) for token in (1, 2, 3)]
        request = gateway.new()
        await gateway.tell(0, Kind.START, request, 1, entries, spec.to_bytes())
        _, values = await gateway.heard(0, Kind.OUTPUT)
        assert values[2:] == (3, Entry(finish="length")) and fleet.engines[0].prefills == []
        await ended(gateway, fleet, request)


async def test_unacknowledged_entries_hold_it_up():
    async with Fleet() as fleet, Gateway(fleet) as gateway:
        spec = greedy(output=400)
        request, entries = gateway.new(), []
        await gateway.tell(0, Kind.START, request, 1, [], spec.to_bytes())
        seen = set()
        while len(seen) < 257:
            _, values = await gateway.heard(0, Kind.OUTPUT)
            seen.add(values[2])
        while fleet.engines[0].runs:
            await asyncio.sleep(0.001)
        # All is computed, and what is said again was said before.
        later = [values[2] for kind, values in gateway.frames[0]._queue if kind == Kind.OUTPUT]
        assert seen | set(later) == set(range(257))
        await gateway.tell(0, Kind.ACK, request, 1, 257)
        _, values = await gateway.heard(0, Kind.OUTPUT)
        while not values[3].is_finish:
            _, values = await gateway.heard(0, Kind.OUTPUT)
            await gateway.tell(0, Kind.ACK, request, 1, values[2])
        assert values[2] == 400
        await ended(gateway, fleet, request)


async def test_a_wrong_key_opens_nothing_and_beyond_loopback_a_key_is_asked_for():
    from baton_vllm import link
    from baton_vllm.wire import Hello, WireError

    async with Fleet(count=1, key=b"secret") as fleet:
        with pytest.raises((WireError, OSError)):
            await link.dial(fleet.replicas[0].control_address, link.Identity(Hello("gateway", 1, 1), b"other"), "gateway", 5)
    with pytest.raises(ValueError, match="fleet key"):
        link.bind("192.0.2.1", 0, None)
    with pytest.raises(ValueError, match="no address"):
        link.bind("0.0.0.0", 0, b"secret")
