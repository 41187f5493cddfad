"""A model as the gateway serves it: processor, template, tokenizer and engines, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass

from pixelgate.engines.connect import begins_as_transformers, engine, takes_chat
from pixelgate.engines.discovery import Discovery
from pixelgate.engines.engine import Engine, EngineFacts
from pixelgate.engines.fleet import Fleet
from pixelgate.errors import CheckpointError, ConfigError
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.gateway.waiting import until_available
from pixelgate.models.checkpoint import Checkpoint
from pixelgate.processor import Processor, load
from pixelgate.prompt.rules import Bos, Rules, TypedSpecials
from pixelgate.prompt.template import ChatTemplate
from pixelgate.prompt.tokens import Tokenizer, open_tokenizer

_TEMPLATE_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class Prompting:
    """What makes prompts of messages."""

    template: ChatTemplate
    tool_template: ChatTemplate
    tokenizer: Tokenizer
    rules: Rules

    def template_for(self, tools: object) -> ChatTemplate:
        """The chat template of a request with, or without, tools."""
        return self.tool_template if tools else self.template


@dataclass(frozen=True)
class ServedModel(Prompting):
    """Everything that turns a chat request into an engine request and back."""

    name: str
    processor: Processor
    fleet: Fleet

    @property
    def facts(self) -> EngineFacts:
        """What the engines say of themselves now; they may say otherwise after the next connection."""
        return self.fleet.facts

    async def connect(self, wait: float) -> EngineFacts:
        """The engines' facts, waiting up to ``wait`` seconds for them to answer; refuses engines that do not fit."""
        facts = await until_available(self.fleet.connect, wait, f"engine of model {self.name!r}")
        check_model(self.name, facts, self.processor.checkpoint)
        return facts


def check_model(name: str, facts: EngineFacts, checkpoint: Checkpoint) -> None:
    """Raise ConfigError where the engines of model ``name`` serve another than that of ``checkpoint``."""
    for field in ("model_type", "vocab_size"):
        theirs, ours = getattr(facts, field), getattr(checkpoint, field)
        if theirs and ours and theirs != ours:
            raise ConfigError(
                f"the engines of model {name!r} serve {field} {theirs!r}, "
                f"but the checkpoint {checkpoint.path} is {ours!r}"
            )


def open_model(settings: ModelSettings, gateway: GatewaySettings) -> ServedModel:
    """Read a model's checkpoint and make its engines that take tensors; nothing is connected.

    Raises CheckpointError or ConfigError.
    """
    processor = load(
        settings.checkpoint,
        revision=settings.revision,
        backend=settings.backend,
        rgb=gateway.media.rgb,
        policy=gateway.media,
    ).with_options(**settings.mm_processor_kwargs)
    checkpoint = processor.checkpoint
    entries = [entry for entry in settings.engines if not takes_chat(entry)]
    theirs = begins_as_transformers(entries[0])
    bos: Bos = "transformers" if theirs else settings.bos
    prompting = open_prompting(processor, bos=bos, typed_specials=gateway.special_tokens_in_text)

    def build(url: str) -> Engine:
        if settings.bos == "engine" and begins_as_transformers(url) != theirs:
            raise ConfigError(
                f"{url} begins prompts otherwise than other engines of model {settings.name!r}: "
                'say how with bos = "transformers", or serve two models'
            )
        return engine(
            url,
            encode=prompting.tokenizer.encode_text,
            eos_token_id=next(iter(checkpoint.eos_token_ids), None),
            eos_token_ids=checkpoint.eos_token_ids,
            checkpoint=checkpoint.path,
            model_type=checkpoint.model_type,
            image_processor=checkpoint.image_processor,
            shm=gateway.shm == "auto",
            model=settings.engine_model,
            name=settings.name,
            headers=settings.headers(url),
        )

    discovery = Discovery(entries, build)
    find = None if discovery.fixed else discovery.look
    fleet = Fleet(discovery.engines, find=find, balance=settings.balance)
    return ServedModel(**vars(prompting), name=settings.name, processor=processor, fleet=fleet)


def open_prompting(processor: Processor, *, bos: Bos = "engine", typed_specials: TypedSpecials = "text") -> Prompting:
    """Read templates and tokenizer of a processor's checkpoint, and check that they fit. Raises CheckpointError."""
    checkpoint = processor.checkpoint
    named = {name: _token_text(checkpoint.tokenizer_config.get(name)) for name in _TEMPLATE_VARIABLES}
    variables = {name: text for name, text in named.items() if text}
    template, tool_template = (
        ChatTemplate(_source(checkpoint, with_tools=with_tools), variables) for with_tools in (False, True)
    )
    tokenizer = open_tokenizer(checkpoint.tokenizer_file)
    family = processor.family
    for token in (family.placeholder, *family.image_tokens):
        if token not in tokenizer.special_ids:
            raise CheckpointError(f"the tokenizer of {checkpoint.path} has no special token {token!r}")
    rules = Rules(
        placeholder=family.placeholder,
        in_text=family.in_text,
        image_tokens=family.image_tokens,
        separate_texts=family.separate_texts,
        bos=bos,
        typed_specials=typed_specials,
    )
    found = tokenizer.special_ids[family.embedded]
    if found != family.placeholder_id:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.path} gives {family.embedded!r} the id {found}, "
            f"but config.json says {family.placeholder_id}"
        )
    return Prompting(template, tool_template, tokenizer, rules)


def _source(checkpoint: Checkpoint, *, with_tools: bool) -> str:
    source = checkpoint.tool_template if with_tools else checkpoint.chat_template
    if source is None:
        raise CheckpointError(f"{checkpoint.path} has no chat template; chat requests cannot be rendered without one")
    return source


def _token_text(value: object) -> str | None:
    """A special token as tokenizer_config.json writes it: a string, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
