"""Chat templates: the checkpoint's own Jinja text turns messages into the prompt string.

The environment has what transformers gives a template, so that a template written for it renders the same here:
an immutable sandbox, trimmed blocks, ``break`` and ``continue``, ``tojson`` without HTML escapes,
``raise_exception``, ``strftime_now`` and the ``generation`` tag (which marks answers for training and prints its body).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pixelgate.errors import CheckpointError, RequestError

Message = Mapping[str, Any]

_SHOWN = 300
_PROBE = "pixelgate"
# What is rendered and with what, whatever library's name for it; the environment's own names are added to them.
NOT_THE_CLIENTS = (
    "messages",
    "conversation",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)


@dataclass(frozen=True)
class Form:
    """The form in which a template takes the content of a message.

    ``parts``: it writes a placeholder for an image in a list of parts. ``strings``: it writes plain strings, and as it
    writes them in parts if it takes both. ``text_keys``: where it looks for the text of a part.
    """

    parts: bool
    strings: bool
    text_keys: tuple[str, ...] = ("text",)


class ChatTemplate:
    """A compiled chat template.

    ``variables`` are names every rendering sees beside the messages, such as ``bos_token`` and ``eos_token``.
    Raises CheckpointError if the source is not a valid template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})
        self._forms: dict[tuple[str, ...], Form] = {}
        try:
            self._template = _environment().from_string(source)
        except (TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f" (line {line})" if line else ""
            raise CheckpointError(f"The chat template is not valid Jinja{where}.") from error

    @property
    def reserved(self) -> frozenset[str]:
        """Names that belong to the gateway and the checkpoint: a client's template arguments may not use them."""
        return frozenset({*NOT_THE_CLIENTS, *self._variables, *self._template.globals})

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render the prompt string. ``kwargs`` are the template's own switches, such as ``enable_thinking``.

        Raises RequestError if the template refuses the messages or fails on them.
        """
        names = {"documents": None, **self._variables, **kwargs}
        names |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(names)
        except _RaisedByTemplateError as error:
            wording = str(error)[:_SHOWN]
            raise RequestError(
                f"The model's chat template refuses the messages: {wording}", param="messages"
            ) from error
        except Exception as error:  # a template is a program: on unforeseen messages it can fail in any way
            raise RequestError(
                "The model's chat template cannot render these messages; it may not know a role, a content type or "
                "a field they use.",
                param="messages",
            ) from error

    @property
    def knows_developers(self) -> bool:
        """Whether messages of the role "developer" are something else to it than a mistake."""
        return "'developer'" in self.source or '"developer"' in self.source

    def form(self, slots: Iterable[str]) -> Form:
        """The form of content, found out by rendering some; ``slots`` are the texts that may stand for an image."""
        slots = tuple(slots)
        if slots not in self._forms:
            self._forms[slots] = self._probed(slots)
        return self._forms[slots]

    def _probed(self, slots: tuple[str, ...]) -> Form:
        alone = self._shown(_PROBE)
        image, text = {"type": "image"}, {"type": "text", "text": _PROBE}
        if not any(slot in self._shown([image, text]) for slot in slots):
            return Form(parts=False, strings=_PROBE in alone)
        # Some look for the text under the name "content", and would leave it out without a word.
        for keys in (("text",), ("text", "content")):
            shown = self._shown([text | dict.fromkeys(keys, _PROBE)])
            if _PROBE in shown:
                return Form(parts=True, strings=shown == alone, text_keys=keys)
        return Form(parts=True, strings=_PROBE in alone)

    def _shown(self, content: Any) -> str:
        try:
            return self.render([{"role": "user", "content": content}])
        except RequestError:
            return ""


class _RaisedByTemplateError(TemplateError):
    """``raise_exception`` was called: the message is the checkpoint's own wording for the user."""


class _GenerationTag(Extension):
    """``{% generation %}`` marks an answer for training. Here it only prints its body, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        """Read up to ``{% endgeneration %}``."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _RaisedByTemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
