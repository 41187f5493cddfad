"""The engine protocol: what the gateway hands to an engine and what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from pixelgate.fairness import NOBODY, Owner
from pixelgate.pixels.plan import ImagePlan
from pixelgate.pixels.tensor import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Span:
    """Where one image's placeholder tokens lie in the prompt: ``token_ids[offset : offset + length]``."""

    offset: int
    length: int


@dataclass(frozen=True)
class Constraint:
    """What an answer must be: its ``value`` is a JSON schema, a regular expression, a grammar (EBNF), a structural tag
    (JSON), or the choices; a JSON object needs none.
    """

    kind: Literal["json_object", "json_schema", "regex", "grammar", "structural_tag", "choice"]
    value: str | tuple[str, ...] = ""


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens. None means: leave it to the engine's neutral value.

    ``logprobs`` is how many alternatives to tell for each token, 0 the token itself alone; None: no log-probabilities.
    ``logit_bias`` holds (token id, bias).
    """

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
    include_stop_str_in_output: bool = False
    n: int = 1
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None


@dataclass
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

    def forget(self) -> None:
        """Let go of the tensors, although who sent the request is still waiting for its answer."""
        self.tensors = ()


@dataclass(frozen=True)
class EngineRequest:
    """One prompt, complete: placeholders expanded, nothing left for the engine to add.

    ``traceparent`` is the W3C header of the trace that it belongs to, if it is traced. ``owner`` is for turns among
    clients; no engine hears of it.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    images: Images | None = None
    stream: bool = True
    traceparent: str = ""
    owner: Owner = NOBODY


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability, and the likeliest tokens in its place as (id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """New tokens of answer ``index``. An answer's last delta, and only it, has a ``finish_reason``.

    ``completion_tokens`` counts this answer's. ``matched_stop`` is the stop string or token id that ended it, where the
    engine tells. ``logprobs`` has an entry for each token if they were asked for.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    matched_stop: str | int | None = None
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class EngineFacts:
    """What an engine says of itself, over one connection: after the next one it may be another.

    ``pixel_dtype`` is the dtype in which it wants pixel tensors, ``checkpoint`` where it has its weights from, in its
    own words, ``shared_memory`` which /dev/shm it sees. Without ``takes_mixed_shapes`` the pixels of a request are one
    dense tensor. ``max_pixel_bytes`` is how large all pixel tensors of a request may be.
    """

    model_name: str
    model_type: str
    pixel_dtype: Literal["uint8", "float32", "bfloat16", "float16"]
    max_context: int | None = None
    max_images: int | None = None
    max_embeddings_per_image: int | None = None
    max_pixel_bytes: int | None = None
    takes_mixed_shapes: bool = True
    eos_token_ids: tuple[int, ...] = ()
    checkpoint: str = ""
    vocab_size: int | None = None
    shared_memory: str = ""


def other_model(facts: EngineFacts, before: EngineFacts) -> str:
    """How the model of ``facts`` is another than that of ``before``: "vocab_size is 9, not 8". Empty when it is not.

    What an engine leaves unsaid is not held against it.
    """
    return "; ".join(
        f"{name} is {now}, not {then}"
        for name in ("model_type", "checkpoint", "vocab_size")
        if (now := getattr(facts, name)) != (then := getattr(before, name)) and now and then
    )


def misfit(request: EngineRequest, facts: EngineFacts) -> str:
    """Why an engine with ``facts`` must not be sent ``request``, which was made for others. Empty when it may be.

    An engine checks few of these itself: of pixels in another form it makes nonsense.
    """
    if facts.max_context is not None and len(request.token_ids) >= facts.max_context:
        return f"The engine takes prompts of fewer than {facts.max_context} tokens."
    if (images := request.images) is None:
        return ""
    if images.tensors[0].dtype != facts.pixel_dtype:
        return "The engine wants the pictures of this request in another form."
    if facts.max_pixel_bytes is not None and images.tensors[0].nbytes > facts.max_pixel_bytes:
        return f"The engine takes pixel tensors of at most {facts.max_pixel_bytes} bytes."
    if facts.max_images is not None and len(images.spans) > facts.max_images:
        return f"The engine takes at most {facts.max_images} pictures."
    largest = max((plan.tokens for plan in images.plans), default=0)
    if facts.max_embeddings_per_image is not None and largest > facts.max_embeddings_per_image:
        return f"The engine takes pictures of at most {facts.max_embeddings_per_image} tokens."
    return ""


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

    The tensors are read before the first delta is yielded: the gateway takes them out of the request then.
    """


class EngineWithFiles(Engine, Protocol):
    """An engine that can be asked for the configuration and the tokenizer it runs with."""

    async def archive(self, max_bytes: int) -> bytes:
        """These files as a ZIP of at most ``max_bytes``. Raises EngineError, also for an engine that gives none."""
