"""The content of messages in the form that a chat template takes: lists of parts, or strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pixelgate.errors import RequestError
from pixelgate.prompt.rules import Rules
from pixelgate.prompt.template import Form, Message


def in_form(messages: Sequence[Message], form: Form, rules: Rules) -> list[Message]:
    """The messages as the template takes them; in strings, images stand where their parts stood."""
    ready: list[Message] = []
    number = 1
    for message in messages:
        # A key without a value is left out, as transformers does: templates test for the key, and would print "None".
        given = {key: value for key, value in message.items() if value is not None}
        images = images_of(message)
        content = given.get("content")
        if not form.parts:
            given["content"] = _as_string(content or "", rules, number)
        elif isinstance(content, str) and not form.strings:
            given["content"] = [_text_part(content, form)]
        elif isinstance(content, list) and form.strings and not images:
            # What a template makes of such a list is the texts one after the other, if it takes it at all. An engine
            # gives templates the lines of a tool's answer.
            given["content"] = ("\n" if given.get("role") == "tool" else "").join(map(_text, content))
        elif isinstance(content, list):
            given["content"] = [part if _is_image(part) else _text_part(_text(part), form) for part in content]
        number += images
        ready.append(given)
    return ready


def mark_end(messages: Sequence[Message], end: str) -> tuple[list[Message], str]:
    """The messages with ``end`` and a space behind the last text of the last one, and that text.

    Templates that trim texts take the space away, which tells them from the others.
    Raises RequestError where there is no text to be continued.
    """
    *others, last = messages
    content: Any = last.get("content")
    if isinstance(content, str):
        return [*others, {**last, "content": f"{content}{end} "}], content
    for place, part in reversed(list(enumerate(content or ()))):
        if not _is_image(part):
            text = _text(part)
            marked = [*content[:place], {**part, "text": f"{text}{end} "}, *content[place + 1 :]]
            return [*others, {**last, "content": marked}], text
    raise RequestError("The final message has no text that could be continued.", param="messages")


def images_of(message: Message) -> int:
    """How many images a message has."""
    content = message.get("content")
    return sum(map(_is_image, content)) if isinstance(content, list) else 0


def without_images(message: Message) -> Message:
    """The message with nothing but its texts."""
    if not images_of(message):
        return message
    return {**message, "content": [part for part in message["content"] if not _is_image(part)]}


def _as_string(content: str | list[Mapping[str, Any]], rules: Rules, number: int) -> str:
    """Parts as lines, which is how engines write them and what the models' own examples look like."""
    if isinstance(content, str):
        return content
    lines = []
    for part in content:
        if _is_image(part):
            lines.append(rules.text(number))
            number += 1
        else:
            lines.append(_text(part))
    return "\n".join(lines)


def _text_part(text: str, form: Form) -> dict[str, str]:
    return {"type": "text", **dict.fromkeys(form.text_keys, text)}


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image"


def _text(part: Mapping[str, Any]) -> str:
    if isinstance(text := part.get("text"), str):
        return text
    raise RequestError("A content part is neither text nor an image.", param="messages")
