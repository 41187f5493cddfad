"""Where engines come from: addresses, names in DNS, files."""

from __future__ import annotations

import asyncio
import socket

import pytest
from engine_requests import FACTS, answer, request, until

from pixelgate.engines.connect import engine as connect
from pixelgate.engines.connect import takes_chat
from pixelgate.engines.discovery import Discovery, addresses
from pixelgate.engines.fleet import Fleet
from pixelgate.errors import ConfigError, EngineUnavailableError
from pixelgate.testing.strict_engine import StrictEngine
from pixelgate.testing.strict_http import StrictHttpEngine


@pytest.fixture
def names(monkeypatch):
    """Names and their addresses; an unknown one is an error, as in DNS."""
    table = {}

    async def getaddrinfo(loop, host, port, **kwargs):
        if host not in table:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in table[host]]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return table


async def test_an_address_stands_for_itself():
    assert await addresses("vllm+grpc://a:1") == ["vllm+grpc://a:1"]


async def test_a_name_stands_for_all_its_addresses(names):
    names["engines"] = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"]
    assert await addresses("dns+vllm+grpc://engines:50051") == [
        "vllm+grpc://10.0.0.1:50051",
        "vllm+grpc://10.0.0.2:50051",
        "vllm+grpc://[fd00::1]:50051",
    ]
    assert (await addresses("dns+openai+http://engines:80/v1"))[0] == "openai+http://10.0.0.1:80/v1"


async def test_a_name_with_certificates_is_a_configuration_error():
    with pytest.raises(ConfigError, match="certificates are for names"):
        Discovery(["dns+vllm+https://engines:443"], connect)
    with pytest.raises(ConfigError, match="certificates are for names"):
        await addresses("dns+openai+https://engines:443")


async def test_a_name_of_engines_behind_http(names):
    names["engines"] = ["127.0.0.1"]
    async with StrictHttpEngine(FACTS, reply_ids=(5, 999)) as server:
        port = server.url.rpartition(":")[2]
        discovery = Discovery([f"dns+vllm+http://engines:{port}"], connect)
        fleet = Fleet(discovery.engines, find=discovery.look)
        await fleet.connect()
        assert (await answer(fleet, request()))[-1].finish_reason == "stop"
        await fleet.close()


@pytest.mark.parametrize(
    ("entry", "chat"),
    [
        ("vllm+grpc://a:1", False),
        ("dns+vllm+http://a:1", False),
        ("openai+http://a", True),
        ("dns+openai+http://a:1", True),
        ("file:openai+http", False),
    ],
)
def test_which_engines_take_chat_requests(entry, chat):
    assert takes_chat(entry) is chat


async def test_a_file_names_engines_that_take_tensors(tmp_path):
    file = tmp_path / "engines"
    file.write_text("openai+http://a:1\n")
    with pytest.raises(ConfigError, match="prepares pictures itself"):
        await Discovery([f"file:{file}"], connect).look()


async def test_a_file_has_one_a_line(names, tmp_path):
    names["engines"] = ["10.0.0.1"]
    file = tmp_path / "engines"
    file.write_text("# ours\nvllm+grpc://a:1\n\n  vllm+grpc://b:2  # the large one\ndns+vllm+grpc://engines:3\n")
    expected = ["vllm+grpc://a:1", "vllm+grpc://b:2", "vllm+grpc://10.0.0.1:3"]
    assert await addresses(f"file:{file}") == expected


async def test_what_cannot_be_looked_up_is_unavailable(names, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff")
    for entry, why in (
        ("dns+vllm+grpc://nowhere:1", "has no address"),
        (f"file:{tmp_path}/missing", "cannot be read: No such file or directory"),
        (f"file:{tmp_path}/binary", "is not text"),
    ):
        with pytest.raises(EngineUnavailableError, match=why):
            await addresses(entry)


async def test_a_name_that_can_be_none_is_unavailable():
    with pytest.raises(EngineUnavailableError):
        await addresses(f"dns+vllm+grpc://{'a' * 64}.test:1")


async def test_a_file_may_not_name_files(tmp_path):
    (tmp_path / "engines").write_text("file:/etc/engines")
    with pytest.raises(ConfigError, match="names a file"):
        await addresses(f"file:{tmp_path}/engines")


@pytest.mark.parametrize("entry", ["dns+vllm+grpc://a", "dns+vllm+grpc://a:x", "dns+vllm+grpc://u@a:1", "dns+nothing"])
def test_a_malformed_name_is_a_configuration_error(entry):
    with pytest.raises(ConfigError, match="must look like"):
        Discovery([entry], connect)


@pytest.mark.parametrize("entry", ["a:1", "dns+http://a:1"])
def test_what_is_no_engine_is_a_configuration_error_at_once(entry):
    with pytest.raises(ConfigError, match="is not an engine address"):
        Discovery([entry], connect)


def test_what_lacks_a_kind_of_engine_is_asked_for_it():
    with pytest.raises(ConfigError, match=r"; dns\+\.\.\. is a name of several, .*; is it openai\+http://a:1\?$"):
        Discovery(["http://a:1"], connect)


async def test_an_address_keeps_its_engine(names, caplog):
    names["engines"] = ["10.0.0.1", "10.0.0.2"]
    discovery = Discovery(["vllm+grpc://a:1", "dns+vllm+grpc://engines:1"], connect)
    assert not discovery.fixed
    assert [engine.url for engine in discovery.engines] == ["vllm+grpc://a:1"]
    fixed, one, two = await discovery.look()
    assert (one.url, two.url) == ("vllm+grpc://10.0.0.1:1", "vllm+grpc://10.0.0.2:1")
    names["engines"] = ["10.0.0.2", "10.0.0.3"]
    looked = await discovery.look()
    assert looked[:2] == [fixed, two]
    del names["engines"]
    assert await discovery.look() == looked
    assert "dns+vllm+grpc://engines:1 cannot be looked up: The name has no address." in caplog.text
    names["engines"] = ["10.0.0.1"]
    assert (await discovery.look())[1] is not one  # that was closed meanwhile


def test_addresses_alone_are_fixed():
    assert Discovery(["vllm+grpc://a:1"], connect).fixed


async def test_a_fleet_follows_its_file(tmp_path):
    file = tmp_path / "engines"
    async with StrictEngine(FACTS) as first, StrictEngine(FACTS) as second:
        discovery = Discovery([f"file:{file}"], connect)
        fleet = Fleet(discovery.engines, find=discovery.look, look_interval=0.02, probe_interval=0.0)
        with pytest.raises(EngineUnavailableError, match="No engine of this model"):
            await fleet.connect()
        file.write_text(first.url)
        await fleet.connect()
        await answer(fleet, request())
        file.write_text(second.url)
        number = 0

        async def moved():
            nonlocal number
            number += 1
            await answer(fleet, request(request_id=str(number)))
            return second.requests

        await until(moved)
        file.write_text("what is this?")
        await asyncio.sleep(0.05)
        assert (await answer(fleet, request(request_id="last")))[-1].finish_reason == "stop"
        await fleet.close()
