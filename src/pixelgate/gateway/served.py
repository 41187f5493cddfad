"""A model as the gateway serves it: processor, template, tokenizer and engines, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass

from pixelgate.engines.connect import engine
from pixelgate.engines.engine import EngineFacts
from pixelgate.engines.fleet import Fleet
from pixelgate.errors import CheckpointError, ConfigError
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.gateway.waiting import until_available
from pixelgate.models import qwen_vl
from pixelgate.processor import Processor, load
from pixelgate.prompt.template import ChatTemplate
from pixelgate.prompt.tokens import Tokenizer, open_tokenizer

_TEMPLATE_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class Prompting:
    """What makes prompts of messages."""

    template: ChatTemplate
    tokenizer: Tokenizer


@dataclass(frozen=True)
class ServedModel(Prompting):
    """Everything that turns a chat request into an engine request and back."""

    name: str
    processor: Processor
    fleet: Fleet

    async def connect(self, wait: float) -> EngineFacts:
        """The engines' facts, waiting up to ``wait`` seconds for them to answer; refuses engines that do not fit."""
        facts = await until_available(self.fleet.connect, wait, f"engine of model {self.name!r}")
        ours = self.processor.checkpoint.model_type
        if facts.model_type and facts.model_type != ours:
            raise ConfigError(
                f"the engines of model {self.name!r} serve model_type {facts.model_type!r}, "
                f"but the checkpoint {self.processor.checkpoint.path} is {ours!r}"
            )
        return facts


def open_model(settings: ModelSettings, gateway: GatewaySettings) -> ServedModel:
    """Read a model's checkpoint and make its engines; nothing is connected. Raises CheckpointError or ConfigError."""
    processor = load(
        settings.checkpoint,
        revision=settings.revision,
        backend=settings.backend,
        rgb=gateway.media.rgb,
        policy=gateway.media,
    ).with_options(**settings.mm_processor_kwargs)
    checkpoint = processor.checkpoint
    prompting = open_prompting(processor)
    engines = [
        engine(
            url,
            encode=prompting.tokenizer.encode_text,
            eos_token_id=next(iter(checkpoint.eos_token_ids), None),
            model_type=checkpoint.model_type,
        )
        for url in settings.engines
    ]
    return ServedModel(**vars(prompting), name=settings.name, processor=processor, fleet=Fleet(engines))


def open_prompting(processor: Processor) -> Prompting:
    """Read template and tokenizer of a processor's checkpoint, and check that they fit. Raises CheckpointError."""
    checkpoint = processor.checkpoint
    if checkpoint.model_type not in qwen_vl.MODEL_TYPES:
        raise ConfigError(
            f"{checkpoint.path} is a {checkpoint.model_type!r}: the library prepares its pictures, but the gateway "
            f"serves only {', '.join(qwen_vl.MODEL_TYPES)} so far"
        )
    if checkpoint.chat_template is None:
        raise CheckpointError(f"{checkpoint.path} has no chat template; chat requests cannot be rendered without one")
    variables = {name: _token_text(checkpoint.tokenizer_config.get(name)) for name in _TEMPLATE_VARIABLES}
    template = ChatTemplate(checkpoint.chat_template, {name: text for name, text in variables.items() if text})
    tokenizer = open_tokenizer(checkpoint.tokenizer_file)
    family = processor.family
    for token in (family.placeholder, family.embedded):
        if token not in tokenizer.special_ids:
            raise CheckpointError(f"the tokenizer of {checkpoint.path} has no special token {token!r}")
    found = tokenizer.special_ids[family.embedded]
    if found != family.placeholder_id:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.path} gives {family.embedded!r} the id {found}, "
            f"but config.json says {family.placeholder_id}"
        )
    return Prompting(template, tokenizer)


def _token_text(value: object) -> str | None:
    """A special token as tokenizer_config.json writes it: a string, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
