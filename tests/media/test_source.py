from __future__ import annotations

import base64
import builtins
import os
import pathlib
from urllib.parse import quote

import pytest

from pixelgate.errors import MediaError, TooLargeError
from pixelgate.media.policy import MediaPolicy
from pixelgate.media.source import DataSource, UrlSource, join, parse, payload

POLICY = MediaPolicy()
DATA = bytes(range(256)) * 3 + b"\xfb\xff\xfe>>>???"
B64 = base64.b64encode(DATA).decode()


def decoded(reference: str, policy: MediaPolicy = POLICY) -> bytes:
    source = parse(reference, policy)
    assert isinstance(source, DataSource)
    return payload(source, policy)


def url(reference: str, policy: MediaPolicy = POLICY) -> UrlSource:
    source = parse(reference, policy)
    assert isinstance(source, UrlSource)
    return source


@pytest.mark.parametrize(
    "header",
    [
        "data:image/png;base64,",
        "DATA:image/PNG;BASE64,",
        "data:;base64,",
        "data:image;base64,",
        "data:image/png;charset=utf-8;base64,",
        "data:image/png;name=a.png; base64 ,",
        "data:text/plain;base64,",
    ],
)
def test_every_form_of_header_is_read(header: str) -> None:
    assert decoded(header + B64) == DATA


@pytest.mark.parametrize(
    "text",
    [
        B64,
        B64.rstrip("="),
        base64.encodebytes(DATA).decode(),
        base64.encodebytes(DATA).decode().replace("\n", "\r\n\t"),
        "  " + B64 + " \n",
        base64.urlsafe_b64encode(DATA).decode(),
        base64.urlsafe_b64encode(DATA).decode().rstrip("="),
        quote(B64, safe=""),
    ],
    ids=["clean", "unpadded", "lines", "crlf", "blanks", "urlsafe", "urlsafe-unpadded", "percent"],
)
def test_base64_is_forgiving_in_form(text: str) -> None:
    assert decoded("data:image/png;base64," + text) == DATA


@pytest.mark.parametrize("size", range(1, 7))
def test_unpadded_base64_of_every_remainder(size: int) -> None:
    text = base64.b64encode(DATA[:size]).decode()
    assert decoded("data:;base64," + text) == decoded("data:;base64," + text.rstrip("=")) == DATA[:size]


@pytest.mark.parametrize(
    "text",
    ["QUJD!", "QU.JD", "QQ=Q", "QQ==QQ==", "Q", "QUJDR", "QQ=", "QUJDé", "QU%4", "QU%zz", "QQ%%3D", "=", "===="],
)
def test_base64_is_strict_in_content(text: str) -> None:
    with pytest.raises(MediaError):
        decoded("data:image/png;base64," + text)


def test_a_plain_data_url_is_percent_decoded() -> None:
    assert decoded("data:image/png," + quote(DATA, safe="")) == DATA
    assert decoded("data:,a+b%2Bc%00") == b"a+b+c\0"
    assert decoded("data:image/png;base64;x=y,QUJD") == b"QUJD"  # the marker counts in last place only


@pytest.mark.parametrize("text", ["a%", "a%4", "%g0", "%%41", "ü"])
def test_broken_percent_encoding_is_refused(text: str) -> None:
    with pytest.raises(MediaError):
        decoded("data:," + text)


@pytest.mark.parametrize("reference", ["data:image/png;base64,", "data:,", "data:;base64,\n \n"])
def test_an_empty_data_url_is_refused(reference: str) -> None:
    with pytest.raises(MediaError, match="empty"):
        decoded(reference)


@pytest.mark.parametrize("reference", ["data:image/png;base64", "data:" + "a" * 5000 + ";base64,QUJD"])
def test_a_data_url_without_a_comma_in_reach_is_refused(reference: str) -> None:
    with pytest.raises(MediaError, match="comma"):
        parse(reference, POLICY)


@pytest.mark.parametrize("size", [998, 999, 1000])
def test_the_byte_cap_is_exact(size: int) -> None:
    policy = MediaPolicy(max_bytes=size)
    full, more = os.urandom(size), os.urandom(size + 1)
    for encode in (base64.b64encode, base64.encodebytes):
        assert decoded("data:;base64," + encode(full).decode(), policy) == full
        with pytest.raises(TooLargeError, match=str(size)):
            decoded("data:;base64," + encode(more).decode(), policy)
    plain = "data:," + "".join(f"%{byte:02x}" for byte in full)
    assert decoded(plain, policy) == full
    with pytest.raises(TooLargeError):
        decoded(plain + "a", policy)


def test_the_byte_cap_comes_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> bytes:
        raise AssertionError("decoded a payload above the cap")

    monkeypatch.setattr("pixelgate.media.source.pybase64.b64decode", never)
    with pytest.raises(TooLargeError):
        decoded("data:;base64," + "A" * 2000, MediaPolicy(max_bytes=1000))


def test_nbytes_bounds_the_payload() -> None:
    for size in range(1, 20):
        for reference in (
            "data:;base64," + base64.b64encode(DATA[:size]).decode().rstrip("="),
            "data:," + quote(DATA[:size], safe=""),
        ):
            source = parse(reference, POLICY)
            assert isinstance(source, DataSource)
            assert size <= source.nbytes
            assert len(payload(source, POLICY)) == size


def test_a_payload_never_shows_in_a_repr_or_message() -> None:
    secret = "U0VDUkVU" * 10
    source = parse(f"data:image/png;base64,{secret}!", POLICY)
    assert isinstance(source, DataSource)
    assert secret not in repr(source)
    with pytest.raises(MediaError) as caught:
        payload(source, POLICY)
    assert "U0VDUkVU" not in str(caught.value)
    assert "sig=abc" not in repr(parse("https://a.example/x?sig=abc", POLICY))


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "/etc/passwd",
        "etc/passwd",
        "./a.png",
        "C:\\a.png",
        "file:///etc/passwd",
        "file://localhost/etc/passwd",
        "file:/etc/passwd",
        "ftp://example.com/a.png",
        "gopher://example.com/",
        "javascript:alert(1)",
        "blob:https://example.com/1",
        " https://example.com/",
        "https",
        "data",
        "//example.com/x",
        B64,
    ],
)
def test_what_is_no_allowed_url_is_refused_with_one_message_and_no_file_is_opened(
    reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> object:
        raise AssertionError("touched the file system")

    for owner, name in ((builtins, "open"), (os, "open"), (os, "stat"), (pathlib.Path, "exists")):
        monkeypatch.setattr(owner, name, never)
    with pytest.raises(MediaError) as caught:
        parse(reference, POLICY)
    monkeypatch.undo()
    assert caught.value.message == (
        "a picture must be given as a URL that starts with one of http://, https://, data:; "
        "file paths and bare base64 are not accepted"
    )


@pytest.mark.parametrize("reference", ["http://example.com/", "data:;base64,QUJD"])
def test_a_scheme_outside_the_policy_is_refused(reference: str) -> None:
    with pytest.raises(MediaError, match="https://"):
        parse(reference, MediaPolicy(schemes=("https",)))


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("http://example.com", "http://example.com/"),
        ("HTTPS://Example.COM:443/A.png?x=1#frag", "https://example.com/A.png?x=1"),
        ("http://example.com:8080?q", "http://example.com:8080/?q"),
        ("http://example.com:/a", "http://example.com/a"),
        ("http://example.com./a", "http://example.com/a"),
        ("http://my_host.example/a%20b/%2F..", "http://my_host.example/a%20b/%2F.."),
        ("http://bücher.example/ä?ö", "http://xn--bcher-kva.example/%C3%A4?%C3%B6"),
        ("http://192.0.2.7:81/a", "http://192.0.2.7:81/a"),
        ("http://[2001:DB8:0::1]:8080/a", "http://[2001:db8::1]:8080/a"),
        ("http://[::ffff:127.0.0.1]/a", "http://[::ffff:7f00:1]/a"),
        ("http://127。0。0。1/", "http://127.0.0.1/"),
        ("http://①②⑦.⓪.⓪.①/", "http://127.0.0.1/"),
        ("http://example.com//a@b:c", "http://example.com//a@b:c"),
    ],
)
def test_urls_come_out_in_one_canonical_form(reference: str, expected: str) -> None:
    source = url(reference)
    assert source.url == expected
    assert parse(source.url, POLICY) == source


@pytest.mark.parametrize(
    "reference",
    [
        "http:example.com/",
        "http:/example.com/",
        "http://",
        "http:///a",
        "http://?q",
        "http://:80/",
        "http://./",
        "http://a..b/",
        "http://user@example.com/",
        "http://user:pw@example.com/",
        "http://127.0.0.1:80\\@example.com/x",
        "http://127.0.0.1:80%5C@example.com/x",
        "http://example.com%2F@127.0.0.1/",
        "http://127%2e0.0.1/",
        "http://example.com\t@127.0.0.1/",
        "http://example.com/a b",
        "http://example.com/a\nb",
        "http://example.com/a\r\nX: y",
        "http://example.com/\x00",
        "http://example.com/\x7f",
        "http://example.com/\x85",
        "http://example.com/\u2028",
        "http://example.com/\u3000",
        "http://example.com/\udc80",
        "http://example.com/a\\b",
        "http://example.com:0/",
        "http://example.com:65536/",
        "http://example.com:8a/",
        "http://example.com:+80/",
        "http://example.com:٨٠/",
        "http://example.com:80:80/",
        "http://exa mple.com/",
        "http://exa<mple.com/",
        "http://" + "a" * 64 + ".example/",
        "http://" + "a." * 127 + "aa/",
        "http://" + "ü" * 70 + ".example/",
        "http://[::1/",
        "http://[::1]a/",
        "http://[::1%25eth0]/",
        "http://[fe80::1%eth0]/",
        "http://[127.0.0.1]/",
        "http://[]/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.0.0.1/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://127.0.0.1.1/",
        "http://256.0.0.1/",
        "http://example.1/",
        "http://0x/",
        "http://1.2.3.0x4./",
    ],
)
def test_odd_urls_are_refused(reference: str) -> None:
    with pytest.raises(MediaError):
        parse(reference, POLICY)


def test_long_urls_are_refused() -> None:
    policy = MediaPolicy(max_url_length=30)
    assert url("http://example.com/" + "a" * 11, policy).target == "/" + "a" * 11
    with pytest.raises(MediaError, match="30"):
        parse("http://example.com/" + "a" * 12, policy)


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("b.png", "http://example.com:81/x/b.png"),
        ("/b.png", "http://example.com:81/b.png"),
        ("?q=2", "http://example.com:81/x/a.png?q=2"),
        ("../b.png", "http://example.com:81/b.png"),
        ("//other.example/b", "http://other.example/b"),
        ("HTTPS://Other.example/b#f", "https://other.example/b"),
        ("", "http://example.com:81/x/a.png?q=1"),
    ],
)
def test_redirects_are_joined(location: str, expected: str) -> None:
    assert join(url("http://example.com:81/x/a.png?q=1"), location, POLICY).url == expected


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/hostname",
        "data:;base64,QUJD",
        "ftp://example.com/",
        "http://u:p@example.com/",
        "http://a\\@b/",
        "\thttp://127.0.0.1/",
        "/a b",
        "//2130706433/",
        "http://\udcff/",
    ],
)
def test_redirects_are_checked_like_any_url(location: str) -> None:
    with pytest.raises(MediaError):
        join(url("http://example.com/"), location, POLICY)
