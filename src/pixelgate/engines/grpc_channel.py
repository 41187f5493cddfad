"""A gRPC connection to an engine, and what the engine said of itself over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2_grpc

from pixelgate.budget import Budget
from pixelgate.engines.engine import EngineFacts
from pixelgate.errors import ConfigError

_SENDING = 2  # requests; one is encoded while another is sent
_PATIENCE = 30.0  # seconds until a request whose turn to be sent does not come goes elsewhere
_MAX_REPLY_BYTES = 64 << 20  # one message of an engine: token ids, or a piece of its files


@dataclass(eq=False)
class Connection:
    """A channel, and the engine's facts as told since it was last connected. ``drops`` counts how often it was not.

    ``generate`` and ``complete`` are two ways for the same call, see grpc_call.py: ``kept`` is how many bytes are under
    way in the second, and ``one_reply`` whether the engine has shown that it is one for it.

    While a request is on its way its tensors are in memory once more, in the library's copy, and those of several
    pictures in the message, too. ``sending`` bounds how many there are in the first way, grpc_call.py the bytes in the
    second; clients take turns, so that nobody waits for all that another has.
    """

    channel: grpc.aio.Channel
    stub: Any
    health: Any
    generate: Any
    complete: Any
    sending: Budget
    facts: EngineFacts | None = None
    drops: int = 0
    kept: int = 0
    one_reply: bool = False

    def up(self) -> bool:
        """Whether it is connected now. If not, what the engine told is forgotten: the next may be another.

        The library connects anew by itself, but only for a call: no call is made without having asked this, so that no
        loss goes unseen.
        """
        if self.channel.get_state() is grpc.ChannelConnectivity.READY:
            return True
        self.facts, self.one_reply = None, False
        self.drops += 1
        return False


def connection(target: str, stub: Any, service: str, reply: Any, connect_timeout: float) -> Connection:
    """A connection to ``target`` that is opened with its first call, for the event loop that runs now.

    ``service`` is the full name of the service that ``stub`` is of, ``reply`` the message of which its answers are.
    """
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", _MAX_REPLY_BYTES),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.min_reconnect_backoff_ms", int(connect_timeout * 1000)),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),  # whether a request may be sent again is not for the library to say
        ("grpc.enable_http_proxy", 0),  # engines are inside; a proxy variable is meant for fetching
    ]

    def single(data: bytes | None) -> Any:
        return None if data is None else reply.FromString(data)

    channel = grpc.aio.insecure_channel(target, options=options)
    return Connection(
        channel=channel,
        stub=stub(channel),
        health=health_pb2_grpc.HealthStub(channel),
        generate=channel.stream_stream(f"/{service}/Generate", response_deserializer=reply.FromString),
        complete=channel.unary_unary(f"/{service}/Generate", response_deserializer=single),
        sending=Budget("requests", _SENDING, _PATIENCE),
    )


def target(url: str, scheme: str) -> str:
    """``host:port`` of an engine URL. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        plain = url == f"{scheme}://{parts.netloc}" and "@" not in parts.netloc
        if plain and parts.hostname and parts.port:
            return parts.netloc
    except ValueError:  # a port that is no number, or brackets that do not match
        pass
    raise ConfigError(f"{url!r} is not an engine address: it must look like {scheme}://host:port.")
