"""From messages to the prompt's token ids, with every image's placeholder replaced by that image's tokens.

A placeholder counts only where the chat template wrote it. What users type is text, whatever it looks like
(``pixelgate.prompt.origin`` tells the two apart).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pixelgate.errors import CheckpointError, RequestError
from pixelgate.prompt.origin import break_specials, unused_marker, without_marker
from pixelgate.prompt.template import ChatTemplate, Message
from pixelgate.prompt.tokens import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """Token ids, and for each image in prompt order the (offset, length) of its tokens in them."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...] = ()


def build(
    messages: Sequence[Message],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    placeholder: str,
    expansions: Sequence[Sequence[int]],
    add_generation_prompt: bool = True,
    tools: Sequence[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """Render messages and encode them; image k of the messages becomes ``expansions[k]``.

    Messages are in the form templates know: ``content`` is a string or a list of ``{"type": "text", "text": ...}``
    and ``{"type": "image"}``. The caller has checked their roles: some templates make a special token of them.
    ``placeholder`` is the special token that the template writes for an image.

    Raises RequestError if the template cannot render the messages, or loses or repeats an image, or if
    ``template_kwargs`` sets a name that is not the client's; CheckpointError if ``placeholder`` is not a special token.
    """
    if placeholder not in tokenizer.special_ids:
        raise CheckpointError(f"The image placeholder {placeholder!r} is not a special token of the tokenizer.")
    kwargs = dict(template_kwargs or {})
    if taken := template.reserved & kwargs.keys():
        raise RequestError(
            f"The chat template argument '{min(taken)}' cannot be set by a request.", param="chat_template_kwargs"
        )
    marker = unused_marker([template.source, messages, tools, kwargs])
    messages, tools, kwargs = break_specials([messages, tools, kwargs], tokenizer.specials, marker)

    def render(chosen: Sequence[Message]) -> str:
        ready = [_in_form(message, template, placeholder) for message in chosen]
        return template.render(ready, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs)

    rendered = render(messages)
    if _count(rendered, tokenizer, placeholder) != len(expansions):
        for role in dict.fromkeys(message.get("role") for message in messages):
            chosen = [m if m.get("role") == role else _without_images(m) for m in messages]
            if _count(render(chosen), tokenizer, placeholder) != sum(map(_images, chosen)):
                raise RequestError(
                    f"The model's chat template cannot place images in messages of role '{role}'.", param="messages"
                )
    return assemble(rendered, tokenizer, marker=marker, placeholder=placeholder, expansions=expansions)


def assemble(
    rendered: str,
    tokenizer: Tokenizer,
    *,
    marker: str,
    placeholder: str,
    expansions: Sequence[Sequence[int]],
) -> Prompt:
    """Encode a rendered prompt in which ``marker`` breaks the special tokens that users typed.

    The k-th whole ``placeholder`` becomes ``expansions[k]``. Raises RequestError if there are more or fewer.
    """
    pieces = tokenizer.specials.split(rendered)
    ids = tokenizer.encode(
        tokenizer.special_ids[piece] if i % 2 else without_marker(piece, marker) for i, piece in enumerate(pieces)
    )
    placeholder_id = tokenizer.special_ids[placeholder]
    places = [i for i, id_ in enumerate(ids) if id_ == placeholder_id]
    if len(places) != len(expansions):
        raise RequestError(
            f"The model's chat template writes {len(places)} image placeholders for {len(expansions)} images.",
            param="messages",
        )
    expanded: list[int] = []
    spans: list[tuple[int, int]] = []
    start = 0
    for place, expansion in zip(places, expansions, strict=True):
        expanded += ids[start:place]
        spans.append((len(expanded), len(expansion)))
        expanded += expansion
        start = place + 1
    expanded += ids[start:]
    return Prompt(tuple(expanded), tuple(spans))


def _in_form(message: Message, template: ChatTemplate, placeholder: str) -> Message:
    """The message with its content in the form that the template writes: a list of parts or one string."""
    # A key without a value is left out, as transformers does: templates test for the key, and would print "None".
    message = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list) and not template.takes_parts(placeholder):
        message["content"] = "".join([_text(part, placeholder) for part in content])
    elif isinstance(content, str) and template.takes_parts(placeholder) and not template.takes_strings:
        message["content"] = [{"type": "text", "text": content}]
    return message


def _text(part: Mapping[str, Any], placeholder: str) -> str:
    if part.get("type") == "image":
        return placeholder
    if isinstance(text := part.get("text"), str):
        return text
    raise RequestError("A content part is neither text nor an image.", param="messages")


def _images(message: Message) -> int:
    content = message.get("content")
    return sum(part.get("type") == "image" for part in content) if isinstance(content, list) else 0


def _without_images(message: Message) -> Message:
    if not _images(message):
        return message
    return {**message, "content": [part for part in message["content"] if part.get("type") != "image"]}


def _count(rendered: str, tokenizer: Tokenizer, placeholder: str) -> int:
    return tokenizer.specials.split(rendered)[1::2].count(placeholder)
