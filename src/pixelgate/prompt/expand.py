"""From messages to the prompt's token ids, with every image's placeholder replaced by that image's tokens.

A placeholder counts only where the chat template wrote it. What users type is text, whatever it looks like
(``pixelgate.prompt.origin`` tells the two apart).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pixelgate.errors import RequestError
from pixelgate.prompt.content import images_of, in_form, mark_end, without_images
from pixelgate.prompt.origin import break_specials, unused_marker, without_marker
from pixelgate.prompt.rules import Rules
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
    rules: Rules,
    *,
    expansions: Sequence[Sequence[int]],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """Render messages and encode them; image k of the messages becomes ``expansions[k]``.

    Messages are in the form templates know: ``content`` is a string or a list of ``{"type": "text", "text": ...}``
    and ``{"type": "image"}``. The caller has checked their roles: some templates make a special token of them.
    With ``continue_final_message`` the prompt ends where the text of the last message does.

    Raises RequestError if the template cannot render the messages, or loses, repeats or reorders an image, or if
    ``template_kwargs`` sets a name that is not the client's.
    """
    kwargs = dict(template_kwargs or {})
    if taken := template.reserved & kwargs.keys():
        raise RequestError(
            f"The chat template argument '{min(taken)}' cannot be set by a request.", param="chat_template_kwargs"
        )
    typed = [template.source, messages, tools, kwargs]
    marker = unused_marker(typed)
    images = len(expansions)
    messages, tools, kwargs = break_specials([messages, tools, kwargs], rules.guarded(tokenizer, images), marker)
    final = ""
    if continue_final_message:
        messages, final = mark_end(messages, end := unused_marker([*typed, marker]))

    def render(chosen: Sequence[Message]) -> list[str]:
        ready = in_form(chosen, template.form(rules.slots(1)), rules)
        text = template.render(ready, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs)
        if continue_final_message:
            text = _up_to(text, end, final)
        return rules.written(tokenizer, images).split(text)

    slots = rules.slots(images)
    roles = dict.fromkeys(message.get("role") for message in messages if images_of(message))
    try:
        pieces = render(messages)
    except RequestError as failure:
        for role in roles:
            if _renders(render, [without_images(m) if m.get("role") == role else m for m in messages]):
                raise _cannot_place(role) from failure
        raise
    if _count(pieces, slots) != images:
        for role in roles:
            chosen = [m if m.get("role") == role else without_images(m) for m in messages]
            if _count(render(chosen), slots) != sum(map(images_of, chosen)):
                raise _cannot_place(role)
    return _assembled(pieces, tokenizer, rules, marker, expansions)


def _assembled(
    pieces: Sequence[str], tokenizer: Tokenizer, rules: Rules, marker: str, expansions: Sequence[Sequence[int]]
) -> Prompt:
    """Encode a rendered prompt, cut into text and tokens alternately; ``marker`` breaks tokens that users typed."""
    slots = rules.slots(len(expansions))
    texts: list[list[str | int]] = [[]]  # what stands between images
    numbers: list[int] = []
    for i, piece in enumerate(pieces):
        if i % 2 and piece in slots:
            numbers.append(slots[piece])
            texts.append([])
        else:
            texts[-1].append(tokenizer.special_ids[piece] if i % 2 else without_marker(piece, marker))
    if len(numbers) != len(expansions):
        raise RequestError(
            f"The model's chat template writes {len(numbers)} image placeholders for {len(expansions)} images.",
            param="messages",
        )
    if any(number not in (0, place) for place, number in enumerate(numbers, 1)):
        raise RequestError("The model's chat template changes the order of the images.", param="messages")

    if rules.separate_texts and numbers:
        between = [[*tokenizer.framing[0], *tokenizer.encode(text)] for text in texts]
    else:
        between = _encoded_as_one(texts, tokenizer, rules)
    expanded = list(between[0])
    spans: list[tuple[int, int]] = []
    for expansion, ids in zip(expansions, between[1:], strict=True):
        spans.append((len(expanded), len(expansion)))
        expanded += expansion
        expanded += ids
    return Prompt(tuple(expanded), tuple(spans))


def _encoded_as_one(texts: Sequence[Sequence[str | int]], tokenizer: Tokenizer, rules: Rules) -> list[list[int]]:
    """The ids between images, encoded together: some vocabularies write a text otherwise at a prompt's beginning."""
    placeholder = tokenizer.special_ids[rules.placeholder]
    parts: list[str | int] = list(texts[0])
    for text in texts[1:]:
        parts += [placeholder, *text]
    ids = tokenizer.encode(parts)
    before, _ = tokenizer.framing
    if rules.bos == "transformers" and tuple(ids[:1]) != before[:1]:
        ids = [*before, *ids]
    places = [-1, *(i for i, id_ in enumerate(ids) if id_ == placeholder), len(ids)]
    return [ids[before + 1 : after] for before, after in pairwise(places)]


def _up_to(text: str, end: str, final: str) -> str:
    """``text`` up to the end of the final message, which a template may have trimmed."""
    at = text.rfind(end)
    if at < 0 or final.strip() not in text:
        raise RequestError("The model's chat template does not end with the final message.", param="messages")
    return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()


def _renders(render: Callable[[Sequence[Message]], object], messages: Sequence[Message]) -> bool:
    try:
        render(messages)
    except RequestError:
        return False
    return True


def _cannot_place(role: object) -> RequestError:
    return RequestError(
        f"The model's chat template cannot place images in messages of role '{role}'.", param="messages"
    )


def _count(pieces: Sequence[str], slots: Mapping[str, int]) -> int:
    return sum(piece in slots for piece in pieces[1::2])
