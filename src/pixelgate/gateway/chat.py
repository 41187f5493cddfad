"""THE pipeline: from a chat request to a stream of text. Start reading here.

    fetch -> header -> plan -> decode + execute -> render and expand -> check -> engine -> detokenize

Work on pictures runs on the workers' threads, all pictures of a request at once; the first error cancels the rest.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pixelgate.engines.engine import EngineFacts, EngineRequest, Images, Span
from pixelgate.errors import ImageRefusedError, OptionError, PixelgateError, RequestError, TooLargeError
from pixelgate.gateway.answers import Answer, Piece
from pixelgate.gateway.budget import Budget, Share
from pixelgate.gateway.check import check
from pixelgate.gateway.messages import for_template, references
from pixelgate.gateway.metrics import Metrics, Phases
from pixelgate.gateway.sampling import sampling
from pixelgate.gateway.served import Prompting, ServedModel
from pixelgate.gateway.settings import GatewaySettings
from pixelgate.gateway.wire import ChatRequest
from pixelgate.media import files, source
from pixelgate.media.decode import Header
from pixelgate.media.fetch import Fetcher
from pixelgate.media.isolation import Isolation
from pixelgate.models.family import Family
from pixelgate.models.steps import NORMALISING
from pixelgate.pixels.buffers import BufferPool
from pixelgate.pixels.plan import ImagePlan, execute
from pixelgate.processor import Processor
from pixelgate.prompt.expand import Prompt, build
from pixelgate.prompt.tokens import Tokenizer

_T = TypeVar("_T")


@dataclass(frozen=True)
class Services:
    """What all requests share."""

    settings: GatewaySettings
    fetcher: Fetcher
    isolation: Isolation
    workers: ThreadPoolExecutor
    buffers: BufferPool
    metrics: Metrics
    encoded: Budget
    pixels: Budget

    @classmethod
    def of(cls, settings: GatewaySettings) -> Services:
        """What a gateway with these settings shares."""
        return cls(
            settings=settings,
            fetcher=Fetcher(settings.media),
            isolation=Isolation(settings.media, settings.workers),
            workers=ThreadPoolExecutor(settings.workers, thread_name_prefix="pixelgate-worker"),
            buffers=BufferPool(settings.buffer_bytes),
            metrics=Metrics(),
            encoded=Budget("bytes", settings.max_bytes_in_flight, settings.budget_wait),
            pixels=Budget("pixels", settings.max_pixels_in_flight, settings.budget_wait),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open what has to be, and close it all in reverse."""
        async with AsyncExitStack() as stack:
            stack.callback(self.workers.shutdown, cancel_futures=True)
            await stack.enter_async_context(self.fetcher)
            await stack.enter_async_context(self.isolation)
            yield

    async def on_worker(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run ``work`` on a worker's thread."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work, *arguments)


@dataclass
class Chat:
    """One request on its way, and what its answer reports of it.

    ``encoded`` is what it holds of the bytes in flight, ``client`` who asks: the digest of a key, or an address.
    """

    id: str
    request: ChatRequest
    model: ServedModel
    facts: EngineFacts
    phases: Phases
    processor: Processor
    encoded: Share
    client: str
    plans: tuple[ImagePlan, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    pixels: list[NDArray[Any]] = field(default_factory=list)

    @property
    def image_tokens(self) -> int:
        """Prompt tokens that stand for pictures."""
        return sum(plan.tokens for plan in self.plans)


@dataclass(frozen=True)
class Picture:
    """A picture of the request: its encoded bytes, what they will become, and their identity."""

    param: str
    data: bytes
    plan: ImagePlan
    hash: str
    isolated: bool


def configured(processor: Processor, request: ChatRequest, facts: EngineFacts, *, trusted: bool) -> Processor:
    """The model's processor with the options of a request. Raises OptionError."""
    options = request.mm_processor_kwargs or {}
    if options and not trusted:
        raise OptionError(
            "mm_processor_kwargs are not taken from requests unless the gateway runs with --trust-request-mm-kwargs",
            param="mm_processor_kwargs",
        )
    if facts.pixel_dtype == "uint8" and (fixed := sorted({*NORMALISING} & {*options})):
        raise OptionError(f"{fixed[0]} cannot be changed: the engine normalises the pixels itself", param=fixed[0])
    return processor.with_options(**options)


async def prepare(chat: Chat, services: Services) -> EngineRequest:
    """Everything before the engine: pictures to tensors, messages to token ids, and the check that they agree."""
    chosen = sampling(chat.request, chat.model.processor.checkpoint.generation, chat.facts.vocab_size)
    pictures = await plan_pictures(chat, services)
    admit(chat, services)

    with chat.phases.measure("preprocess"), services.pixels.share() as pixels, naming("messages"):
        await pixels.take(sum(plan.height * plan.width for plan in chat.plans))
        chat.pixels = await together(tensor(chat, services, picture) for picture in pictures)

    prompt = await render_prompt(chat, services)
    chat.prompt_tokens = len(prompt.token_ids)
    if chat.facts.max_context is not None and chat.prompt_tokens >= chat.facts.max_context:
        raise RequestError(
            f"the prompt has {chat.prompt_tokens} tokens, {chat.image_tokens} of them for pictures; "
            f"this model takes fewer than {chat.facts.max_context}",
            param="messages",
        )
    request = EngineRequest(
        request_id=chat.id,
        token_ids=prompt.token_ids,
        sampling=chosen,
        images=images(chat, prompt, pictures) if pictures else None,
        stream=bool(chat.request.stream),
    )
    check(request, chat.facts, chat.processor.family.placeholder_id)
    chat.request = msgspec.structs.replace(chat.request, messages=[])  # with the data URLs: nobody reads them again
    chat.encoded.release()
    return request


async def plan_pictures(chat: Chat, services: Services) -> list[Picture]:
    """Fetch every picture and plan it; no pixel is decoded. Raises RequestError for more than are allowed."""
    wanted = list(references(chat.request.messages))
    limit = services.settings.media.max_images
    if chat.facts.max_images is not None:
        limit = min(limit, chat.facts.max_images)
    if len(wanted) > limit:
        raise RequestError(f"the request has {len(wanted)} pictures; at most {limit} are allowed", param="messages")

    with chat.phases.measure("fetch"):
        pictures = await together(obtain(chat, services, param, reference) for param, reference in wanted)
    chat.plans = tuple(picture.plan for picture in pictures)
    return pictures


async def render_prompt(chat: Chat, services: Services) -> Prompt:
    """Messages to token ids, on a worker."""
    with chat.phases.measure("render"):
        return await services.on_worker(render, chat.request, chat.model, chat.processor.family, chat.plans)


async def answer(chat: Chat, request: EngineRequest, services: Services) -> AsyncGenerator[Piece, None]:
    """Yield the answers' text; ``chat`` has its counts afterwards. Closing it aborts the request."""
    stop_ids = ending_ids(chat, request)
    answers = [Answer(i, chat.model.tokenizer, request.sampling, stop_ids) for i in range(request.sampling.n)]
    sent = time.perf_counter()
    first = True
    async with aclosing(chat.model.fleet.generate(request)) as deltas:
        async for delta in deltas:
            if first:
                chat.phases.add("first_token", time.perf_counter() - sent)
                give_back(chat, services)  # an engine that answers has read the tensors
                first = False
            piece = answers[delta.index].push(delta)
            chat.prompt_tokens = delta.prompt_tokens or chat.prompt_tokens
            chat.completion_tokens = sum(each.tokens for each in answers)
            if piece is not None:
                yield piece
            if all(each.finished for each in answers):
                return


def ending_ids(chat: Chat, request: EngineRequest) -> tuple[int, ...]:
    """The tokens that end this answer; like vLLM, the gateway leaves them out of its text."""
    checkpoint = chat.model.processor.checkpoint
    return (*request.sampling.stop_token_ids, *(() if request.sampling.ignore_eos else checkpoint.eos_token_ids))


async def obtain(chat: Chat, services: Services, param: str, reference: str) -> Picture:
    """Fetch a picture and plan it from its header; no pixel is decoded."""
    policy, processor, dtype = services.settings.media, chat.processor, chat.facts.pixel_dtype
    largest = chat.facts.max_embeddings_per_image

    def look(data: bytes, isolated: Header | None = None) -> Picture:
        header = isolated or processor.header(data)
        plan = processor.plan(height=header.height, width=header.width)
        if largest is not None and plan.tokens > largest:
            raise ImageRefusedError(
                f"a picture of {plan.width}x{plan.height} takes {plan.tokens} tokens; "
                f"the engine accepts at most {largest} for one picture"
            )
        identity = hashlib.sha256(f"{processor.fingerprint}:{dtype}:{plan.views}:{len(data)}:".encode())
        identity.update(data)
        return Picture(param, data, plan, identity.hexdigest(), isolated is not None)

    def first_look(got: source.DataSource | bytes) -> Picture | bytes:
        """The picture, or its bytes where only a process of its own may look at them."""
        data = got if isinstance(got, bytes) else source.payload(got, policy)
        return data if services.isolation.takes(data) else look(data)

    with naming(param):
        got: source.DataSource | bytes
        match source.parse(reference, policy):
            case source.DataSource() as got:  # counted with the body
                pass
            case source.UrlSource() as url:
                got = await services.fetcher.fetch(url, taking=chat.encoded.take)
            case source.FileSource() as file:
                got = await services.on_worker(files.read, file, policy)
                await chat.encoded.take(len(got))
        seen = await services.on_worker(first_look, got)
        if isinstance(seen, Picture):
            return seen
        return await services.on_worker(look, seen, await services.isolation.header(seen, processor.decoding))


def admit(chat: Chat, services: Services) -> None:
    """Refuse from the plans alone what is too large together, before memory is touched."""
    context = chat.facts.max_context
    if context is not None and chat.image_tokens >= context:
        raise RequestError(
            f"the pictures alone take {chat.image_tokens} tokens; this model takes fewer than {context}",
            param="messages",
        )
    if not chat.facts.takes_mixed_shapes and len({plan.shape[1:] for plan in chat.plans}) > 1:
        sizes = ", ".join(f"{plan.shape[-1]}x{plan.shape[-2]}" for plan in chat.plans)
        raise RequestError(
            f"this model's engine takes several pictures in one request only if they become equally large; "
            f"these become {sizes}: send pictures of one size",
            param="messages",
        )
    nbytes = sum(plan.nbytes_as(chat.facts.pixel_dtype) for plan in chat.plans)
    if nbytes > services.settings.max_tensor_bytes:
        raise TooLargeError(
            f"the request's pictures would become {nbytes} bytes of tensors; "
            f"at most {services.settings.max_tensor_bytes} are allowed",
            param="messages",
        )


async def tensor(chat: Chat, services: Services, picture: Picture) -> NDArray[Any]:
    """Decode a picture and run its plan, on one worker, into pooled memory."""
    processor = chat.processor

    def work(isolated: NDArray[np.uint8] | None) -> NDArray[Any]:
        dtype = chat.facts.pixel_dtype
        image = processor.rgb(picture.data) if isolated is None else isolated
        # Taken on the worker: of a request that is cancelled meanwhile nobody has the array, and nobody reuses it.
        out = services.buffers.take(picture.plan.shape, dtype)
        return execute(picture.plan, image, out, dtype=dtype)

    with naming(picture.param):
        rows = await services.isolation.rows(picture.data, processor.decoding) if picture.isolated else None
        made = await services.on_worker(work, rows)
    services.metrics.images.inc()
    services.metrics.image_tokens.observe(picture.plan.tokens)
    services.metrics.tensor_bytes.inc(made.nbytes)
    return made


def render(request: ChatRequest, model: Prompting, family: Family, plans: Sequence[ImagePlan]) -> Prompt:
    """Messages to token ids, each picture's placeholder expanded. ``family`` has the request's options."""
    tools = None if request.tool_choice == "none" else request.tools or None
    template = model.template_for(tools)
    continued = bool(request.continue_final_message)
    return build(
        for_template(request.messages, developers=template.knows_developers),
        template,
        model.tokenizer,
        model.rules,
        expansions=[_ids(family.expansion(plan), model.tokenizer) for plan in plans],
        add_generation_prompt=request.add_generation_prompt is not False and not continued,
        continue_final_message=continued,
        tools=tools,
        template_kwargs=request.chat_template_kwargs,
    )


def _ids(runs: list[tuple[str, int]], tokenizer: Tokenizer) -> list[int]:
    """The token ids of an expansion."""
    return [id_ for token, count in runs for id_ in [tokenizer.special_ids[token]] * count]


def images(chat: Chat, prompt: Prompt, pictures: list[Picture]) -> Images:
    """The multimodal half of the engine request."""
    family = chat.processor.family
    return Images(
        tensors=family.tensors(chat.plans, chat.pixels),
        spans=tuple(Span(offset, length) for offset, length in prompt.spans),
        hashes=tuple(picture.hash for picture in pictures),
        placeholder_id=family.placeholder_id,
        plans=chat.plans,
    )


def give_back(chat: Chat, services: Services) -> None:
    """Hand tensor memory to the next request. Only on the good way: elsewhere somebody may still be reading it."""
    while chat.pixels:
        services.buffers.give(chat.pixels.pop())


async def together(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Results of all, in order; the first failure cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


@contextmanager
def naming(param: str) -> Iterator[None]:
    """Errors raised inside get ``param``, the place in the request that they are about."""
    try:
        yield
    except PixelgateError as error:
        error.param = error.param or param
        raise
