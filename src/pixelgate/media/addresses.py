"""Which network addresses a picture may be fetched from: the public internet, and what is allowed by name."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from pixelgate.media.policy import Network

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def permitted(address: Address, allowed: Iterable[Network] = ()) -> bool:
    """Whether ``address`` lies in one of the ``allowed`` networks or is globally routable.

    An IPv6 address that carries an IPv4 one (mapped, 6to4, NAT64) is judged by the IPv4 address, because that is
    where the packets end.
    """
    if any(address in network for network in allowed):
        return True
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    carried = _carried(address)
    if carried is not None:
        return permitted(carried, allowed)
    # is_global alone lets through ::/96 and the old site-local range, hence the network that is really in use.
    return address in _GLOBAL_UNICAST and address.is_global and not address.is_multicast


def _carried(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
