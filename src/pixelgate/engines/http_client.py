"""What engines behind HTTP share: their addresses, one client, and what becomes of its failures."""

from __future__ import annotations

import io
import logging
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
import msgspec

from pixelgate.errors import (
    ConfigError,
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    EngineUnreachableError,
    PixelgateError,
    RequestError,
    TooLargeError,
)

UNREACHABLE = "The engine cannot be reached."
_BROKEN = "The connection to the engine broke."
_FAILED = "The engine failed."
_GARBLED = "The engine answered with something that cannot be understood."
_KEPT_IDLE = 2.0  # seconds; servers close idle connections, uvicorn after 5 s
_MAX_REPLY_BYTES = 64 << 20
_LOGGED_DETAILS = 500  # characters
_LISTED = 10  # models of a hosted service, which may have hundreds
_PORTS = {"http": 80, "https": 443}

log = logging.getLogger(__name__)


class FailedInsideError(EngineError):
    """The engine's status 500: it may be about to end, or a cache of its own may have missed."""


class ErrorBody(msgspec.Struct):
    """The error object of an OpenAI-compatible server; older ones have its fields at the top."""

    message: Any = None
    param: Any = None
    code: Any = None


class _Failure(msgspec.Struct):
    error: ErrorBody | str | None = None


class Card(msgspec.Struct):
    """A model in an engine's list: ``parent`` is the model that an adapter belongs to, ``root`` its weights' path."""

    id: str
    max_model_len: int | None = None
    parent: str | None = None
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[Card]


def base_url(url: str, scheme: str, default_path: str | None = None) -> str:
    """``http(s)://host:port/path`` of an engine URL ``scheme://...``; without ``default_path`` it must have no path.

    Raises ConfigError for what is malformed, or holds a user name, a query or a fragment.
    """
    form = f"{scheme}://host:port" + ("" if default_path is None else "/path")
    transport = scheme.rpartition("+")[2]
    try:
        parts = urlsplit(url)
        port = _PORTS[transport] if parts.port is None else parts.port
        path = parts.path.rstrip("/")
        plain = url.rstrip("/") == f"{scheme}://{parts.netloc}{path}" and "@" not in parts.netloc
        if plain and parts.hostname and port and not (path and default_path is None):
            host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            return f"{transport}://{host}:{port}{path or default_path or ''}"
    except ValueError:  # a port that is no number, or brackets that do not match
        pass
    raise ConfigError(f"{url!r} is not an engine address: it must look like {form}.")


class HttpClient:
    """Requests to one engine at ``base``. Timeouts are in seconds, ``generate_timeout`` that of a whole answer.

    ``headers`` go with every request; ``fields`` are those of a request that errors may name. The session is opened at
    the first use. Environment variables for proxies are not looked at, redirects not followed, cookies not kept.
    Failures are raised as errors of ``pixelgate.errors``.
    """

    def __init__(
        self,
        base: str,
        *,
        headers: Mapping[str, str] | None = None,
        fields: Collection[str] = (),
        connect_timeout: float = 5.0,
        call_timeout: float = 10.0,
        generate_timeout: float | None = 600.0,
    ) -> None:
        self._base = base
        self._headers = dict(headers or {})
        self._fields = fields
        self._call = aiohttp.ClientTimeout(total=call_timeout, sock_connect=connect_timeout)
        self._generate = aiohttp.ClientTimeout(total=generate_timeout, sock_connect=connect_timeout)
        self._session: aiohttp.ClientSession | None = None
        self._reading: set[aiohttp.ClientResponse] = set()

    async def status(self, path: str) -> int:
        """The status with which a GET is answered. Raises EngineUnavailableError when nothing answers."""
        with self._asking():
            async with self._opened().get(self._base + path, timeout=self._call, allow_redirects=False) as response:
                return response.status

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body of a question about the engine: a GET, or a POST of ``body`` as JSON."""
        method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
        with self._asking():
            async with self._request(method, path, data, self._call) as response:
                return response.status, await read(response)

    @asynccontextmanager
    async def post(self, path: str, box: list[bytes], traceparent: str = "") -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request for an answer, and give its response, whose status is 200.

        ``traceparent`` is a header if there is one.
        ``box`` holds the body, which is taken out: so nobody keeps it while the answer is read. Leaving the block
        before the answer has ended closes the connection, and with it the request on the engine.
        """
        with _failures():
            async with self._request("POST", path, box.pop(), self._generate, traceparent) as response:
                if response.status != 200:
                    raise self.failure(response.status, await read(response))
                yield response

    def cards(self, status: int, body: bytes) -> list[Card]:
        """The models that an engine lists in an answer to ``ask``. Raises EngineError."""
        if status != 200:
            raise self.unanswered(status, body)
        return cast("list[Card]", decoded(body, _Models).data)

    def failure(self, status: int, body: bytes) -> PixelgateError:
        """The error for an answer of ``status``. The engine's own words go to the log and no further."""
        log.warning("%s answered %d: %s", self._base, status, body[:_LOGGED_DETAILS].decode(errors="replace"))
        match status:
            case 400 | 404 | 422:
                return _refusal(body, self._fields)
            case 401 | 403:
                return EngineError("The engine does not let the gateway in.")
            case 413:
                return TooLargeError("The request is larger than the engine takes: send fewer or smaller pictures.")
            case 429:
                return EngineUnavailableError("The engine is full; try again later.")
            case 500:
                return FailedInsideError(_FAILED)
            case 502 | 503:
                return EngineUnavailableError("The engine is not available.")
            case 504:
                return EngineTimeoutError("The engine did not answer in time.")
        return EngineError(_FAILED)

    def unanswered(self, status: int, body: bytes) -> EngineError:
        """The error for a question about the engine that it does not answer: nothing a client sent is at fault."""
        error = self.failure(status, body)
        return error if isinstance(error, EngineError) else EngineError(_GARBLED)

    async def close(self) -> None:
        """Give the connections back; requests under way end with EngineUnavailableError."""
        session, self._session = self._session, None
        if session is not None:
            for response in self._reading:  # a closed session leaves their readers waiting
                response.content.set_exception(aiohttp.ClientConnectionError(_BROKEN))
            await session.close()

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, data: bytes | None, limits: aiohttp.ClientTimeout, traceparent: str = ""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        body = None if data is None else io.BytesIO(data)  # sent in pieces; its memory is that of the bytes
        headers = {} if data is None else {"content-type": "application/json", "content-length": str(len(data))}
        if traceparent:
            headers["traceparent"] = traceparent
        del data
        async with self._opened().request(
            method, self._base + path, data=body, headers=headers, timeout=limits, allow_redirects=False
        ) as response:
            self._reading.add(response)
            try:
                yield response
            except BaseException:
                response.close()
                raise
            finally:
                self._reading.discard(response)

    def _opened(self) -> aiohttp.ClientSession:
        # Made here and not in the constructor: it belongs to the event loop that runs when it is made.
        if self._session is None:
            # A request that goes out over a connection just being closed is lost, and nobody can tell whether it
            # arrived. Where a new connection costs next to nothing, each request has its own.
            connector = (
                aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_IDLE)
                if self._base.startswith("https:")
                else aiohttp.TCPConnector(limit=0, force_close=True)
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                trust_env=False,
            )
        return self._session

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with _failures():
            try:
                yield
            except TimeoutError:  # an engine that does not answer questions is one that is down
                raise EngineUnavailableError("The engine did not answer in time.") from None


def chosen(cards: Sequence[Card], wanted: str, name: str) -> Card:
    """The model to ask for: ``wanted``, else the only one, else the one that is called ``name`` here as well.

    Raises EngineError, in the operator's words, where there is no such model.
    """
    bases = [card for card in cards if card.parent is None]
    if not wanted and len(bases) == 1:
        return bases[0]
    for card in cards:
        if card.id == (wanted or name):
            return card
    listed = ", ".join(card.id for card in cards[:_LISTED]) or "none"
    if wanted:
        raise EngineError(f"The engine does not serve {wanted!r}; its models are {listed}.")
    raise EngineError(
        f"The engine does not serve one model: say which with engine_model (--engine-model); its models are {listed}."
    )


def decoded(data: bytes, kind: type[Any]) -> Any:
    """JSON of an engine as ``kind``. Raises EngineError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise EngineError(_GARBLED) from None


async def read(response: aiohttp.ClientResponse) -> bytes:
    """The body of a response, of which no more than a limit is held."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _MAX_REPLY_BYTES:
            raise EngineError("The engine's answer is too long.")
    return bytes(body)


def _refusal(body: bytes, fields: Collection[str]) -> PixelgateError:
    try:
        error = msgspec.json.decode(body, type=_Failure).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        error = None
    param = error.param if isinstance(error, ErrorBody) else None
    if isinstance(param, str) and param in fields:
        return RequestError(f"The engine does not take this value of {param}.", param=param)
    return RequestError(
        "The engine refused the request: check the sampling parameters, "
        "and that the prompt fits into the model's context."
    )


@contextmanager
def _failures() -> Iterator[None]:
    """Raise what becomes of the HTTP client's own errors."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL):
        raise EngineUnreachableError(UNREACHABLE) from None
    except TimeoutError:
        raise EngineTimeoutError("The engine did not answer in time.") from None
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
        raise EngineUnavailableError(_BROKEN) from None
    except aiohttp.ClientError:
        raise EngineError(_GARBLED) from None
