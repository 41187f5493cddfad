"""Which network addresses a picture may be fetched from: the public internet, and what is allowed by name."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from pixelgate.media.policy import Network

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)  # the middle of an address whose end is an IPv4 one

# Not for the public, whatever the interpreter's own list says, which differs between versions.
_NEVER: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "192.0.0.0/24",  # protocol assignments; one cloud's metadata is there
        "192.88.99.0/24",  # the old 6to4 relays
        "168.63.129.16/32",  # another cloud's host
        "3fff::/20",  # documentation
        "5f00::/16",  # segment routing
    )
)


def permitted(address: Address, allowed: Iterable[Network] = ()) -> bool:
    """Whether ``address`` lies in one of the ``allowed`` networks or is globally routable.

    An IPv6 address that carries an IPv4 one (mapped, 6to4, NAT64, ISATAP) is judged by the IPv4 address, because that
    is where the packets end.
    """
    if any(address in network for network in allowed):
        return True
    if any(address in network for network in _NEVER):
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    carried = _carried(address)
    if carried is not None:
        return permitted(carried, allowed)
    # is_global alone lets through ::/96 and the old site-local range, hence the network that is really in use.
    return address in _GLOBAL_UNICAST and address.is_global and not address.is_multicast


def _carried(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address in _NAT64 or (int(address) >> 32) & 0xFFFFFFFF in _ISATAP:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
