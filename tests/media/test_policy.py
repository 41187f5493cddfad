from __future__ import annotations

import ipaddress
from typing import Any

import pytest

from pixelgate.errors import ConfigError
from pixelgate.media.policy import PILLOW_MAX_PIXELS, MediaPolicy


def test_defaults_are_closed_and_hashable() -> None:
    policy = MediaPolicy()
    assert policy.allowed_networks == ()
    assert policy.allowed_hosts == frozenset()
    assert policy.max_redirects == 5
    assert policy.rgb == "pixelgate"
    assert hash(policy) == hash(MediaPolicy())


def test_private_entries_are_networks_addresses_or_names() -> None:
    policy = MediaPolicy(allow_private=("10.1.0.0/16", "127.0.0.1", "fd00::/8", "Images.internal", "localhost"))
    assert policy.allowed_networks == (
        ipaddress.ip_network("10.1.0.0/16"),
        ipaddress.ip_network("127.0.0.1/32"),
        ipaddress.ip_network("fd00::/8"),
    )
    assert policy.allowed_hosts == {"images.internal", "localhost"}


def test_lists_from_a_configuration_file_become_tuples() -> None:
    policy = MediaPolicy(schemes=["data"], formats=["PNG"])  # type: ignore[arg-type]
    assert policy.schemes == ("data",)
    assert policy.formats == ("PNG",)
    hash(policy)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("schemes", ("ftp",)),
        ("schemes", ()),
        ("schemes", "http"),
        ("formats", ("JPEG2000",)),
        ("formats", 5),
        ("isolate", ("PSD",)),
        ("fetch_retries", -1),
        ("decode_timeout", 0),
        ("decode_memory", 0),
        ("background", "white"),
        ("background", 0xFFFFFF),
        ("local_root", "pictures"),
        ("local_root", 5),
        ("allowed_domains", "example.com"),
        ("allowed_domains", ("http://example.com",)),
        ("allowed_domains", ("*.*.com",)),
        ("allowed_domains", ("",)),
        ("allowed_domains", (5,)),
        ("formats", ("png",)),
        ("max_bytes", 0),
        ("max_bytes", 1.5),
        ("max_pixels", True),
        ("max_pixels", PILLOW_MAX_PIXELS + 1),
        ("max_images", -1),
        ("max_url_length", 0),
        ("max_redirects", -1),
        ("connect_timeout", 0),
        ("connect_timeout", "5"),
        ("fetch_timeout", float("inf")),
        ("fetch_timeout", float("nan")),
        ("allow_private", "10.0.0.0/8"),
        ("allow_private", ("10.0.0.1/8",)),
        ("allow_private", ("300.1.1.1",)),
        ("allow_private", ("*.internal",)),
        ("allow_private", ("http://internal",)),
        ("allow_private", ("",)),
        ("egress_proxy", "proxy:3128"),
        ("egress_proxy", "socks5://proxy:1080"),
        ("egress_proxy", "http://"),
        ("egress_proxy", "http://proxy:99999"),
        ("egress_proxy", "http://proxy:0"),
        ("egress_proxy", "http://proxy:3128/path"),
        ("egress_proxy", "http://[proxy"),
        ("rgb", "bgr"),
    ],
)
def test_impossible_settings_are_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        MediaPolicy(**{setting: value})
    assert caught.value.param == setting
    assert setting in caught.value.message


def test_hf_has_no_background_but_white() -> None:
    assert MediaPolicy(rgb="hf", background="#FFFFFF").background_rgb == (255, 255, 255)
    with pytest.raises(ConfigError, match="background must be #ffffff"):
        MediaPolicy(rgb="hf", background="#000000")


def test_domains_are_hosts_or_all_names_below_one() -> None:
    policy = MediaPolicy(allowed_domains=("Images.example", "*.cdn.example", "93.184.216.34", "2606:2800::1"))
    for host in ("images.example", "a.cdn.example", "a.b.cdn.example", "93.184.216.34", "2606:2800::1"):
        assert policy.domain_allowed(host)
    for host in ("example", "a.images.example", "cdn.example", "evilcdn.example", "cdn.example.evil", "93.184.216.3"):
        assert not policy.domain_allowed(host)
    assert MediaPolicy().domain_allowed("anything.example")


def test_zero_redirects_and_the_largest_pixel_count_are_possible() -> None:
    policy = MediaPolicy(max_redirects=0, max_pixels=PILLOW_MAX_PIXELS)
    assert policy.max_redirects == 0


def test_a_proxys_password_is_never_shown() -> None:
    assert "secret" not in repr(MediaPolicy(egress_proxy="http://user:secret@proxy:3128/"))
    with pytest.raises(ConfigError) as caught:
        MediaPolicy(egress_proxy="ftp://user:secret@proxy:3128")
    assert "secret" not in caught.value.message
