"""The engine protocol: what the gateway hands to an engine and what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from pixelgate.pixels.plan import ImagePlan
from pixelgate.pixels.tensor import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Span:
    """Where one image's placeholder tokens lie in the prompt: ``token_ids[offset : offset + length]``."""

    offset: int
    length: int


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. None means: leave it to the engine's neutral value."""

    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True)
class Images:
    """The multimodal half of a request. Entry i of spans, hashes and plans is image i, in prompt order.

    ``hashes`` are the pictures' identities for the engine's caches: 64 hex digits that cover the pixels and
    everything that was done to them. ``tensors`` holds the pixel tensor first.
    """

    tensors: tuple[Tensor, ...]
    spans: tuple[Span, ...]
    hashes: tuple[str, ...]
    placeholder_id: int
    plans: tuple[ImagePlan, ...]


@dataclass(frozen=True)
class EngineRequest:
    """One prompt, complete: placeholders expanded, nothing left for the engine to add."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    images: Images | None = None
    stream: bool = True


@dataclass(frozen=True)
class Delta:
    """New tokens. The last delta of a request, and only it, has a ``finish_reason``.

    ``matched_stop`` is the stop string or token id that ended the answer, where the engine tells.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    matched_stop: str | int | None = None


@dataclass(frozen=True)
class EngineFacts:
    """What an engine says of itself. ``pixel_dtype`` is the dtype in which it wants pixel tensors.

    Without ``takes_mixed_shapes`` the pixels of a request are one dense tensor.
    """

    model_name: str
    model_type: str
    pixel_dtype: Literal["uint8", "float32", "bfloat16", "float16"]
    max_context: int | None = None
    max_images: int | None = None
    max_embeddings_per_image: int | None = None
    takes_mixed_shapes: bool = True
    eos_token_ids: tuple[int, ...] = ()


_Request = TypeVar("_Request", contravariant=True)
_Answer = TypeVar("_Answer", covariant=True)


class AnyEngine(Protocol[_Request, _Answer]):
    """One engine process, whatever it takes and answers.

    Everything raised is an EngineError or a RequestError of ``pixelgate.errors``.
    """

    @property
    def url(self) -> str:
        """The address as configured; for the operator only, never for a client."""

    async def describe(self) -> EngineFacts:
        """Ask the engine for its facts; connects if need be. Raises EngineUnavailableError."""

    async def healthy(self) -> bool:
        """Whether the engine takes requests now. Never raises."""

    def generate(self, request: _Request) -> AsyncIterator[_Answer]:
        """Send one request, yield its answer as it comes. Closing the iterator aborts the request on the engine."""

    async def close(self) -> None:
        """Give the connection back."""


class Engine(AnyEngine[EngineRequest, Delta], Protocol):
    """An engine that takes prompts and tensors.

    The tensors are read before the first delta is yielded: their memory may be another request's after that.
    """


class EngineWithFiles(Engine, Protocol):
    """An engine that can be asked for the configuration and the tokenizer it runs with."""

    async def archive(self, max_bytes: int) -> bytes:
        """These files as a ZIP of at most ``max_bytes``. Raises EngineError, also for an engine that gives none."""
