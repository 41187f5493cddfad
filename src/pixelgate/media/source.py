"""A picture's reference, parsed once: a data: URL with its payload, an http(s) URL that is safe to hand on, or a file.

Nothing here opens anything. The one parser's result is what the HTTP client gets, so no second parser can read the
same text as another host.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from urllib.parse import quote, unquote, urljoin

import numpy as np
import pybase64

from pixelgate.errors import MediaError, TooLargeError
from pixelgate.media.policy import MediaPolicy

_PORTS = {"http": 80, "https": 443}
_MAX_DATA_HEADER = 4096

_FORBIDDEN = re.compile(r"[\x00-\x20\x7f-\x9f\\\s\ud800-\udfff]")
_HOST = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_URL_SAFE = "/?:@!$&'()*+,;=-._~%[]|^`{}\"<>"  # quote() is here for characters outside ASCII alone

_BLANKS = " \t\r\n\f\v"
_URLSAFE_TO_STANDARD = bytes.maketrans(b"-_", b"+/")
_HEX = np.full(256, 255, np.uint8)
for _digit in "0123456789abcdefABCDEF":
    _HEX[ord(_digit)] = int(_digit, 16)


@dataclass(frozen=True)
class DataSource:
    """A data: URL. The payload starts at ``reference[start]`` and is decoded by `payload`, not before."""

    reference: str = field(repr=False)
    start: int
    base64: bool

    @property
    def nbytes(self) -> int:
        """Upper bound of the decoded picture's size, at no cost."""
        encoded = len(self.reference) - self.start
        return (encoded * 3 + 3) // 4 if self.base64 else encoded


@dataclass(frozen=True)
class UrlSource:
    """An http(s) URL in canonical ASCII form. ``target`` is path and query; IPv6 hosts come without brackets."""

    scheme: str
    host: str
    port: int
    target: str = field(repr=False)  # queries carry signatures and tokens

    @property
    def authority(self) -> str:
        """Host and port as they stand in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The whole URL."""
        return f"{self.scheme}://{self.authority}{self.target}"


@dataclass(frozen=True)
class FileSource:
    """A file: URL's path, percent-decoded, with no promise about where it leads."""

    path: str


def parse(reference: str, policy: MediaPolicy) -> DataSource | UrlSource | FileSource:
    """Parse one reference. Raises MediaError for anything but a well-formed URL of an allowed scheme."""
    scheme = reference[:8].partition(":")[0].lower()
    schemes = (*policy.schemes, "file") if policy.local_root else policy.schemes
    if scheme not in schemes or ":" not in reference[:8]:
        kinds = ", ".join("data:" if known == "data" else f"{known}://" for known in schemes)
        raise MediaError(
            f"a picture must be given as a URL that starts with one of {kinds}; "
            "file paths and bare base64 are not accepted"
        )
    if scheme == "data":
        return _parse_data(reference)
    if scheme == "file":
        return _parse_file(reference[len("file:") :], policy)
    return _parse_url(scheme, reference[len(scheme) + 1 :], policy)


def join(source: UrlSource, location: str, policy: MediaPolicy) -> UrlSource:
    """The URL to which ``source`` redirects with ``location``. Raises MediaError like `parse`."""
    _refuse_odd_characters(location)  # before urljoin, which drops some of them silently
    target = parse(urljoin(source.url, location), policy)
    if not isinstance(target, UrlSource):
        raise MediaError("a redirect must lead to an http or https URL")
    return target


def payload(source: DataSource, policy: MediaPolicy) -> bytes:
    """Decode a data: URL's payload; work for a thread, not for the event loop, unless it is small.

    Raises TooLargeError before anything is decoded, MediaError if the payload is empty or not validly encoded.
    """
    if source.nbytes > policy.max_bytes and _exact_size(source) > policy.max_bytes:
        raise TooLargeError(f"the picture is larger than the limit of {policy.max_bytes} bytes")
    text = source.reference[source.start :]
    if source.base64:
        try:
            data = _strict_base64(text)
        except ValueError:
            data = _forgiving_base64(text)
    else:
        data = _unquote(_ascii(text))
    if not data:
        raise MediaError("the data: URL is empty")
    return data


def _exact_size(source: DataSource) -> int:
    encoded = len(source.reference) - source.start
    if not source.base64:
        return encoded - 2 * source.reference.count("%", source.start)
    blanks = sum(source.reference.count(blank, source.start) for blank in _BLANKS)
    padding = source.reference.count("=", max(source.start, len(source.reference) - 4))
    return (encoded - blanks - padding) * 3 // 4


def _parse_data(reference: str) -> DataSource:
    comma = reference.find(",", 0, _MAX_DATA_HEADER)
    if comma < 0:
        raise MediaError("the data: URL has no comma between its header and the picture")
    marker = reference[len("data:") : comma].rpartition(";")
    return DataSource(reference, comma + 1, base64=bool(marker[1]) and marker[2].strip().lower() == "base64")


def _forgiving_base64(text: str) -> bytes:
    """Base64 as clients send it: wrapped, percent-encoded, in the URL-safe alphabet or without its padding."""
    data = _ascii(text)
    if b"%" in data:
        data = _unquote(data)
    codes = np.frombuffer(data, np.uint8)
    blank = (codes == ord(" ")) | (codes - ord("\t") <= ord("\r") - ord("\t"))
    if blank.any():  # so much faster than to delete them with translate()
        data = codes[~blank].tobytes()
    data = data.translate(_URLSAFE_TO_STANDARD)
    bare = data.rstrip(b"=")
    missing = -len(bare) % 4
    if len(data) - len(bare) not in (0, missing):
        raise MediaError("the data: URL is not valid base64: wrong padding")
    try:
        return _strict_base64(bare + b"=" * missing)
    except ValueError:
        raise MediaError("the data: URL is not valid base64") from None


def _strict_base64(text: str | bytes) -> bytes:
    # Without validate every unknown character is dropped in silence.
    return pybase64.b64decode(text, validate=True)


def _ascii(text: str) -> bytes:
    try:
        return text.encode("ascii")
    except UnicodeEncodeError:
        raise MediaError("the data: URL has characters outside ASCII") from None


def _unquote(data: bytes) -> bytes:
    """Undo percent-encoding, strictly. As array steps: a list of pieces would take 20 times the picture's memory."""
    codes = np.frombuffer(data, np.uint8)
    at = np.flatnonzero(codes == ord("%"))
    if not at.size:
        return data
    if at[-1] + 2 >= codes.size:
        raise MediaError("the data: URL ends inside a percent-encoded byte")
    high, low = _HEX[codes[at + 1]], _HEX[codes[at + 2]]
    if max(high.max(), low.max()) > 15:
        raise MediaError("the data: URL has a % that is not followed by two hexadecimal digits")
    decoded = codes.copy()
    decoded[at] = high << 4 | low
    kept = np.ones(codes.size, bool)
    kept[at + 1] = kept[at + 2] = False
    return bytes(decoded[kept])


def _parse_url(scheme: str, rest: str, policy: MediaPolicy) -> UrlSource:
    if len(scheme) + 1 + len(rest) > policy.max_url_length:
        raise MediaError(f"the picture's URL is longer than {policy.max_url_length} characters")
    _refuse_odd_characters(rest)
    if not rest.startswith("//"):
        raise MediaError(f"the picture's URL must start with {scheme}://")
    authority = re.split("[/?#]", rest[2:], maxsplit=1)[0]
    target = rest[2 + len(authority) :].partition("#")[0]
    if "@" in authority:
        raise MediaError("the picture's URL must not carry a user name or password")
    host, port = _split_port(authority)
    return UrlSource(
        scheme=scheme,
        host=_canonical_host(host),
        port=_parse_port(port) if port else _PORTS[scheme],
        target=quote(target if target.startswith("/") else "/" + target, safe=_URL_SAFE),
    )


def _parse_file(rest: str, policy: MediaPolicy) -> FileSource:
    if len(rest) > policy.max_url_length:
        raise MediaError(f"the picture's URL is longer than {policy.max_url_length} characters")
    host, slash, path = rest.removeprefix("//").partition("/")
    path = unquote(path)
    if not rest.startswith("//") or not slash or host.lower() not in ("", "localhost") or "\0" in path:
        raise MediaError("a picture's file must be given as file:///PATH")
    return FileSource("/" + path)


def _refuse_odd_characters(text: str) -> None:
    if _FORBIDDEN.search(text):
        raise MediaError("the picture's URL has a blank, a control character or a backslash in it")


def _split_port(authority: str) -> tuple[str, str]:
    if authority.startswith("["):
        host, bracket, port = authority.partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise MediaError("the picture's URL has a malformed IPv6 address")
        return host + bracket, port[1:]
    host, _, port = authority.partition(":")
    return host, port


def _parse_port(port: str) -> int:
    if port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536:
        return int(port)
    raise MediaError("the picture's URL has an impossible port")


def _canonical_host(host: str) -> str:
    """Lower-case ASCII host name, or an address in its one canonical spelling."""
    if host.startswith("["):
        try:
            address = ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            address = None
        if address is None or address.scope_id is not None:
            raise MediaError("the picture's URL has a malformed IPv6 address")
        return str(address)
    if not host.isascii():
        try:
            host = host[:254].encode("idna").decode("ascii")
        except UnicodeError:
            raise MediaError("the picture's URL has an impossible host name") from None
    host = host.lower().removesuffix(".")
    if not host:
        raise MediaError("the picture's URL has no host")
    if len(host) > 253 or not _HOST.fullmatch(host):
        raise MediaError("the picture's URL has an impossible host name")
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        # 2130706433, 0x7f.1, 127.1 and 0177.0.0.1 are all spellings of one address to some resolver: one is enough.
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise MediaError("the picture's URL has a host that is neither a name nor an IPv4 address") from None
    return host
