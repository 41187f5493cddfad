"""What may be fetched and decoded: every limit and permission of the media room, with its default."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pixelgate.errors import ConfigError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

SCHEMES = ("http", "https", "data")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIC")

# Pillow refuses GIF, WebP and TIFF above this by itself, and its limit is global to the process: never ours to move.
PILLOW_MAX_PIXELS = 178_956_970

_HOST_NAME = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}")
_DOMAIN = re.compile(r"(\*\.)?[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*|[0-9a-f:]{2,39}")
_LISTS = ("schemes", "formats", "allow_private", "allowed_domains", "isolate")
_COUNTS = ("max_bytes", "max_pixels", "max_images", "max_url_length", "decode_memory")
_SECONDS = ("connect_timeout", "fetch_timeout", "decode_timeout")


@dataclass(frozen=True, kw_only=True)
class MediaPolicy:
    """The limits and permissions under which pictures are accepted. Hashable; raises ConfigError if impossible."""

    schemes: tuple[str, ...] = SCHEMES
    """URL schemes a picture may be given with; file:// is one more where ``local_root`` is set."""

    formats: tuple[str, ...] = FORMATS
    """Picture formats that are decoded, recognised by content alone. HEIC needs the extra ``pixelgate[heif]``."""

    max_bytes: int = 32 * 1024 * 1024
    """Largest encoded picture in bytes: a file, a download after decompression, or a decoded data: URL."""

    max_pixels: int = 64_000_000
    """Largest height x width, read from the header before anything is decoded. A picture of this size needs up to
    8 bytes a pixel while it is decoded, 12 with transparency. At most 178,956,970, Pillow's own limit."""

    max_images: int = 32
    """Pictures in one request."""

    max_url_length: int = 8192
    """Characters of an http or https URL."""

    connect_timeout: float = 5.0
    """Seconds for one TCP connection of a fetch."""

    fetch_timeout: float = 20.0
    """Seconds for one whole fetch: name lookups, connections, redirects and body together."""

    max_redirects: int = 5
    """Redirects followed in one fetch; every one is checked like the first URL."""

    fetch_retries: int = 1
    """Times a hop is tried again after a broken connection or HTTP status 502, 503 or 504, within ``fetch_timeout``."""

    allow_private: tuple[str, ...] = ()
    """Networks ("10.1.0.0/16", "127.0.0.1") and host names that may be fetched from although they are not globally
    routable. A host name is allowed with whatever addresses it has. Empty: the public internet only."""

    egress_proxy: str = field(default="", repr=False)
    """``http://[USER:PASSWORD@]HOST:PORT``, or https://, of a proxy through which all pictures are fetched. Hosts are
    resolved and checked here all the same. Empty: directly, whatever the environment says. A secret, as it may hold a
    password."""

    allowed_domains: tuple[str, ...] = ()
    """Hosts that may be fetched from: "example.com" is that host, "*.example.com" every name below it. Their addresses
    are checked all the same. Empty: any host."""

    local_root: str = ""
    """Absolute path of a directory whose regular files may be given as file:///PATH. Empty: no file is ever opened for
    a reference."""

    rgb: Literal["pixelgate", "hf"] = "pixelgate"
    """How an encoded picture becomes 8-bit RGB. "pixelgate": upright by EXIF, transparency on ``background``, 16 bit
    scaled to 8. "hf": what transformers makes of a path or URL, quirks included, for comparison."""

    background: str = "#ffffff"
    """Colour behind what is transparent, as #RRGGBB. White is what transformers takes; "hf" knows no other."""

    isolate: tuple[str, ...] = ("WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIC")
    """Formats that the gateway decodes in processes of their own, which can be killed: all but the two whose decoders
    have no surprises. Where there are any, JPEGs that are slow to decode go there too. The library never does."""

    decode_timeout: float = 10.0
    """Seconds a decoder process may take over one picture, from its bytes to its pixels."""

    decode_memory: int = 1536 * 1024 * 1024
    """Bytes of memory a decoder process may take for one picture. The default is enough for any format at the default
    ``max_pixels``."""

    def __post_init__(self) -> None:
        for name in _LISTS:
            value = getattr(self, name)
            if not isinstance(value, list | tuple):
                raise ConfigError(f"{name} must be a list, not {value!r}", param=name)
            object.__setattr__(self, name, tuple(value))  # a list from a configuration file
        for name in _COUNTS:
            _whole(name, getattr(self, name), least=1)
        _whole("max_redirects", self.max_redirects, least=0)
        _whole("fetch_retries", self.fetch_retries, least=0)
        for name in _SECONDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a number of seconds above 0, not {value!r}", param=name)
        if self.max_pixels > PILLOW_MAX_PIXELS:
            raise ConfigError(f"max_pixels can be at most {PILLOW_MAX_PIXELS}", param="max_pixels")
        _subset("schemes", self.schemes, SCHEMES)
        _subset("formats", self.formats, FORMATS)
        if self.isolate:
            _subset("isolate", self.isolate, FORMATS)
        if self.rgb not in ("pixelgate", "hf"):
            raise ConfigError(f'rgb must be "pixelgate" or "hf", not {self.rgb!r}', param="rgb")
        _check_proxy(self.egress_proxy)
        if not isinstance(self.background, str) or not _COLOUR.fullmatch(self.background):
            raise ConfigError(
                f"background must be a colour such as #ffffff, not {self.background!r}", param="background"
            )
        if self.rgb == "hf" and self.background_rgb != (255, 255, 255):
            raise ConfigError('background must be #ffffff with rgb="hf": transformers has no other', param="background")
        for domain in self.allowed_domains:
            if not isinstance(domain, str) or not _DOMAIN.fullmatch(domain.lower()):
                raise ConfigError(
                    f"allowed_domains: {domain!r} is neither a host such as example.com, *.example.com for all names "
                    "below it, nor an address",
                    param="allowed_domains",
                )
        if not isinstance(self.local_root, str) or (self.local_root and not Path(self.local_root).is_absolute()):
            raise ConfigError(f"local_root must be an absolute path, not {self.local_root!r}", param="local_root")
        _ = self.allowed_networks, self.allowed_hosts  # raises now rather than at the first fetch

    @cached_property
    def allowed_networks(self) -> tuple[Network, ...]:
        """The networks among ``allow_private``."""
        return tuple(entry for entry in map(_private, self.allow_private) if not isinstance(entry, str))

    @cached_property
    def allowed_hosts(self) -> frozenset[str]:
        """The host names among ``allow_private``, lower case."""
        return frozenset(entry for entry in map(_private, self.allow_private) if isinstance(entry, str))

    @cached_property
    def background_rgb(self) -> tuple[int, int, int]:
        """Red, green and blue of ``background``."""
        red, green, blue = bytes.fromhex(self.background[1:])
        return red, green, blue

    def domain_allowed(self, host: str) -> bool:
        """Whether ``allowed_domains`` lets this host through; ``host`` is lower case, an IPv6 address unbracketed."""
        return not self.allowed_domains or any(
            host.endswith(domain[1:]) if domain.startswith("*") else host == domain
            for domain in map(str.lower, self.allowed_domains)
        )


def _private(entry: str) -> Network | str:
    try:
        return ipaddress.ip_network(entry)
    except ValueError:
        name = entry.lower()
        if _HOST_NAME.fullmatch(name) and not name.rpartition(".")[2].isdigit():
            return name
    raise ConfigError(
        f"allow_private: {entry!r} is neither a network such as 10.1.0.0/16 (no bits set behind the prefix), "
        "an address nor a host name",
        param="allow_private",
    )


def _check_proxy(url: str) -> None:
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if url and (not fits or parts.path.strip("/") or parts.query or parts.fragment):
        raise ConfigError("egress_proxy must be a URL such as http://proxy.internal:3128", param="egress_proxy")


def _whole(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}", param=name)


def _subset(name: str, values: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = [value for value in values if value not in known]
    if unknown or not values:
        what = f"does not know {unknown[0]!r}" if unknown else "is empty"
        raise ConfigError(f"{name} {what}; choose from {', '.join(known)}", param=name)
