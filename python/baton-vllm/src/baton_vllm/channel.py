"""Messages between the API server and one process of the engine: a Unix socket that keeps their borders, in a folder that only this user opens.

The engine's side listens, since it is there first, and looks at what came between two steps: it never waits."""

from __future__ import annotations

import os
import socket
from array import array
from typing import Any

import msgspec

MESSAGE_MAX = 1 << 20
FOLDER_KEY = "baton_folder"
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class Listening:
    """Of a process of the engine; `role` is `scheduler` or `worker`."""

    def __init__(self, folder: str, role: str):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(os.path.join(folder, role))
        self.socket.listen(1)
        self.socket.setblocking(False)
        self.peer: socket.socket | None = None
        self.unsent: list[bytes] = []

    def accept(self) -> bool:
        """Whether the API server is there."""
        if self.peer is None:
            try:
                self.peer, _ = self.socket.accept()
            except BlockingIOError:
                return False
            self.peer.setblocking(False)
            self._flush()
        return self.peer is not None

    def messages(self) -> list[Any]:
        """What came since it was asked last."""
        came: list[Any] = []
        while self.accept():
            try:
                data = self.peer.recv(MESSAGE_MAX)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                # The API server has ended, and with it all that this is for.
                self.peer.close()
                self.peer = None
                break
            came.append(decode(data))
        return came

    def descriptor(self) -> tuple[Any, int] | None:
        """A message that brings a descriptor along, if it is there."""
        if not self.accept():
            return None
        size = array("i").itemsize
        try:
            data, extra, _, _ = self.peer.recvmsg(MESSAGE_MAX, socket.CMSG_SPACE(size))
        except BlockingIOError:
            return None
        for level, kind, content in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                return decode(data), array("i", content[:size])[0]
        return None

    def send(self, message: Any) -> None:
        """Keeps what finds no room for the next time."""
        self.unsent.append(encode(message))
        if self.accept():
            self._flush()

    def _flush(self) -> None:
        while self.unsent:
            try:
                self.peer.send(self.unsent[0])
            except (BlockingIOError, ConnectionError):
                return
            self.unsent.pop(0)


class Dialed:
    """Of the API server."""

    def __init__(self, folder: str, role: str):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(os.path.join(folder, role))

    def send(self, message: Any) -> None:
        """Blocks while the engine's buffer is full, which some thousand messages between two steps would take."""
        self.socket.send(encode(message))

    def send_descriptor(self, message: Any, descriptor: int) -> None:
        socket.send_fds(self.socket, [encode(message)], [descriptor])

    def receive(self) -> Any:
        """One message, which must be there or come; at the other side's end `EOFError`."""
        data = self.socket.recv(MESSAGE_MAX)
        if not data:
            raise EOFError("a process of the engine has ended")
        return decode(data)
