"""Engines that take a chat request as a client wrote it, and render, tokenise and prepare pictures themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pixelgate.engines.engine import AnyEngine

ChatObject = Mapping[str, Any]
"""A ``chat.completion`` object, or a ``chat.completion.chunk`` of a streamed answer, with its list of choices."""


@dataclass(frozen=True)
class ChatCall:
    """A chat request in OpenAI's form, but for the model's name; its pictures are data URLs."""

    body: Mapping[str, Any] = field(repr=False)
    nbytes: int = 0
    """About how large the body is: that of its pictures."""
    picture: str = ""
    """The identity of its first picture, if it has one."""
    traceparent: str = ""
    """The W3C header of the trace that it belongs to, if it is traced."""

    @property
    def stream(self) -> bool:
        """Whether the answer is to come in chunks."""
        return bool(self.body.get("stream"))


class ChatEngine(AnyEngine[ChatCall, ChatObject], Protocol):
    """One server with OpenAI's chat API. Its facts say nothing of tensors, as it takes none."""
