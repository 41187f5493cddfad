"""The OpenAI chat types: what a request may hold, and what is answered. Validation only.

Fields that would change the answer and are not supported are refused by name; unknown ones are ignored, as OpenAI
clients send more than any server knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from pixelgate.errors import PixelgateError, RequestError

MAX_STOPS = 16
MAX_ANSWERS = 16
MAX_UUID = 256
_T = TypeVar("_T")
Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(msgspec.Struct, tag_field="type", tag="text", frozen=True):
    """Text inside a message."""

    text: str

    @property
    def words(self) -> str:
        """The text, whatever its field is called."""
        return self.text


class InputTextPart(TextPart, tag="input_text", frozen=True):
    """The same by its name in OpenAI's Responses API."""


class OutputTextPart(TextPart, tag="output_text", frozen=True):
    """An answer of the model by its name in OpenAI's Responses API."""


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal", frozen=True):
    """An answer of the model in which it refused."""

    refusal: str

    @property
    def words(self) -> str:
        """The text, whatever its field is called."""
        return self.refusal


class ImageUrl(msgspec.Struct, frozen=True):
    """A picture reference. ``detail`` is accepted and has no effect: the checkpoint's own rule decides the size."""

    url: str
    detail: str | None = None


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url", frozen=True):
    """A picture inside a message. ``uuid`` is the client's own name for it, as in vLLM."""

    image_url: ImageUrl | str | None = None
    uuid: str | None = None

    @property
    def url(self) -> str | None:
        """The reference, in either spelling."""
        return self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url


class InputImagePart(ImagePart, tag="input_image", frozen=True):
    """The same by its name in OpenAI's Responses API."""


Part = TextPart | InputTextPart | OutputTextPart | RefusalPart | ImagePart | InputImagePart


class Message(msgspec.Struct, frozen=True):
    """One turn of the conversation."""

    role: Role
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class Uncarried(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of vLLM's own API that its protocols for tensors cannot carry: refused there unless neutral."""

    best_of: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    echo: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logprob_token_ids: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    thinking_token_budget: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class ChatRequest(Uncarried, frozen=True):
    """The body of POST /v1/chat/completions."""

    model: str
    messages: list[Message]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    chat_template: Any = None
    documents: Any = None
    structured_outputs: dict[str, Any] | None = None


_DECODER = msgspec.json.Decoder(ChatRequest)
_NEUTRAL: dict[str, Any] = {"best_of": 1, "use_beam_search": False, "length_penalty": 1, "echo": False}
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 10.0),
    "top_k": (-1, 1 << 30),
    "max_tokens": (1, 1 << 30),
    "max_completion_tokens": (1, 1 << 30),
    "min_tokens": (0, 1 << 30),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "n": (1, MAX_ANSWERS),
    "top_logprobs": (0, 20),
}
_WORDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def decoded(decoder: msgspec.json.Decoder[_T], body: bytes | bytearray) -> _T:
    """A body as the decoder's type. Raises RequestError whose ``param`` names the field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as failure:
        raise _invalid(str(failure)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("the body is not valid JSON") from None


def parse_chat(body: bytes | bytearray) -> ChatRequest:
    """Validate a request body. Raises RequestError whose ``param`` names the field."""
    request = decoded(_DECODER, body)
    if not request.messages:
        raise RequestError("messages must hold at least one message", param="messages")
    for i, message in enumerate(request.messages):
        if message.content is None and message.role != "assistant":
            raise RequestError(f"messages[{i}].content is missing", param=f"messages[{i}].content")
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart):
                _check_picture(part, f"messages[{i}].content[{j}]")
    for name, (low, high) in _RANGES.items():
        value = getattr(request, name)
        if value is not None and not low <= value <= high:
            raise RequestError(f"{name} must be between {low} and {high}", param=name)
    stops = request.stop if isinstance(request.stop, list) else []
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop may hold at most {MAX_STOPS} strings, not {len(stops)}", param="stop")
    if "" in stops or request.stop == "":
        raise RequestError("a stop string must not be empty", param="stop")
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", param="add_generation_prompt"
        )
    # the checkpoint's alone: a template is a program
    _refuse({"chat_template": request.chat_template is not None, "documents": bool(request.documents)})
    return request


def _check_picture(part: ImagePart, param: str) -> None:
    if part.url is None and not part.uuid:
        raise RequestError(f"{param}.image_url is missing, and there is no uuid", param=f"{param}.image_url")
    if len(part.uuid or "") > MAX_UUID:
        raise RequestError(f"{param}.uuid may have at most {MAX_UUID} characters", param=f"{param}.uuid")


def refuse_unsupported(request: ChatRequest) -> None:
    """Raise RequestError for what engines that take tensors are not asked for."""
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs goes with logprobs: true", param="top_logprobs")
    _refuse({"tool_choice": request.tool_choice not in (None, "auto", "none")})
    for name in Uncarried.__struct_fields__:
        value = getattr(request, name)
        if value is not None and value != _NEUTRAL.get(name):
            instead = "; use structured_outputs" if name.startswith("guided_") else ""
            raise RequestError(f"{name} is not supported by this gateway{instead}", param=name)


def _refuse(refused: Mapping[str, bool]) -> None:
    for name, present in refused.items():
        if present:
            raise RequestError(f"{name} with this value is not supported by this gateway", param=name)


def _invalid(failure: str) -> RequestError:
    """msgspec's finding in our words: "... - at `$.messages[0].role`" names the place."""
    # the last " - at " counts: the reason may quote what the client sent
    reason, at, place = failure.rpartition(" - at ")
    reason = reason if at else failure
    param = place.strip("`").removeprefix("$").removeprefix(".") if at else ""
    where = param or "the body"
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", reason):
        field = f"{param}.{missing[1]}" if param else missing[1]
        return RequestError(f"{field} is missing", param=field)
    if wrong := re.fullmatch(r"Expected `([^`]+)`, got `([^`]+)`", reason):
        expected = " or ".join(_WORDS[kind] for kind in wrong[1].split(" | ") if kind != "null")
        return RequestError(f"{where} must be {expected}, not {_WORDS.get(wrong[2], wrong[2])}", param=param or None)
    if param.endswith(".type"):
        return RequestError(
            f"{where} must be text, image_url, input_text, input_image, output_text or refusal", param=param
        )
    if param.endswith(".role"):
        return RequestError(f"{where} must be system, developer, user, assistant or tool", param=param)
    return RequestError(f"{where} is not valid", param=param or None)


def error_body(error: PixelgateError) -> dict[str, Any]:
    """An OpenAI error object."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def usage(prompt_tokens: int, completion_tokens: int, image_tokens: int) -> dict[str, Any]:
    """An OpenAI usage object; the image tokens are part of the prompt's."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"image_tokens": image_tokens},
    }


def completion(
    request_id: str, created: int, model: str, choices: list[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    """A ``chat.completion`` object."""
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage,
    }


def choice(index: int, text: str, finish_reason: str | None, logprobs: list[Any] | None) -> dict[str, Any]:
    """One answer of a ``chat.completion``."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": text},
        "finish_reason": finish_reason,
        "logprobs": None if logprobs is None else {"content": logprobs},
    }


def chunk(request_id: str, created: int, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """A ``chat.completion.chunk`` object; one without choices carries only usage."""
    return {
        "id": request_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": model,
        "choices": choices,
    }


def delta(
    index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: list[Any] | None = None
) -> dict[str, Any]:
    """What a chunk adds to one answer."""
    return {
        "index": index,
        "delta": delta,
        "finish_reason": finish_reason,
        "logprobs": {"content": logprobs} if logprobs else None,
    }
