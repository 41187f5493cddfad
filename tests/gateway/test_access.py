"""API keys, clients behind proxies, and the admin listener."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging

import httpx
import pytest
from running import PATH, error_of, gateway, image, picture, strict_engine

from pixelgate.errors import ConfigError
from pixelgate.gateway import access, completions
from pixelgate.gateway.access import client_address, digests
from pixelgate.gateway.settings import GatewaySettings, ModelSettings

FIRST, SECOND = "sk-first-0123456789", "sk-second"
MODEL = ModelSettings("/models/qwen", ("local:reader",))


def bearer(key, scheme="Bearer"):
    return {"authorization": f"{scheme} {key}"}


def settings(**values):
    return GatewaySettings((MODEL,), **values)


@pytest.fixture
def clients(monkeypatch):
    """The clients of all chats."""
    seen = []

    async def noted(chat, services):
        seen.append(chat.held.owner.client)
        return await prepare(chat, services)

    prepare = completions.prepare
    monkeypatch.setattr(completions, "prepare", noted)
    return seen


async def test_a_key_is_needed_for_all_but_health(clients, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    (tmp_path / "keys").write_text(f"{SECOND}\n")
    keys = {"api_keys": (FIRST,), "api_key_file": str(tmp_path / "keys")}
    async with strict_engine() as engine, gateway(engine.url, **keys) as running:
        for path in (PATH, "/v1/models", "/metrics", "/", "/nothing"):
            method = "POST" if path == PATH else "GET"
            for headers in ({}, bearer("sk-wrong"), bearer(FIRST[:-1]), bearer(FIRST + "x")):
                response = await running.client.request(method, path, headers=headers)
                assert response.status_code == 401, (path, headers)
                assert response.headers["www-authenticate"] == "Bearer"
                error = error_of(response)
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert "sk-" not in response.text
        assert (await running.client.get("/health")).status_code == 200
        assert not engine.requests

        for key, scheme in ((FIRST, "Bearer"), (SECOND, "bearer"), (SECOND, "Bearer ")):
            response = await running.ask([image(picture(56, 56))], headers=bearer(key, scheme))
            assert response.status_code == 200, response.text
            metrics = await running.client.get("/metrics", headers=bearer(key))
            assert metrics.status_code == 200
            assert "sk-" not in metrics.text
        assert (await running.client.get("/nothing", headers=bearer(FIRST))).status_code == 404
    assert clients == [hashlib.sha256(key.encode()).hexdigest() for key in (FIRST, SECOND, SECOND)]
    assert "sk-" not in caplog.text


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", f"Basic {FIRST}")],
        [("authorization", FIRST)],
        [("authorization", f"Bearer {FIRST}"), ("authorization", f"Bearer {FIRST}")],
        [("authorization", f"Bearer {FIRST} {FIRST}")],
        [("authorization", "Bearer \xe9".encode("latin-1").decode("latin-1"))],
        [("x-api-key", FIRST)],
    ],
)
async def test_other_ways_to_send_a_key_are_none(headers):
    async with strict_engine() as engine, gateway(engine.url, api_keys=(FIRST,)) as running:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        assert (await running.client.get("/v1/models", headers=raw)).status_code == 401


async def test_every_key_is_compared_whatever_came_before(monkeypatch):
    compared = []

    def compare(sent, known):
        compared.append(known)
        return hmac_compare(sent, known)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    keys = digests(settings(api_keys=(FIRST, SECOND, "third")))
    guard = access.Access(None, keys=keys, trusted=(), refused=None)
    for credentials in ([f"Bearer {FIRST}"], ["Bearer nothing"], [], ["Basic x"]):
        compared.clear()
        guard._known(credentials)
        assert tuple(compared) == keys


async def test_without_keys_the_client_is_the_address_whatever_it_claims(clients):
    async with strict_engine() as engine, gateway(engine.url) as running:
        headers = {**bearer("sk-own"), "x-forwarded-for": "203.0.113.9"}
        assert (await running.ask(headers=headers)).status_code == 200
    async with (
        strict_engine() as engine,
        gateway(engine.url, trusted_proxies=("127.0.0.0/8", "10.0.0.0/8")) as running,
    ):
        assert (await running.ask(headers=headers)).status_code == 200
        headers["x-forwarded-for"] = "192.0.2.66, 203.0.113.7, 10.1.2.3"
        assert (await running.ask(headers=headers)).status_code == 200
    assert clients == ["127.0.0.1", "203.0.113.9", "203.0.113.7"]


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("198.51.100.1", ["203.0.113.7"], "198.51.100.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.7"], "203.0.113.7"),
        ("10.0.0.1", ["1.1.1.1, 203.0.113.7"], "203.0.113.7"),
        ("10.0.0.1", ["1.1.1.1", "203.0.113.7, 10.9.9.9"], "203.0.113.7"),
        ("10.0.0.1", ["10.0.0.3,10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", ["203.0.113.7, nonsense"], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.7, , 10.0.0.2"], "10.0.0.2"),
        ("::ffff:10.0.0.1", ["2001:DB8::1"], "2001:db8::1"),
        ("10.0.0.1", ["::ffff:203.0.113.7"], "203.0.113.7"),
        ("not an address", ["203.0.113.7"], ""),
    ],
)
def test_the_rightmost_hop_that_is_not_trusted(peer, forwarded, client):
    trusted = (ipaddress.ip_network("10.0.0.0/8"),)
    assert client_address((peer, 1), forwarded, trusted) == client
    if client:
        assert client_address((peer, 1), forwarded, ()) == peer.removeprefix("::ffff:")


def test_no_peer_has_no_address():
    assert client_address(None, ["203.0.113.7"], (ipaddress.ip_network("0.0.0.0/0"),)) == ""


def test_keys_are_kept_as_digests_and_shown_nowhere(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{SECOND}\r\n{FIRST}\n")
    ours = settings(api_keys=(FIRST,), api_key_file=str(file))
    assert digests(ours) == tuple(hashlib.sha256(key.encode()).hexdigest() for key in (FIRST, SECOND))
    assert "sk-" not in repr(ours)
    assert digests(settings()) == ()


@pytest.mark.parametrize("key", ["", " ", "sk-a b", "sk-a\tb", "sk-a\n", "sk-\x7f", "sk-schlüssel"])
def test_keys_that_nobody_could_send_are_refused_unseen(key):
    with pytest.raises(ConfigError, match=r"^key 2 of api_keys (is empty|has a blank or a character)") as caught:
        settings(api_keys=("good", key))
    assert "sk-" not in caught.value.message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "key 1 of .*keys is empty"),
        (b"good\n\nother\n", "key 2 of .*keys is empty"),
        (b"good\nnot good\n", "key 2 of .*keys has a blank"),
        (b"\xff\xfe", "is not text"),
        (None, "cannot be read: No such file"),
    ],
)
def test_key_files_that_are_wrong(tmp_path, content, reason):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        digests(settings(api_key_file=str(file)))
    assert "good" not in caught.value.message


async def test_metrics_on_a_listener_of_their_own():
    async with (
        strict_engine() as engine,
        gateway(engine.url, admin_host="0", api_keys=(FIRST,)) as running,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.admin_port}") as admin,
    ):
        assert (await running.client.get("/metrics", headers=bearer(FIRST))).status_code == 404
        assert (await running.ask(headers=bearer(FIRST))).status_code == 200
        response = await admin.get("/metrics")
        assert response.status_code == 200
        assert f'pixelgate_requests_total{{model="demo",path="{PATH}",status="200"}} 1.0' in response.text
        assert (await admin.get("/health")).json()["status"] == "ok"
        assert (await admin.get("/ready")).status_code == 200
        assert (await running.client.get("/ready")).status_code == 200
        assert (await running.ask(headers=bearer("wrong"))).status_code == 401
        assert 'pixelgate_errors_total{code="invalid_api_key",status="401"} 1.0' in (await admin.get("/metrics")).text
        for method, path in (("GET", "/v1/models"), ("POST", PATH)):
            response = await admin.request(method, path)
            assert response.status_code == 404
            assert error_of(response)["message"] == "there is nothing at this path"


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("", None),
        ("9000", ("127.0.0.1", 9000)),
        (":9000", ("127.0.0.1", 9000)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:9000", ("::1", 9000)),
        ("metrics.internal:9000", ("metrics.internal", 9000)),
    ],
)
def test_admin_addresses(written, address):
    assert settings(admin_host=written).admin_address == address


@pytest.mark.parametrize("written", ["localhost", "::1:9000", "a:b", "a:65536", "http://a:1", "a b:1", " 9000"])
def test_admin_addresses_that_are_none(written):
    with pytest.raises(ConfigError, match="admin_host must be HOST:PORT or PORT") as caught:
        settings(admin_host=written)
    assert caught.value.param == "admin_host"


@pytest.mark.parametrize("written", ["10.0.0.1/8", "proxy", "", "10.0.0.0/33"])
def test_proxies_that_are_no_networks(written):
    with pytest.raises(ConfigError, match="trusted_proxies must be networks") as caught:
        settings(trusted_proxies=("127.0.0.1", written))
    assert caught.value.param == "trusted_proxies"
