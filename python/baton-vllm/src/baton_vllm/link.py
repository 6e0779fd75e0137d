"""Connections of the migration protocol: the handshake, then frames."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from . import wire
from .wire import DIALER, LISTENER, Hello, Kind, WireError

# Whoever connects and does not say who it is within this is not waited for.
PATIENCE_S = 10.0
READ_BYTES = 1 << 16


class Identity(NamedTuple):
    """What a process says of itself and demands of the other side. Nonce and role are those of each connection."""

    hello: Hello
    fleet_key: bytes | None


class Connection:
    """Whose sides know each other. Frames are read by one task at a time and written by any."""

    def __init__(self, sock: socket.socket):
        self.sock, self.loop = sock, asyncio.get_running_loop()
        self.buffer = bytearray()
        self.hello: Hello | None = None
        self.sealer, self.opener = wire.Sealer(None), wire.Opener(None)
        self.writing = asyncio.Lock()
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def introduce(self, identity: Identity, side: bytes, role: str) -> None:
        ours = replace(identity.hello, role=role, nonce=os.urandom(32)).to_bytes()
        # The dialer speaks first, in both exchanges.
        if side == DIALER:
            await self._send(ours)
        length = struct.unpack("<I", await self._exactly(4))[0]
        if length > wire.HELLO_MAX:
            raise WireError(f"a hello of {length} bytes is longer than the {wire.HELLO_MAX} that are read")
        body = await self._exactly(length)
        theirs = struct.pack("<I", length) + body
        if side == LISTENER:
            await self._send(ours)
        self.hello = Hello.from_body(body)
        if identity.fleet_key is None:
            return
        key, other = identity.fleet_key, DIALER if side == LISTENER else LISTENER
        transcript = (ours, theirs) if side == DIALER else (theirs, ours)
        if side == DIALER:
            await self._send(wire.proof(key, side, *transcript))
        shown = await self._exactly(wire.PROOF_BYTES)
        if not wire.hmac.compare_digest(shown, wire.proof(key, other, *transcript)):
            raise WireError("the other side does not know the fleet key")
        if side == LISTENER:
            await self._send(wire.proof(key, side, *transcript))
        self.sealer = wire.Sealer(wire.frame_key(key, side, *transcript))
        self.opener = wire.Opener(wire.frame_key(key, other, *transcript))

    async def read(self, room: Callable[[int, int], memoryview] | None = None) -> tuple[Kind, tuple]:
        """The next frame. `room` gives where the bytes of a block with this index, and so many of them, are to lie."""
        head = await self._exactly(wire.HEADER.size)
        length, kind = self.opener.header(head)
        if kind != Kind.BLOCK:
            body = await self._exactly(length)
            self.opener.check(head, body, await self._exactly(self.opener.trailer_bytes))
            return wire.decode(kind, body)
        if room is None or length < wire.BLOCK_HEADER.size:
            raise WireError("a block came where none was due")
        body = await self._exactly(wire.BLOCK_HEADER.size)
        decoded = wire.decode(kind, body)
        await self._into(room(decoded[1][0], length - len(body)))
        self.opener.check(head, body, await self._exactly(self.opener.trailer_bytes))
        return decoded

    async def write(self, kind: Kind, *values: Any) -> None:
        async with self.writing:
            await self._send(self.sealer.seal(kind, wire.encode(kind, *values)))

    async def write_all(self, frames: list[tuple[Kind, tuple]]) -> None:
        async with self.writing:
            await self._send(b"".join(self.sealer.seal(kind, wire.encode(kind, *values)) for kind, values in frames))

    async def write_block(self, index: int, tokens: int, checksum: int, payload: memoryview) -> None:
        async with self.writing:
            before, after = self.sealer.seal_block(index, tokens, checksum, len(payload))
            await self._send(before)
            await self._send(payload)
            if after:
                await self._send(after)

    def shut(self) -> None:
        """Nothing goes or comes any more; who reads or writes is told so, and whoever holds it closes it."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self.shut()
        # Behind the callbacks of who was cancelled while it read or wrote.
        self.loop.call_soon(self.sock.close)

    async def _send(self, data: bytes | memoryview) -> None:
        await self.loop.sock_sendall(self.sock, data)

    async def _exactly(self, length: int) -> bytes:
        while len(self.buffer) < length:
            data = await self.loop.sock_recv(self.sock, max(READ_BYTES, length - len(self.buffer)))
            if not data:
                raise ConnectionResetError("the other side has closed the connection")
            self.buffer += data
        taken = bytes(self.buffer[:length])
        del self.buffer[:length]
        return taken

    async def _into(self, view: memoryview) -> None:
        have = min(len(view), len(self.buffer))
        view[:have] = self.buffer[:have]
        del self.buffer[:have]
        while have < len(view):
            got = await self.loop.sock_recv_into(self.sock, view[have:])
            if got == 0:
                raise ConnectionResetError("the other side has closed the connection")
            have += got


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise WireError(f"{address!r} is no host:port")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def dial(address: str, identity: Identity, role: str, timeout_s: float) -> Connection:
    """Connects to a replica and introduces both sides to each other."""
    host, port = split_address(address)

    async def connect() -> Connection:
        loop = asyncio.get_running_loop()
        family, kind, protocol, _, where = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, where)
            connection = Connection(sock)
            await connection.introduce(identity, DIALER, role)
        except BaseException:
            sock.close()
            raise
        if connection.hello.role != "replica":
            connection.close()
            raise WireError(f"the other side is a {connection.hello.role}, which has nothing to do here")
        return connection

    return await asyncio.wait_for(connect(), timeout_s)


def bind(host: str, port: int, fleet_key: bytes | None) -> socket.socket:
    """Listens; without a fleet key on loopback only."""
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        raise ValueError(f"{host} is no address that others can connect to; bind the one that they reach this replica by")
    if not address.is_loopback and fleet_key is None:
        raise ValueError(f"without a fleet key only this machine is listened to: give --baton-fleet-key-file, or a loopback address in place of {host}")
    sock = socket.create_server((host, port), family=socket.AF_INET6 if address.version == 6 else socket.AF_INET, backlog=64)
    sock.setblocking(False)
    return sock


async def listen(sock: socket.socket, identity: Identity, wanted: str, serve: Callable[[Connection], Any], most: int, log: Any) -> None:
    """Serves whoever connects as `wanted`, so many at a time; for ever."""
    room, tasks = asyncio.Semaphore(most), set()

    async def one(accepted: socket.socket) -> None:
        connection = None
        try:
            connection = Connection(accepted)
            await asyncio.wait_for(connection.introduce(identity, LISTENER, "replica"), PATIENCE_S)
            if connection.hello.role != wanted:
                raise WireError(f"the other side is a {connection.hello.role}, which has nothing to do here")
            await serve(connection)
        except (OSError, WireError, asyncio.TimeoutError) as error:
            log.debug("a connection of a %s has ended: %s", wanted, error)
        finally:
            connection.close() if connection else accepted.close()
            room.release()

    while True:
        await room.acquire()
        accepted, _ = await asyncio.get_running_loop().sock_accept(sock)
        task = asyncio.ensure_future(one(accepted))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def read_fleet_key(path: str) -> bytes:
    """All of the file's bytes but blanks around them, so that an editor's last newline makes no other key."""
    with open(path, "rb") as file:
        key = file.read().strip(b" \t\n\r\x0c")
    if not key:
        raise ValueError(f"the fleet key in {path} is empty")
    return key
