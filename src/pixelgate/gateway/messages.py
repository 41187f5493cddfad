"""From the messages of a request to what the prompt room and the media room want."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pixelgate.errors import RequestError
from pixelgate.gateway.wire import ImagePart, Message


def references(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """(param, URL) of every picture, in the order in which the client wrote them."""
    for i, message in enumerate(messages):
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                if isinstance(part, ImagePart):
                    yield f"messages[{i}].content[{j}].image_url", part.url


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates know them. Raises RequestError for tool arguments that are not JSON."""
    return [_for_template(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _for_template(message: Message, param: str) -> dict[str, Any]:
    content: Any = message.content
    if isinstance(content, list):
        content = [{"type": "image"} if isinstance(p, ImagePart) else {"type": "text", "text": p.text} for p in content]
    # OpenAI's newer name for the system role, which templates do not know
    role = "system" if message.role == "developer" else message.role
    calls = [_tool_call(call, param) for call in message.tool_calls or ()]
    fields = {"name": message.name, "tool_calls": calls or None, "tool_call_id": message.tool_call_id}
    return {"role": role, "content": content, **{name: value for name, value in fields.items() if value is not None}}


def _tool_call(call: dict[str, Any], param: str) -> dict[str, Any]:
    """A tool call with its arguments parsed: clients send a JSON string, templates print an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        raise RequestError("the arguments of a tool call are not valid JSON", param=f"{param}.tool_calls") from None
    return {**call, "function": {**function, "arguments": arguments}}
