"""The sockets on which the gateway listens, bound before any worker is started and kept over all of them.

Every worker has a socket of its own (SO_REUSEPORT), among which the kernel spreads new connections by their addresses:
at one shared by all, whoever wakes up first takes whatever waits, and of 64 connections at once four workers got 1, 2,
28 and 33. The supervisor keeps each open while its worker is exchanged, so no connection that waits there is lost.
"""

from __future__ import annotations

import socket

from pixelgate.errors import ConfigError


class Listeners:
    """The sockets of one host and port, ``count`` for each address of the host; bound, and not listening.

    Raises ConfigError that begins with ``what``, where that is not possible.
    """

    def __init__(self, host: str, port: int, *, what: str, count: int = 1) -> None:
        self.host = host
        self.asked = port
        self.port = port
        self._what = what
        self._sockets: list[list[socket.socket]] = []  # one row for each of `count`
        try:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError:
            raise ConfigError(f"{what} cannot be listened on: there is no such host here") from None
        self._addresses = list(dict.fromkeys((family, address) for family, *_, address in found))
        try:
            for family, address in self._addresses:
                # Others who share their port would share it with us as well; this one they do not.
                with self._bound(family, address, shared=False) as alone:
                    self.port = alone.getsockname()[1]
            self.grow(count)
        except ConfigError:
            self.close()
            raise

    @property
    def count(self) -> int:
        """For how many workers there are sockets."""
        return len(self._sockets)

    def grow(self, count: int) -> None:
        """Have sockets for at least ``count`` workers. What waits in one that is closed is lost, so none is."""
        while len(self._sockets) < count:
            self._sockets.append(self._row())

    def shrink(self, count: int) -> None:
        """Close the sockets of more than ``count`` workers, which nobody has."""
        while len(self._sockets) > count:
            _close(self._sockets.pop())

    def of(self, worker: int, workers: int) -> list[socket.socket]:
        """Those of one of ``workers``: one for each address, or more where there were more workers before."""
        return [each for row in self._sockets[worker::workers] for each in row]

    def renew(self, worker: int, workers: int) -> None:
        """New sockets instead of those of a worker that died: what waits there is reset, what comes goes to others."""
        for number in range(worker, len(self._sockets), workers):
            old, self._sockets[number] = self._sockets[number], self._row()
            _close(old)

    def close(self) -> None:
        """Close all."""
        self.shrink(0)

    def _row(self) -> list[socket.socket]:
        row: list[socket.socket] = []
        try:
            for family, address in self._addresses:
                row.append(self._bound(family, address, shared=True))
        except ConfigError:
            _close(row)
            raise
        return row

    def _bound(self, family: socket.AddressFamily, address: tuple[object, ...], *, shared: bool) -> socket.socket:
        new = socket.socket(family, socket.SOCK_STREAM)
        try:
            new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:  # 0.0.0.0 is an address of its own
                new.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            new.bind((address[0], self.port, *address[2:]))
        except OSError as failure:
            new.close()
            raise ConfigError(f"{self._what} cannot be listened on: {failure.strerror}") from None
        return new


def _close(row: list[socket.socket]) -> None:
    for each in row:
        each.close()
