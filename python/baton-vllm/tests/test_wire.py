"""Against the bytes that the Rust side writes (`crates/baton-wire`, which tests that it does)."""

import pathlib
import struct

import pytest

from baton_vllm import wire
from baton_vllm.wire import DIALER, LISTENER, Entry, Hello, Kind, MoveTo, Opener, Run, Sealer, WireError

GOLDEN = pathlib.Path(__file__).parents[3] / "crates/baton-wire/tests/fixtures/migration-1.txt"
LINES = [(line.split()[0], [bytes.fromhex(part) for part in line.split()[1:]]) for line in GOLDEN.read_text().splitlines()]
KEY = bytes([1]) * 32


def lines(name):
    found = [parts for known, parts in LINES if known == name]
    assert found
    return found


def opened(opener, frame):
    length, kind = opener.header(frame[:16])
    body, trailer = frame[16 : 16 + length], frame[16 + length :]
    opener.check(frame[:16], body, trailer)
    return kind, body


def has_floats(value):
    if isinstance(value, (list, tuple)):
        return any(has_floats(one) for one in value)
    return isinstance(value, float) or (isinstance(value, Entry) and has_floats(value.logprobs))


@pytest.mark.parametrize("name, key", [("plain", None), ("sealed", KEY)])
def test_frames_are_read_and_written_as_rust_writes_them(name, key):
    opener, sealer, kinds = Opener(key), Sealer(key), set()
    for (frame,) in lines(name):
        kind, body = opened(opener, frame)
        known, values = wire.decode(kind, body)
        kinds.add(known)
        written = body if known == Kind.BLOCK else wire.encode(known, *values)
        assert wire.decode(kind, written) == (known, values)
        sealed = sealer.seal(known, written)
        # Rust has floats of half the size.
        if not has_floats(values):
            assert sealed == frame, known
    assert kinds == set(Kind)


def test_logprobs_are_kept():
    frames = [wire.decode(*opened(opener, frame)) for opener in [Opener(None)] for (frame,) in lines("plain")]
    entry = next(values[3] for kind, values in frames if kind == Kind.OUTPUT)
    assert entry.logprobs == [-0.5, [[1, -0.5], [9, -1.25]]]


def test_a_blocks_mac_leaves_its_bytes_out():
    (before, mac), = lines("block")
    assert Sealer(KEY).seal_block(3, 16, 77, 100) == (before, mac)


def test_what_to_run_is_read_as_it_was_written():
    ((data,),) = lines("run")
    run = Run.from_bytes(data)
    assert (run.model, run.prompt, run.seed, run.choice_index, run.salt) == ("m", [1, 2, 3], 2**64 - 1, 2, "s")
    assert (run.sampling.temperature, run.sampling.logit_bias, run.sampling.max_tokens) == (0.5, [[5, -1.5]], 9)
    assert (run.ends.eos, run.ends.length_limit, run.progress.computed, run.progress.cached) == ([2], 12, 4, 1)
    assert Run.from_bytes(run.to_bytes()) == run
    least = Run.from_bytes(wire.pack({"model": "m", "prompt": [1], "seed": 7, "later": 1}))
    assert least == Run("m", [1], 7)
    with pytest.raises(WireError):
        Run.from_bytes(b"what")


def test_where_to_move_is_written_as_rust_writes_it():
    ((data,),) = lines("move-to")
    assert MoveTo.from_bytes(data) == MoveTo("127.0.0.1:1", bytes([200]) * 16)
    assert MoveTo("127.0.0.1:1", bytes([200]) * 16).to_bytes() == data


def test_hellos_proofs_and_keys_are_as_rusts():
    (dialer, listener), = lines("hellos")
    for data in (dialer, listener):
        assert struct.unpack("<I", data[:4])[0] == len(data) - 4
        assert Hello.from_body(data[4:]).to_bytes() == data
    for name, side in (("dialer", DIALER), ("listener", LISTENER)):
        (proof, frame), = lines(name)
        assert wire.proof(b"secret", side, dialer, listener) == proof
        key = wire.frame_key(b"secret", side, dialer, listener)
        assert Sealer(key).seal(Kind.ALL_HELD, wire.encode(Kind.ALL_HELD)) == frame


def test_a_hello_of_another_version_or_shape_is_refused():
    (dialer, _), = lines("hellos")
    for change in ({0: 2}, {1: "stranger"}, {8: [0] * 31}, {2: -1}, {6: "never"}):
        fields = wire._unpack(dialer[4:])
        for place, value in change.items():
            fields[place] = value
        with pytest.raises(WireError):
            Hello.from_body(wire.pack(fields))


def test_a_frame_that_is_repeated_left_out_or_altered_ends_the_connection():
    sealer = Sealer(KEY)
    first, second = (sealer.seal(Kind.LEASE, wire.encode(Kind.LEASE, 1)) for _ in range(2))
    with pytest.raises(WireError, match="lost or repeated"):
        opened(Opener(KEY), second)
    opener = Opener(KEY)
    opened(opener, first)
    with pytest.raises(WireError, match="lost or repeated"):
        opened(opener, first)
    for place in range(16, len(first)):
        altered = bytearray(first)
        altered[place] ^= 0x10
        with pytest.raises(WireError, match="authentic"):
            opened(Opener(KEY), bytes(altered))


def test_no_bytes_of_a_stranger_raise_anything_else():
    import random

    draws = random.Random(1)
    for _ in range(20000):
        body = draws.randbytes(draws.randrange(40))
        for read in (lambda: wire.decode(draws.randrange(0x60), body), lambda: Hello.from_body(body), lambda: Run.from_bytes(body), lambda: MoveTo.from_bytes(body)):
            try:
                read()
            except WireError:
                pass
