"""The bytes of the Baton migration protocol, version 1: hellos, frames, and what stands in them.

Pure: no sockets and no clock. The protocol's page names the fields; a name here is the name there."""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

VERSION = 1
HELLO_MAX = 64 << 10
BODY_MAX = 64 << 20
HEADER = struct.Struct("<IHHQ")
BLOCK_HEADER = struct.Struct("<IIQ")
MAC_BYTES = 16
PROOF_BYTES = 32
ALL = 2**32 - 1

pack = msgspec.msgpack.encode
_unpack = msgspec.msgpack.decode


class WireError(Exception):
    """What came cannot be read; the connection ends."""


class Kind(IntEnum):
    HEARTBEAT = 0x10
    LEASE = 0x11
    HOLDS = 0x12
    ALL_HELD = 0x13
    START = 0x20
    KEEP = 0x21
    EXPECT = 0x22
    MOVE = 0x23
    NO = 0x24
    RESUME = 0x25
    STOP = 0x26
    ACK = 0x27
    COPY = 0x28
    OUTPUT = 0x30
    COMMIT_TARGET = 0x31
    COMMIT_SOURCE = 0x32
    ABORTED = 0x33
    WITHDRAW = 0x34
    STOPPED = 0x35
    LOST = 0x36
    SCHEDULED = 0x37
    MOVED = 0x38
    COPIED = 0x39
    OPEN = 0x40
    PREPARE = 0x41
    BLOCK = 0x42
    STATE = 0x43
    ABORT = 0x44
    PREFIX = 0x45
    PREFIX_SENT = 0x46
    HAVE = 0x50
    REFUSE = 0x51
    CREDIT = 0x52
    PREPARED = 0x53
    INSTALLED = 0x54


class RequestName(NamedTuple):
    gateway: int
    incarnation: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.gateway:x}.{self.incarnation:x}.{self.sequence}"


class Place(NamedTuple):
    replica: int
    incarnation: int

    def __str__(self) -> str:
        return f"r{self.replica}#{self.incarnation:x}"


@dataclass(frozen=True)
class Entry:
    """What stands at one output index: a token, or the finish. Equal where the client would see the same."""

    token: int | None = None
    finish: str | tuple[str, int] | None = None
    logprobs: Any = field(default=None, compare=False)

    @property
    def is_finish(self) -> bool:
        return self.token is None

    def to_wire(self) -> dict:
        if self.token is not None:
            return {"t": [self.token, self.logprobs]}
        if isinstance(self.finish, tuple):
            return {"f": {self.finish[0]: self.finish[1]}}
        return {"f": self.finish}

    @classmethod
    def from_wire(cls, value: Any) -> Entry:
        if isinstance(value, dict) and len(value) == 1:
            if isinstance(token := value.get("t"), list) and len(token) == 2:
                return cls(token=count(token[0]), logprobs=token[1])
            reason = value.get("f")
            if reason in ("eos", "length"):
                return cls(finish=reason)
            if isinstance(reason, dict) and list(reason) == ["stop"]:
                return cls(finish=("stop", count(reason["stop"])))
        raise WireError("an entry is neither a token nor a finish")


def count(value: Any, limit: int = 2**32) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise WireError(f"{value!r} is no number below {limit}")
    return value


def long(value: Any) -> int:
    return count(value, 2**64)


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise WireError(f"{value!r} is no text")
    return value


def binary(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise WireError("bytes are wanted")
    return value


def numbers(length: int | None = None, limit: int = 256):
    def read(value: Any) -> list[int]:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise WireError("a list of numbers is wanted")
        if any(type(one) is not int or not 0 <= one < limit for one in value):
            raise WireError(f"a number is not below {limit}")
        return value

    return read


def entries(value: Any) -> list[Entry]:
    if not isinstance(value, list):
        raise WireError("a list of entries is wanted")
    return [Entry.from_wire(one) for one in value]


def request(value: Any) -> RequestName:
    return RequestName(*numbers(3, 2**64)(value))


def place(value: Any) -> Place:
    replica, incarnation = numbers(2, 2**64)(value)
    return Place(count(replica), incarnation)


def nonce16(value: Any) -> bytes:
    return bytes(numbers(16)(value))


def nothing(value: Any) -> None:
    return None


class Plan(NamedTuple):
    """What a source brings."""

    tokens: list[int]
    keys: list[int]
    blocks: int
    request: bytes

    def to_wire(self) -> list:
        return [self.tokens, self.keys, self.blocks, list(self.request)]

    @classmethod
    def from_wire(cls, value: Any) -> Plan:
        tokens, keys, blocks, run = fields_of(value, 4)
        return cls(numbers(None, 2**32)(tokens), numbers(None, 2**64)(keys), count(blocks), bytes(numbers()(run)))


def fields_of(value: Any, length: int) -> list:
    if not isinstance(value, list) or len(value) != length:
        raise WireError(f"an array of {length} is wanted")
    return value


def held(value: Any) -> int:
    return count(fields_of(value, 1)[0])


# What each frame's array holds, in order. OPEN and those below it come on KV connections.
BODIES: dict[Kind, tuple] = {
    Kind.HEARTBEAT: (long, long, long, count, count),
    Kind.LEASE: (long,),
    Kind.HOLDS: (request, count, count, count),
    Kind.START: (request, count, entries, binary),
    Kind.KEEP: (request, count, count),
    Kind.EXPECT: (request, count, place, nonce16),
    Kind.MOVE: (request, count, count, place, binary),
    Kind.NO: (request, count, count),
    Kind.RESUME: (request, count, count, count, count),
    Kind.STOP: (request, count),
    Kind.ACK: (request, count, count),
    Kind.COPY: (request, count, place, binary, binary),
    Kind.OUTPUT: (request, count, count, Entry.from_wire),
    Kind.COMMIT_TARGET: (request, count, count, count),
    Kind.COMMIT_SOURCE: (request, count, count, count),
    Kind.ABORTED: (request, count, count, text),
    Kind.WITHDRAW: (request, count),
    Kind.STOPPED: (request, count),
    Kind.LOST: (request, count, text, text),
    Kind.SCHEDULED: (request, count, count, long),
    Kind.MOVED: (request, count, long, count, count, long),
    Kind.COPIED: (request, count, count, count, long, long),
    Kind.OPEN: (request, count, place, place, nonce16),
    Kind.STATE: (entries, Plan.from_wire),
    Kind.ABORT: (text,),
    Kind.HAVE: (held, long),
    Kind.CREDIT: (long,),
    Kind.PREPARED: (count,),
    Kind.INSTALLED: (count,),
}
# Those whose body is one thing, and no array of fields.
SINGLES: dict[Kind, Any] = {
    Kind.PREPARE: Plan.from_wire,
    Kind.PREFIX: Plan.from_wire,
    Kind.REFUSE: lambda value: value,
    Kind.ALL_HELD: nothing,
    Kind.PREFIX_SENT: nothing,
}
CONTROL_FROM_GATEWAY = {Kind.LEASE, *(kind for kind in Kind if 0x20 <= kind < 0x30)}


def to_wire(value: Any) -> Any:
    if isinstance(value, (Entry, Plan)):
        return value.to_wire()
    if isinstance(value, list) and value and isinstance(value[0], Entry):
        return [one.to_wire() for one in value]
    return value


def encode(kind: Kind, *values: Any) -> bytes:
    """A frame's body. Values are as `decode` gives them."""
    if kind == Kind.HAVE:
        return pack([[values[0]], values[1]])
    if kind in (Kind.EXPECT, Kind.OPEN):
        values = (*values[:-1], list(values[-1]))
    if kind in SINGLES:
        return pack(to_wire(values[0]) if values else None)
    return pack([to_wire(value) for value in values])


def decode(kind: int, body: bytes) -> tuple[Kind, tuple]:
    try:
        known = Kind(kind)
    except ValueError:
        raise WireError(f"a frame of kind {kind:#x} is not known here") from None
    if known == Kind.BLOCK:
        if len(body) != BLOCK_HEADER.size:
            raise WireError("a block's header has 16 bytes")
        return known, BLOCK_HEADER.unpack(body)
    try:
        value = _unpack(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a frame of kind {kind:#x} has a body that cannot be read: {error}") from None
    if known in SINGLES:
        return known, (SINGLES[known](value),)
    readers = BODIES[known]
    return known, tuple(read(one) for read, one in zip(readers, fields_of(value, len(readers))))


# What to run.


@dataclass
class Sampling:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list = field(default_factory=list)
    stop_token_ids: list = field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    logprobs: int | None = None


@dataclass
class Progress:
    computed: int = 0
    age_us: int = 0
    since_first_scheduled_us: int | None = None
    since_first_token_us: int | None = None
    cached: int | None = None
    preemptions: int = 0


@dataclass
class Ends:
    eos: list
    length_limit: int


@dataclass
class Run:
    """What a replica must know of a request besides its output."""

    model: str
    prompt: list
    seed: int
    sampling: Sampling = field(default_factory=Sampling)
    prompt_index: int = 0
    choice_index: int = 0
    priority: int = 0
    adapter: str | None = None
    salt: str | None = None
    ends: Ends | None = None
    progress: Progress = field(default_factory=Progress)

    def to_bytes(self) -> bytes:
        # A dataclass is packed as the map of its fields.
        return pack(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Run:
        try:
            return _RUN.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"what to run cannot be read: {error}") from None


_RUN = msgspec.msgpack.Decoder(Run)
assert {one.name for one in fields(Run)} >= {"model", "prompt", "seed"}


class MoveTo(NamedTuple):
    """Where a source takes KV, and what it shows there."""

    kv_address: str
    nonce: bytes

    def to_bytes(self) -> bytes:
        return pack([self.kv_address, list(self.nonce)])

    @classmethod
    def from_bytes(cls, data: bytes) -> MoveTo:
        try:
            address, nonce = fields_of(_unpack(data), 2)
        except msgspec.DecodeError as error:
            raise WireError(str(error)) from None
        return cls(text(address), nonce16(nonce))


# Handshake.


class Layout(NamedTuple):
    """How KV lies in a block's bytes."""

    format: str
    block_size: int
    block_bytes: int


@dataclass(frozen=True)
class Hello:
    role: str
    id: int
    incarnation: int
    numerics_id: str = ""
    kv_layout: Layout | None = None
    freeze: str | None = None
    kv_address: str | None = None
    nonce: bytes = bytes(32)

    @property
    def place(self) -> Place:
        return Place(self.id & 0xFFFFFFFF, self.incarnation)

    def to_bytes(self) -> bytes:
        """With the length before it."""
        layout = None if self.kv_layout is None else list(self.kv_layout)
        body = pack([VERSION, self.role, self.id, self.incarnation, self.numerics_id, layout, self.freeze, self.kv_address, list(self.nonce)])
        return struct.pack("<I", len(body)) + body

    @classmethod
    def from_body(cls, body: bytes) -> Hello:
        try:
            value = _unpack(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"the hello cannot be read: {error}") from None
        version, role, id_, incarnation, numerics, layout, freeze, address, nonce = fields_of(value, 9)
        if count(version, 2**16) != VERSION:
            raise WireError(f"the other side speaks version {version} of the protocol, and this one {VERSION}")
        if text(role) not in ("gateway", "replica", "source"):
            raise WireError(f"{role!r} is no role")
        if layout is not None:
            name, size, block = fields_of(layout, 3)
            layout = Layout(text(name), count(size), long(block))
        if freeze not in (None, "resumable", "final"):
            raise WireError(f"{freeze!r} is no freeze")
        address = None if address is None else text(address)
        return cls(role, long(id_), long(incarnation), text(numerics), layout, freeze, address, bytes(numbers(32)(nonce)))


DIALER, LISTENER = b"baton migration 1 dialer", b"baton migration 1 listener"


def proof(key: bytes, side: bytes, dialer: bytes, listener: bytes) -> bytes:
    return hmac.digest(key, side + dialer + listener, "sha256")


def frame_key(key: bytes, sender: bytes, dialer: bytes, listener: bytes) -> bytes:
    """HKDF-SHA-256 (RFC 5869), of which the first block is enough."""
    extracted = hmac.digest(dialer + listener, key, "sha256")
    return hmac.digest(extracted, sender + b"\x01", "sha256")


# Frames.


class Sealer:
    """Writes the frames of one direction."""

    def __init__(self, key: bytes | None):
        self.key, self.sequence = key, 0

    def seal(self, kind: Kind, body: bytes) -> bytes:
        header = self._header(kind, len(body))
        return header + body + self._mac(header, body)

    def seal_block(self, index: int, tokens: int, checksum: int, payload: int) -> tuple[bytes, bytes]:
        """What goes before and after a block's bytes, which the MAC leaves out: they have a checksum."""
        head = BLOCK_HEADER.pack(index, tokens, checksum)
        header = self._header(Kind.BLOCK, len(head) + payload)
        return header + head, self._mac(header, head)

    def _header(self, kind: Kind, length: int) -> bytes:
        self.sequence += 1
        return HEADER.pack(length, kind, 0, self.sequence)

    def _mac(self, *parts: bytes) -> bytes:
        return b"" if self.key is None else mac(self.key, *parts)


class Opener:
    """Reads the frames of one direction."""

    def __init__(self, key: bytes | None):
        self.key, self.sequence = key, 0

    @property
    def trailer_bytes(self) -> int:
        return 0 if self.key is None else MAC_BYTES

    def header(self, data: bytes) -> tuple[int, int]:
        """Length of the body, and the kind."""
        length, kind, _, sequence = HEADER.unpack(data)
        if length > BODY_MAX:
            raise WireError(f"a frame of {length} bytes is longer than the {BODY_MAX} that are read")
        self.sequence += 1
        if sequence != self.sequence:
            raise WireError(f"frame {sequence} came where {self.sequence} was due: frames were lost or repeated on the connection")
        return length, kind

    def check(self, header: bytes, covered: bytes, trailer: bytes) -> None:
        if self.key is not None and not hmac.compare_digest(mac(self.key, header, covered), trailer):
            raise WireError(f"frame {self.sequence} is not authentic: the fleet keys differ, or it was altered")


def mac(key: bytes, *parts: bytes) -> bytes:
    whole = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        whole.update(part)
    return whole.digest()[:MAC_BYTES]
