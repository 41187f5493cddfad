"""From the messages of a request to what the prompt room and the media room want."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pixelgate.errors import RequestError, TooLargeError
from pixelgate.gateway.wire import ChatRequest, ImagePart, Message, Part

_OVERHEAD = 100
_SHORT = 2000  # characters


class Reference(NamedTuple):
    """A picture as a request refers to it: where it stands there, its URL, and the client's own name for it.

    One of the two is given: a picture that was sent with its ``uuid`` before may be referred to by that alone.
    """

    param: str
    url: str | None
    uuid: str | None


def references(messages: Sequence[Message]) -> Iterator[Reference]:
    """Every picture, in the order in which the client wrote them."""
    for i, message in enumerate(messages):
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                if isinstance(part, ImagePart):
                    yield Reference(f"messages[{i}].content[{j}].image_url", part.url, part.uuid or None)


def check_texts(request: ChatRequest, most: int) -> None:
    """Raise TooLargeError if a request has more text than ``most`` characters.

    Rendering and encoding take a second and some hundred megabytes for a million characters.
    """
    if characters(request) > most:
        raise TooLargeError(f"the request has more text than the limit of {most} characters", param="messages")


def characters(request: ChatRequest) -> int:
    """How much text a request has; a message or part counts as 100 characters more."""
    found = sum(map(_characters, request.messages))
    return found + _characters_of([request.tools, request.chat_template_kwargs])


def is_short(request: ChatRequest) -> bool:
    """Whether its prompt is made within a millisecond: little text, and nothing that a template could spread out."""
    called = request.tools or request.chat_template_kwargs or any(message.tool_calls for message in request.messages)
    return not called and characters(request) <= _SHORT


def _characters(message: Message) -> int:
    parts = message.content if isinstance(message.content, list) else [message.content]
    texts = [part for part in parts if not isinstance(part, ImagePart)]
    fields = (message.name, message.tool_call_id, message.refusal, message.reasoning, message.reasoning_content)
    return (
        _OVERHEAD * (1 + len(parts))
        + sum(len(text if isinstance(text, str) else text.words) for text in texts if text is not None)
        + sum(len(text) for text in fields if text)
        + _characters_of(message.tool_calls)
    )


def _characters_of(value: Any) -> int:
    """Of JSON-like data; every value of a list or an object counts as a few more, and whole numbers as their digits."""
    total, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            total += sum(map(len, item)) + _OVERHEAD
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            total += 10 * len(item)
            pending.extend(item)
        elif isinstance(item, int):
            total += item.bit_length() // 3
    return total


def for_template(messages: Sequence[Message], *, developers: bool = False) -> list[dict[str, Any]]:
    """The messages as chat templates know them; ``developers`` says whether the template knows that role.

    Raises RequestError for tool calls that are not those of functions.
    """
    ready = [_for_template(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if developers or all(message.role != "developer" for message in messages):
        return ready
    return _with_one_system([{**m, "role": "system"} if m["role"] == "developer" else m for m in ready])


def _for_template(message: Message, param: str) -> dict[str, Any]:
    content: Any = message.content
    if isinstance(content, list):
        content = [_part(part) for part in content]
    calls = [_tool_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]
    reasoning = message.reasoning_content or message.reasoning
    if content is None and message.refusal:
        content = message.refusal
    fields = {
        "name": message.name,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
        "reasoning": reasoning,
        "reasoning_content": reasoning,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return {"role": message.role, "content": content, **given}


def _part(part: Part) -> dict[str, str]:
    return {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.words}


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One system message at the beginning, as vLLM does for templates that take it nowhere else.

    Where one has a picture they stay as they are, for the pictures must keep their order.
    """
    systems = [message for message in messages if message["role"] == "system"]
    if any(part["type"] == "image" for m in systems if isinstance(m["content"], list) for part in m["content"]):
        return messages
    if systems == messages[:1]:
        return messages
    texts = [m["content"] if isinstance(m["content"], str) else _lines(m["content"]) for m in systems]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _lines(parts: Sequence[Mapping[str, str]]) -> str:
    return "\n".join(part["text"] for part in parts)


def _tool_call(call: dict[str, Any], param: str) -> dict[str, Any]:
    """A tool call with its arguments parsed: clients send a JSON string, templates print an object.

    Arguments that are no JSON object were written by a model. As in vLLM they become an empty one: the turn stays in
    the client's history, and refusing it would end the conversation.
    """
    function = call.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{param}.function is missing", param=param)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}
