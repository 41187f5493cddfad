"""What a gateway and a real engine said to each other, in a file.

A recording is made once with `pixelgate.testing.recorder`, where such an engine is, and replayed with
`pixelgate.testing.replay`, where there is none.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec


def speaks_grpc(scheme: str) -> bool:
    """Whether engines of a scheme are behind gRPC, and not HTTP."""
    return scheme.endswith(("grpc", "engine"))


class Exchange(msgspec.Struct, frozen=True):
    """A call of the gateway to the engine, as bytes.

    ``name`` is the method's path over gRPC, verb and path over HTTP. ``replies`` are messages, or a body in pieces, and
    ``status`` is the protocol's own: 0 or 200 where all is well, of which ``details`` say more where it is not.
    """

    name: str
    request: bytes
    replies: tuple[bytes, ...]
    status: int
    details: str = ""


class Asked(msgspec.Struct, frozen=True):
    """What a client asked the gateway for, and the answer: bodies, and the answer's HTTP status."""

    title: str
    request: bytes
    status: int
    answer: bytes


class Recording(msgspec.Struct, frozen=True):
    """All exchanges with an engine in their order, and the requests of clients by which they came about.

    ``scheme`` is that of the engine's address in pixelgate's notation.
    """

    scheme: str
    model: str
    exchanges: tuple[Exchange, ...]
    asked: tuple[Asked, ...]

    @property
    def over_grpc(self) -> bool:
        """Whether the exchanges are gRPC's."""
        return speaks_grpc(self.scheme)

    def save(self, file: Path) -> None:
        """Write it; the same recording gives the same file."""
        file.write_bytes(gzip.compress(msgspec.msgpack.encode(self), 9, mtime=0))

    @classmethod
    def load(cls, file: Path) -> Recording:
        """Read what `save` has written. Raises OSError or msgspec.DecodeError for anything else."""
        return msgspec.msgpack.decode(gzip.decompress(file.read_bytes()), type=cls)

    def replies(self, name: str) -> tuple[bytes, ...]:
        """The first replies to a call whose name ends so. Raises StopIteration where there was none."""
        return next(exchange.replies for exchange in self.exchanges if exchange.name.endswith(name))
