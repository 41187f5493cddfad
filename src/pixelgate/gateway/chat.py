"""THE pipeline: from a chat request to a stream of text. Start reading here.

    fetch -> header -> plan -> render and expand -> decode + execute -> check -> engine -> detokenize

What happens to a single picture is in pictures.py. All pictures of a request are worked on at once, on threads; the
first error cancels the rest.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from numpy.typing import NDArray

from pixelgate.engines.engine import EngineFacts, EngineRequest, Images, Span
from pixelgate.engines.grpc_wire import room_before
from pixelgate.errors import NotCarriedError, OptionError, RequestError, TooLargeError
from pixelgate.gateway.answers import Answer, Piece
from pixelgate.gateway.check import check
from pixelgate.gateway.messages import for_template, is_short, references
from pixelgate.gateway.phases import Phases
from pixelgate.gateway.pictures import Picture, Pictures
from pixelgate.gateway.sampling import sampling
from pixelgate.gateway.served import Prompting, ServedModel
from pixelgate.gateway.services import Held, Services, naming
from pixelgate.gateway.wire import ChatRequest
from pixelgate.models.family import Family
from pixelgate.models.steps import NORMALISING
from pixelgate.pixels.plan import ImagePlan
from pixelgate.processor import Processor
from pixelgate.prompt.expand import Prompt, build
from pixelgate.prompt.tokens import Tokenizer

_FEW = 8000  # tokens of pictures that are put into a prompt in no time


@dataclass
class Chat:
    """One request on its way, and what its answer reports of it."""

    id: str
    request: ChatRequest
    model: ServedModel
    facts: EngineFacts
    phases: Phases
    processor: Processor
    held: Held
    plans: tuple[ImagePlan, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    may_be_handed_on: bool = False

    @property
    def image_tokens(self) -> int:
        """Prompt tokens that stand for pictures."""
        return sum(plan.tokens for plan in self.plans)


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
    """Everything before the engine: messages to token ids, pictures to tensors, and the check that they agree."""
    chosen = sampling(chat.request, chat.model.processor.checkpoint.generation, chat.facts.vocab_size)
    pictures = Pictures(services, chat.processor, chat.facts, chat.held)
    planned = await plan_pictures(chat, pictures)
    with naming("messages"):
        await admit(chat, services)
    prompt = await render_prompt(chat, services)
    chat.prompt_tokens = len(prompt.token_ids)
    if chat.facts.max_context is not None and chat.prompt_tokens >= chat.facts.max_context:
        raise RequestError(
            f"the prompt has {chat.prompt_tokens} tokens, {chat.image_tokens} of them for pictures; "
            f"this model takes fewer than {chat.facts.max_context}",
            param="messages",
        )
    with chat.phases.measure("preprocess"):
        room = room_before(chat.prompt_tokens) if len(planned) == 1 else 0
        tensors = await pictures.tensors(planned, room)
    request = EngineRequest(
        request_id=chat.id,
        token_ids=prompt.token_ids,
        sampling=chosen,
        images=images(chat, prompt, planned, tensors) if planned else None,
        stream=bool(chat.request.stream),
        traceparent=chat.phases.traceparent,
        owner=chat.held.owner,
    )
    check(request, chat.facts, chat.processor.family)
    if not chat.may_be_handed_on:
        forget_messages(chat)
    return request


def forget_messages(chat: Chat) -> None:
    """With the data URLs in them: nobody reads them again."""
    chat.request = msgspec.structs.replace(chat.request, messages=[])
    chat.held.encoded.release()


async def plan_pictures(chat: Chat, pictures: Pictures) -> list[Picture]:
    """Fetch every picture and plan it; no pixel is decoded. Raises RequestError for more than are allowed."""
    wanted = list(references(chat.request.messages))
    limit = pictures.services.settings.media.max_images
    if chat.facts.max_images is not None:
        limit = min(limit, chat.facts.max_images)
    if len(wanted) > limit:
        raise RequestError(f"the request has {len(wanted)} pictures; at most {limit} are allowed", param="messages")

    with chat.phases.measure("fetch"):
        planned = await pictures.obtain_all(wanted)
    chat.plans = tuple(picture.plan for picture in planned)
    chat.phases.note(pictures=len(planned), image_tokens=chat.image_tokens)
    return planned


async def render_prompt(chat: Chat, services: Services) -> Prompt:
    """Messages to token ids, on a thread unless they are short."""
    with chat.phases.measure("render"):
        return await services.errand(
            chat.held.owner,
            render,
            chat.request,
            chat.model,
            chat.processor.family,
            chat.plans,
            at_once=is_short(chat.request) and chat.image_tokens <= _FEW,
        )


async def answer(chat: Chat, request: EngineRequest) -> AsyncGenerator[Piece, None]:
    """Yield the answers' text; ``chat`` has its counts afterwards. Closing it aborts the request."""
    stop_ids = ending_ids(chat, request)
    answers = [Answer(i, chat.model.tokenizer, request.sampling, stop_ids) for i in range(request.sampling.n)]
    sent = time.perf_counter()
    first = True
    try:
        async with aclosing(chat.model.fleet.generate(request, chat.phases.tried)) as deltas:
            async for delta in deltas:
                if first:
                    chat.phases.add("first_token", time.perf_counter() - sent)
                    give_back(chat, request)  # an engine that answers has read the tensors
                    forget_messages(chat)
                    first = False
                piece = answers[delta.index].push(delta)
                chat.prompt_tokens = delta.prompt_tokens or chat.prompt_tokens
                chat.completion_tokens = sum(each.tokens for each in answers)
                chat.phases.note(prompt_tokens=chat.prompt_tokens, completion_tokens=chat.completion_tokens)
                if piece is not None:
                    yield piece
                if all(each.finished for each in answers):
                    return
    finally:
        give_back(chat, request)  # a failure may live on in its traceback


def ending_ids(chat: Chat, request: EngineRequest) -> tuple[int, ...]:
    """The tokens that end this answer; like vLLM, the gateway leaves them out of its text."""
    checkpoint = chat.model.processor.checkpoint
    return (*request.sampling.stop_token_ids, *(() if request.sampling.ignore_eos else checkpoint.eos_token_ids))


async def admit(chat: Chat, services: Services) -> None:
    """Refuse from the plans alone what is too large together, and wait for room, before memory is touched."""
    context = chat.facts.max_context
    if context is not None and chat.image_tokens >= context:
        raise RequestError(
            f"the pictures alone take {chat.image_tokens} tokens; this model takes fewer than {context}",
            param="messages",
        )
    if not chat.facts.takes_mixed_shapes and len({plan.shape[1:] for plan in chat.plans}) > 1:
        sizes = ", ".join(f"{plan.shape[-1]}x{plan.shape[-2]}" for plan in chat.plans)
        raise NotCarriedError(
            f"this model's engine takes several pictures in one request only if they become equally large; "
            f"these become {sizes}: send pictures of one size",
            param="messages",
        )
    nbytes = sum(plan.nbytes_as(chat.facts.pixel_dtype) for plan in chat.plans)
    limit = min(services.settings.max_tensor_bytes, chat.facts.max_pixel_bytes or services.settings.max_tensor_bytes)
    if nbytes > limit:
        raise TooLargeError(
            f"the request's pictures would become {nbytes} bytes of tensors; at most {limit} are allowed",
            param="messages",
        )
    await chat.held.tensors.take(nbytes)


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


def images(chat: Chat, prompt: Prompt, pictures: Sequence[Picture], tensors: Sequence[NDArray[Any]]) -> Images:
    """The multimodal half of the engine request."""
    family = chat.processor.family
    return Images(
        tensors=family.tensors(chat.plans, tensors),
        spans=tuple(Span(offset, length) for offset, length in prompt.spans),
        hashes=tuple(picture.identity for picture in pictures),
        placeholder_id=family.placeholder_id,
        plans=chat.plans,
    )


def give_back(chat: Chat, request: EngineRequest) -> None:
    """Let go of the tensors, which nobody will read again."""
    if request.images is not None:
        request.images.forget()
    chat.held.tensors.release()
