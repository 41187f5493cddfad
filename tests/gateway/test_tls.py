"""HTTPS by two files, and what is said of files that are wrong."""

from __future__ import annotations

import asyncio
import ssl

import pytest
from running import gateway, strict_engine

from media.test_fetch import CERTIFICATE
from pixelgate.errors import ConfigError
from pixelgate.gateway.app import create_app
from pixelgate.gateway.serve import check_tls, server_config
from pixelgate.gateway.settings import GatewaySettings, ModelSettings

MARK = "-----BEGIN CERTIFICATE-----"
# Made for these tests alone.
OTHER_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgo3moXsmjFbiC/Z9j
EfO94pYJNlVlM80Q1EKpaOAb67ShRANCAATdnqoxiM7VAoDvZBOYVfeUH9q1W+5O
KeBjhZZN6KrdI8c2dQYPCPE7PRdtBziu4GecZdJU0/v9YF7yLQD0ZFBi
-----END PRIVATE KEY-----
"""
LOCKED_KEY = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHrMFYGCSqGSIb3DQEFDTBJMCgGCSqGSIb3DQEFDDAbBAj6I1wj7Xtx+AIBATAM
BggqhkiG9w0CCQUAMB0GCWCGSAFlAwQBKgQQZHxvCmg/lv1nNANivtw5wQSBkMYm
NPxPBhCWaCX4qorjNkqzWdiV1Nx8bMUNgBZ4YQbPBgvkU/PX9rVclIuB6/MVOlr6
yc8PFIWjEpGftGU3N++ZMuBbD7O5Cle4nWJUx6fZIgpKh+hR/CW89XxTU8g2rnb4
Uy7ZOsnTsd0pz5FI7P09/yRdMEtk1VPPlRZu/I93QGuUJrrJfBRrK7gLKwblnw==
-----END ENCRYPTED PRIVATE KEY-----
"""


@pytest.fixture
def files(tmp_path):
    """Names of files with a certificate, its key, a key of another one, a key with a password, and no PEM."""
    key, certificate = CERTIFICATE.split(MARK)
    texts = {"cert": MARK + certificate, "key": key, "other": OTHER_KEY, "locked": LOCKED_KEY, "junk": "junk\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in (*texts, "missing")}


def settings(**values):
    return GatewaySettings((ModelSettings("/models/qwen", ("local:reader",)),), **values)


async def test_requests_over_tls(files):
    async with (
        strict_engine() as engine,
        gateway(
            engine.url, tls_cert=files["cert"], tls_key=files["key"], header_timeout=0.3, max_connections=5
        ) as running,
    ):
        assert str(running.client.base_url).startswith("https://")
        assert (await running.ask()).status_code == 200

        trusting = ssl.create_default_context(cafile=files["cert"])
        name = {"ssl": trusting, "server_hostname": "images.example"}
        for sent, answer in ((b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n", b" 200 "), (b"GET /hea", b" 408 ")):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port, **name)
            writer.write(sent)
            assert answer in await asyncio.wait_for(reader.readline(), 2)
            writer.close()

        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert not (await asyncio.wait_for(reader.read(), 2)).startswith(b"HTTP")
        writer.close()
        assert (await running.ask()).status_code == 200


def test_old_versions_are_not_spoken(files):
    ours = settings(tls_cert=files["cert"], tls_key=files["key"])
    config = server_config(create_app(ours, []), ours)
    config.load()
    assert config.ssl.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_files_that_fit(files):
    check_tls(settings(tls_cert=files["cert"], tls_key=files["key"]))
    check_tls(settings())


@pytest.mark.parametrize(
    ("cert", "key", "reason"),
    [
        ("missing", "key", "tls_cert .*missing cannot be read: No such file"),
        ("cert", "missing", "tls_key .*missing cannot be read: No such file"),
        ("cert", "other", "are no pair of PEM files"),
        ("cert", "locked", "are no pair of PEM files"),
        ("cert", "junk", "are no pair of PEM files"),
        ("junk", "key", "are no pair of PEM files"),
        ("key", "cert", "are no pair of PEM files"),
    ],
)
def test_files_that_do_not_fit(files, cert, key, reason):
    with pytest.raises(ConfigError, match=reason):
        check_tls(settings(tls_cert=files[cert], tls_key=files[key]))
