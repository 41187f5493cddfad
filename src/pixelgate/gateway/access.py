"""Who may ask, and who is asking: API keys, and the client's address behind trusted proxies."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pixelgate.errors import AuthenticationError, ConfigError
from pixelgate.gateway.replies import Refused, error_response
from pixelgate.gateway.settings import GatewaySettings, check_keys
from pixelgate.media.addresses import Address
from pixelgate.media.policy import Network

_OPEN_PATHS = ("/health", "/ready")


def digests(settings: GatewaySettings) -> tuple[str, ...]:
    """SHA-256 of every key, in hex; the keys themselves are not kept. Raises ConfigError for a file that is wrong."""
    keys = settings.api_keys
    if settings.api_key_file:
        try:
            text = Path(settings.api_key_file).read_text("utf-8")
        except OSError as failure:
            raise ConfigError(f"api_key_file {settings.api_key_file} cannot be read: {failure.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"api_key_file {settings.api_key_file} is not text") from None
        listed = tuple(text.splitlines())
        check_keys(listed or ("",), settings.api_key_file)
        keys += listed
    return tuple(dict.fromkeys(_digest(key.encode()) for key in keys))


class Access:
    """Middleware that asks for a key, and notes the request's client in ``scope["state"]["client"]``.

    A client is the digest of its key where keys are asked for, else its address. ``refused`` counts those without.
    """

    def __init__(self, app: ASGIApp, *, keys: tuple[str, ...], trusted: tuple[Network, ...], refused: Refused) -> None:
        self._app = app
        self._refused = refused
        self._keys = keys
        self._trusted = trusted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request on."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if not self._keys or scope["path"] in _OPEN_PATHS:
                client = client_address(scope.get("client"), headers.getlist("x-forwarded-for"), self._trusted)
            elif (known := self._known(headers.getlist("authorization"))) is not None:
                client = known
            else:
                error = _refusal(headers)
                self._refused(error)
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["client"] = client
        await self._app(scope, receive, send)

    def _known(self, credentials: list[str]) -> str | None:
        """The digest of the key that was sent, if it is one of ours; as long for any wrong key as for a right one."""
        scheme, _, key = credentials[0].partition(" ") if len(credentials) == 1 else ("", "", "")
        sent = _digest(key.strip(" ").encode("latin-1"))
        right = False
        for known in self._keys:
            right |= hmac.compare_digest(sent, known)
        return sent if right and scheme.lower() == "bearer" else None


def client_address(peer: tuple[str, int] | None, forwarded: Iterable[str], trusted: Iterable[Network]) -> str:
    """The address of the client: the peer's, or as seen by the outermost trusted proxy.

    Each proxy appends the address that it was asked from, so from the right the first one that is no proxy of ours is
    the client; what stands further left is the client's own claim. A hop that is no address ends the search.
    """
    address = _address(peer[0]) if peer else None
    if address is None:
        return ""
    networks = tuple(trusted)
    hops = [hop for line in forwarded for hop in line.split(",")] if networks else []
    while hops and any(address in network for network in networks):
        before = _address(hops.pop().strip())
        if before is None:
            break
        address = before
    return str(address)


def _address(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    # a listener on [::] sees IPv4 peers as ::ffff:1.2.3.4
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _refusal(headers: Headers) -> AuthenticationError:
    if "authorization" not in headers:
        return AuthenticationError("an API key is needed: send it as 'Authorization: Bearer KEY'")
    return AuthenticationError("the API key is not one that this gateway knows")
