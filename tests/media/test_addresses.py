from __future__ import annotations

import ipaddress

import pytest

from pixelgate.media.addresses import permitted


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "127.255.255.254",
        "169.254.169.254",
        "172.16.0.1",
        "168.63.129.16",
        "192.0.0.8",
        "192.0.0.192",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "224.0.0.1",
        "224.0.1.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",
        "2001:db8::1",
        "2002:7f00:1::1",
        "2002:a00:1::1",
        "fc00::1",
        "fd12:3456::1",
        "fe80::1",
        "fe80::1%2",
        "fec0::1",
        "ff02::1",
        "ff0e::1",
        "2001:4860::5efe:7f00:1",
        "2001:4860::200:5efe:a00:1",
        "3fff::1",
        "4000::1",
    ],
)
def test_what_is_not_the_public_internet_is_refused(address: str) -> None:
    assert not permitted(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "93.184.216.34",
        "2606:4700::1111",
        "2a00:1450:4001::200e",
        "::ffff:1.1.1.1",
        "64:ff9b::101:101",
        "2002:101:101::1",
        "2001:4860::5efe:101:101",
    ],
)
def test_the_public_internet_is_permitted(address: str) -> None:
    assert permitted(ipaddress.ip_address(address))


def test_allowed_networks_count_and_only_they() -> None:
    allowed = (ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("fd00::/64"))
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::5", "8.8.8.8"):
        assert permitted(ipaddress.ip_address(address), allowed)
    for address in ("10.2.0.1", "::ffff:10.2.0.1", "fd00:0:0:1::5", "127.0.0.1"):
        assert not permitted(ipaddress.ip_address(address), allowed)
