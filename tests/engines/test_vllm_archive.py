"""The files of a vLLM engine, over its protocol."""

from __future__ import annotations

import hashlib
import io
import zipfile

import grpc
import pytest
from engine_requests import FACTS, free_port
from scripted_vllm import Scripted, client, scripted
from smg_grpc_proto.generated import common_pb2

from pixelgate.demo import CHECKPOINT
from pixelgate.errors import EngineError, EngineUnavailableError
from pixelgate.testing.strict_engine import StrictEngine

MIB = 1 << 20


class Giving(Scripted):
    """An engine that gives chunks of (data, digest), and then ends with a status."""

    def __init__(self, chunks, status=None):
        super().__init__(status=status)
        self.chunks, self.sent = chunks, 0

    async def GetTokenizer(self, request, context):
        for data, digest in self.chunks:
            await context.write(common_pb2.GetTokenizerChunk(data=data, sha256=digest))
            self.sent += 1
        if self.status is not None:
            await context.abort(self.status, self.details)


def digest(*data):
    return hashlib.sha256(b"".join(data)).hexdigest()


async def test_the_files_arrive_as_they_are():
    async with StrictEngine(CHECKPOINT) as engine, client(engine.url) as wire:
        data = await wire.archive(MIB)
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
            assert opened.read(name) == (CHECKPOINT / name).read_bytes()


async def test_chunks_are_joined():
    async with scripted(Giving([(b"ab", ""), (b"", ""), (b"c", digest(b"abc"))])) as (engine, _):
        assert await engine.archive(3) == b"abc"


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [(b"ab", "")],
        [(b"ab", digest(b"abc"))],
        [(b"ab", digest(b"ab")), (b"c", "")],
        [(b"ab", digest(b"ab")), (b"c", digest(b"c"))],
    ],
)
async def test_what_arrives_incomplete_or_damaged(chunks):
    async with scripted(Giving(chunks)) as (engine, _):
        with pytest.raises(EngineError, match=r"^The engine's files arrived incomplete or damaged\.$"):
            await engine.archive(MIB)


async def test_more_than_is_taken_is_not_waited_for():
    chunks = [(b"a" * 32 * 1024, "")] * 10_000
    async with scripted(Giving(chunks)) as (engine, servicer):
        with pytest.raises(EngineError, match=r"^The engine's files are more than 1 MiB\.$"):
            await engine.archive(MIB)
        assert servicer.sent < 1000


async def test_a_message_beyond_all_measure():
    huge = b"a" * (65 * MIB)
    async with scripted(Giving([(huge, digest(huge))])) as (engine, _):
        with pytest.raises(EngineError, match=r"^The engine does not answer questions about itself\.$"):
            await engine.archive(100 * MIB)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.INTERNAL, EngineError),
        (grpc.StatusCode.FAILED_PRECONDITION, EngineError),
        (grpc.StatusCode.UNIMPLEMENTED, EngineError),
        (grpc.StatusCode.UNAVAILABLE, EngineUnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, EngineUnavailableError),
    ],
)
async def test_an_engine_that_gives_none(status, kind):
    async with scripted(Giving([(b"a", "")], status)) as (engine, servicer):
        with pytest.raises(EngineError) as caught:
            await engine.archive(MIB)
    assert type(caught.value) is kind
    assert servicer.details not in caught.value.message


async def test_an_engine_that_has_none_or_is_not_there():
    async with StrictEngine(FACTS) as engine, client(engine.url) as wire:
        with pytest.raises(EngineError):
            await wire.archive(MIB)
    async with client(f"vllm+grpc://127.0.0.1:{free_port()}") as wire:
        with pytest.raises(EngineUnavailableError):
            await wire.archive(MIB)
