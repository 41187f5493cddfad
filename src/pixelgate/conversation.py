"""The prompt of a conversation in a file, as the gateway would make it; needs its extra, but no engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pixelgate.errors import ConfigError, MediaError, RequestError
from pixelgate.gateway.chat import render
from pixelgate.gateway.messages import Reference, references
from pixelgate.gateway.served import open_prompting
from pixelgate.gateway.wire import ChatRequest, parse_chat
from pixelgate.media import source
from pixelgate.pixels.plan import ImagePlan
from pixelgate.processor import Processor

_URL = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@dataclass(frozen=True)
class Counted:
    """A prompt's ids, and of each picture its file, or its place in the conversation, with its tokens."""

    token_ids: tuple[int, ...]
    images: tuple[tuple[str, int], ...]


def count(processor: Processor, file: Path) -> Counted:
    """Make the prompt of ``file``, a JSON list of messages or a chat request. No pixel is decoded.

    A picture is a data: URL, or a path relative to the file. Raises ConfigError for a file that cannot be read,
    RequestError that names it for what is wrong with the messages.
    """
    try:
        request = _request(file)
        processor = processor.with_options(**(request.mm_processor_kwargs or {}))
        pictures = [_picture(processor, file.parent, reference) for reference in references(request.messages)]
        prompt = render(request, open_prompting(processor), processor.family, [plan for _, plan in pictures])
    except RequestError as error:
        error.message = f"{file}: {error.message}"
        raise
    return Counted(prompt.token_ids, tuple((name, plan.tokens) for name, plan in pictures))


def _request(file: Path) -> ChatRequest:
    try:
        value = msgspec.json.decode(file.read_bytes())
    except OSError as failure:
        raise ConfigError(f"{file} cannot be read: {failure.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ConfigError(f"{file} is not valid JSON") from None
    body = value if isinstance(value, dict) else {"messages": value}
    return parse_chat(msgspec.json.encode({"model": "", **body}))


def _picture(processor: Processor, folder: Path, reference: Reference) -> tuple[str, ImagePlan]:
    """Its name and its plan."""
    param, url = reference.param, reference.url
    try:
        if url is None:
            raise MediaError("here a picture is needed, not its uuid alone: give a file or a data: URL")
        if not _URL.match(url):
            name, header = url, processor.header(folder / url)
        elif isinstance(parsed := source.parse(url, processor.policy), source.DataSource):
            name, header = param, processor.header(source.payload(parsed, processor.policy))
        else:
            raise MediaError("nothing is fetched here: give a file or a data: URL")
        return name, processor.plan(height=header.height, width=header.width)
    except RequestError as error:
        error.message = f"{param}: {error.message}"
        raise
