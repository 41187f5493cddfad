"""HTTP/1.1 for strangers: uvicorn's httptools protocol, with the limits that it lacks.

uvicorn bounds neither a head's size nor the time that it takes, nor how many connections wait for one, and a client
that was answered early may go on sending for ever. The time for a body is the application's to watch, since it can
answer; what is left of a body after the answer gets as long as a head.

And it loses the body of a request that asks for another protocol, as Java's client does by default (``Upgrade: h2c``):
the parser takes what follows such a head for that protocol. Here it gets the head once more without the wish.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pixelgate.errors import FullError, HeaderError, PixelgateError, RequestError, SlowRequestError
from pixelgate.gateway.gathered import Gathered
from pixelgate.gateway.replies import Refused, error_response
from pixelgate.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)


class LimitedProtocol(HttpToolsProtocol):
    """One connection. ``settings`` has the limits, ``refused`` counts; once ``closing`` is set an answer is its last.

    The other arguments are uvicorn's.
    """

    def __init__(self, settings: GatewaySettings, refused: Refused, closing: asyncio.Event, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.parser = self._fresh_parser()
        self._refused = refused
        self._settings = settings
        self._closing = closing
        self.timeout_keep_alive = settings.keep_alive_timeout  # type: ignore[assignment]
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = self._in_body = False
        self._moved = False  # something of the request came out of the parser
        self._unseen = 0  # bytes that have gone in since then
        self._refusal: PixelgateError | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time for the first head, or refuse the connection."""
        super().connection_made(Gathered(transport, self.loop))  # type: ignore[arg-type]
        if len(self.connections) > self._settings.max_connections:
            self._refuse(FullError("the gateway has as many connections as it may have; try again later"))
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._unwatch()
        self._read_on()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads slower than it is written to. If that lasts the connection ends, answer or not."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self._settings.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read on."""
        self._read_on()
        super().resume_writing()

    def _read_on(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, and see how long the client may take for the rest."""
        self._moved = False
        self._unset_keepalive_if_required()
        self._parse(data)
        if self.transport.is_closing():
            return
        # The parser keeps a head, a body's trailers and their lines until they are complete. The piece with which one
        # begins is not counted, as it may hold the end of something else; it is no larger than one read.
        self._unseen = 0 if self._moved else self._unseen + len(data)
        if self._unseen > self._settings.max_header_bytes:
            self._refuse(self._too_large())
        else:
            self._watch()

    def _parse(self, data: bytes) -> None:
        pending: list[bytes | memoryview] = [data]  # what comes next is the last
        while pending:
            piece = pending.pop()
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as stopped:
                pending += [memoryview(piece)[stopped.args[0] :], self._without_upgrade()]
                self.parser = self._fresh_parser()
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _fresh_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # As uvicorn's: what follows the last request of a connection is left alone, so that this one is answered.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        self._in_head = self._moved = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; those behind a body are dropped, as nobody reads them."""
        if not self._in_body:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._moved = True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Hand the request to the application, unless its head is too large."""
        self._in_head = False
        self._moved = True
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._settings.max_header_bytes or len(self.headers) > self._settings.max_headers:
            self._refusal = self._too_large()
            raise self._refusal  # ends the parser's work
        if self.parser.get_method() == b"CONNECT":  # always a wish for another protocol
            raise RequestError("this is no proxy")
        if self.parser.should_upgrade():
            return  # it comes once more
        self._in_body = True
        super().on_headers_complete()
        if self._closing.is_set() and self.cycle is not None:
            self.cycle.keep_alive = False

    def _without_upgrade(self) -> bytes:
        """The head that was read last, without the wish for another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_complete(self) -> None:
        """A request's last byte."""
        if self.parser.should_upgrade():
            return
        self._in_body = False
        self._moved = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is out. A client that is still sending may do so for a while, to have time to read it."""
        super().on_response_complete()
        if self._in_head or self._in_body:
            self._unset_keepalive_if_required()  # the connection is not idle
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or what ``on_headers_complete`` did not take."""
        self._refuse(self._refusal or RequestError("this is not a valid HTTP request"))

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        """Have the timer run while the client, and not the application, is waited for."""
        if self._answering():
            self._unwatch()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self._settings.header_timeout, self._too_slow)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._in_head:
            seconds = self._settings.header_timeout
            self._refuse(SlowRequestError(f"the head of the request did not arrive within {seconds:g} seconds"))
        else:
            self.transport.close()

    def _too_large(self) -> HeaderError:
        limits = self._settings
        return HeaderError(
            f"the head of the request is larger than the limits of {limits.max_header_bytes} bytes "
            f"and {limits.max_headers} lines"
        )

    def _refuse(self, error: PixelgateError) -> None:
        """Answer without the application where no other answer is under way, and close the connection."""
        if not self._answering():
            self._refused(error)
            response = error_response(error)
            headers = [*response.raw_headers, (b"connection", b"close")]
            head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
            self.transport.write(STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body))
        self.transport.close()
