"""A checkpoint directory, read strictly: every field is honoured or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pixelgate.errors import CheckpointError

FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
ADDITIONAL_TEMPLATES = "additional_chat_templates"
"""All that is read of a checkpoint, and a folder of further chat templates, *.jinja. No weights."""

_MISSING = object()
_MAX_JSON_BYTES = 64 << 20
_MAX_COUNT = 1 << 40
_MAX_NUMBER = 1e30

IMAGE_SETTINGS = "the image processor's configuration"


@dataclass(frozen=True)
class Checkpoint:
    """The files of a checkpoint that decide what its pictures and prompts become. No weights are needed.

    ``preprocessor`` is the ``image_processor`` section of ``processor_config.json``, where newer transformers versions
    keep it and look first, or ``preprocessor_config.json``; ``tool_template`` is the chat template of requests with
    tools; ``options`` are a call's, and stand in for fields of it.
    """

    path: Path
    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    processor: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    chat_template: str | None
    tool_template: str | None
    options: Mapping[str, Any] = field(default_factory=dict)

    def with_options(self, options: Mapping[str, Any]) -> Checkpoint:
        """The same with a call's options, as transformers takes a call's arguments for the processor's own.

        Earlier ones count as the checkpoint's.
        """
        return replace(self, preprocessor={**self.preprocessor, **self.options}, options=deepcopy(dict(options)))

    def image_settings(self, *, with_options: bool = True) -> Settings:
        """The settings of the image processor."""
        return Settings({**self.preprocessor, **(self.options if with_options else {})}, IMAGE_SETTINGS)

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of config.json, empty where there is none. Raises CheckpointError if it is no object."""
        value = self.config.get(name)
        if not isinstance(value, dict | None):
            raise CheckpointError(f"{name} of config.json must be an object, not {value!r:.80}")
        return value or {}

    @property
    def model_type(self) -> str:
        """``model_type`` of config.json, by which transformers chooses the model."""
        return str(self.config.get("model_type", ""))

    @property
    def image_processor(self) -> str:
        """The image processor's class, without the suffix of an older torchvision backend."""
        return str(self.preprocessor.get("image_processor_type", "")).removesuffix("Fast")

    @property
    def image_token_id(self) -> int:
        """The id that stands for pictures, in either spelling of config.json. Raises CheckpointError."""
        settings = Settings(self.config, "config.json")
        older: int = settings.take("image_token_index", int, -1)
        found: int = settings.take("image_token_id", int, older)
        if found < 0:
            raise CheckpointError("config.json has no image_token_id")
        return found

    def image_token(self, default: str) -> str:
        """The token that a chat template writes for a picture, from processor_config.json."""
        return str(self.processor.get("image_token", default))

    @property
    def vocab_size(self) -> int | None:
        """Rows of the model's embedding, where config.json says it."""
        found = self.section("text_config").get("vocab_size", self.config.get("vocab_size"))
        return found if isinstance(found, int) else None

    @property
    def tokenizer_file(self) -> Path:
        """``tokenizer.json``, or ``tekken.json`` where there is none. Raises CheckpointError when neither is there."""
        for name in ("tokenizer.json", "tekken.json"):
            if (self.path / name).is_file():
                return self.path / name
        raise CheckpointError(f"{self.path} has no tokenizer.json; prompts cannot be tokenised without it")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, from generation_config.json or config.json."""
        value = self.generation.get("eos_token_id", self.config.get("eos_token_id"))
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (int(value),)


def read(path: str | Path) -> Checkpoint:
    """Read a checkpoint directory. Raises CheckpointError naming the file or field that is missing or malformed."""
    path = Path(path)
    if not _is_directory(path):
        raise CheckpointError(
            f"{path} is not a directory; give the folder that holds the checkpoint's config.json, "
            "or a hub id such as Qwen/Qwen2.5-VL-7B-Instruct"
        )
    config = _object(path / "config.json")
    processor = _object(path / "processor_config.json", optional=True)
    preprocessor = processor.get("image_processor")
    if preprocessor is None:
        preprocessor = _object(path / "preprocessor_config.json", optional=True)
    if not isinstance(preprocessor, dict):
        raise CheckpointError(f"image_processor of {path / 'processor_config.json'} is no object")
    if not preprocessor:
        raise CheckpointError(
            f"{path} has no preprocessor_config.json, and no image_processor in processor_config.json"
        )
    tokenizer_config = _object(path / "tokenizer_config.json", optional=True)
    chat_template, tool_template = _chat_templates(path, processor, tokenizer_config)
    return Checkpoint(
        path=path,
        config=config,
        preprocessor=preprocessor,
        processor=processor,
        generation=_object(path / "generation_config.json", optional=True),
        tokenizer_config=tokenizer_config,
        chat_template=chat_template,
        tool_template=tool_template,
    )


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name too long, or one with a zero in it
        return False


def _object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_JSON_BYTES >> 20} MiB; that is no configuration")
        value = json.loads(path.read_text("utf-8"))
    except OSError as failure:
        raise CheckpointError(f"{path} cannot be read: {failure.strerror}") from None
    except (ValueError, RecursionError) as failure:
        raise CheckpointError(f"{path} is not valid JSON: {failure}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _chat_templates(
    path: Path, processor: Mapping[str, Any], tokenizer: Mapping[str, Any]
) -> tuple[str | None, str | None]:
    """The chat template without tools, and the one with tools.

    transformers' processor has one template; its tokenizer may have several by name, and takes the one for tools where
    there are tools. Engines ask the processor first, but with tools the tokenizer alone if it has any.
    """
    files = {file.stem: _text(file) for file in sorted((path / ADDITIONAL_TEMPLATES).glob("*.jinja"))}
    if (file := path / "chat_template.jinja").is_file():
        files["default"] = _text(file)
    older = _named(_object(path / "chat_template.json", optional=True).get("chat_template"), path)
    of_processor = _named(processor.get("chat_template"), path) or older or files
    of_tokenizer = files or _named(tokenizer.get("chat_template"), path)
    plain = of_processor.get("default", of_tokenizer.get("default"))
    return plain, of_tokenizer.get("tool_use", of_tokenizer.get("default", plain))


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} is not text in UTF-8") from None


def _named(value: Any, path: Path) -> dict[str, str]:
    """Chat templates by name: one is the default; several are a list of objects, or an object."""
    if value is None:
        return {}
    named = {"default": value} if isinstance(value, str) else value
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        named = {item.get("name"): item.get("template") for item in value}
    if not isinstance(named, dict) or not all(isinstance(text, str) for item in named.items() for text in item):
        raise CheckpointError(f"{path} has a chat template that is neither a text nor several texts by name")
    return named


def is_number(value: object) -> bool:
    """Whether it is a number that float32 can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER


class Settings:
    """Reads fields by name and type, and in the end refuses whatever was not asked for."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._left = dict(values)
        self._source = source

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = _MISSING) -> Any:
        """The value of ``name``, checked to be a ``kind``."""
        value = self._left.pop(name, default)
        if value is _MISSING:
            raise CheckpointError(f"{self._source} has no {name}")
        if value is default:
            return value
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(k.__name__ for k in kinds)
            raise CheckpointError(f"{name} of {self._source} must be {expected}, not {value!r}")
        return value

    def nullable(self, *names: str) -> None:
        """Take null for missing, which it is not everywhere: transformers takes a switch that is null for off."""
        for name in names:
            if name in self._left and self._left[name] is None:
                del self._left[name]

    def switch(self, name: str) -> bool:
        """Whether something that is done by default is done."""
        value: bool = self.take(name, bool, True)
        return value

    def is_number(self, name: str) -> bool:
        """Whether ``name`` is spelled as a single number."""
        return isinstance(self._left.get(name), int)

    def expect(self, name: str, *allowed: Any) -> None:
        """Accept ``name`` only where it is absent or has an ``allowed`` value: others would change the numbers."""
        value = self._left.pop(name, allowed[0])
        if value not in allowed:
            raise CheckpointError(f"{name}={value!r} of {self._source} is not supported")

    def count(self, name: str, default: Any = _MISSING, *, most: int = _MAX_COUNT) -> int:
        """A positive whole number."""
        value: int = self.take(name, int, default)
        if not 1 <= value <= most:
            raise CheckpointError(f"{name} of {self._source} must be from 1 to {most}, not {value}")
        return value

    def size(self, name: str, default: int) -> tuple[int, int]:
        """(height, width): a number for both, or a mapping."""
        value = self.take(name, (int, dict), default)
        if isinstance(value, int):
            value = {"height": value, "width": value}
        sides = Settings(value, f"{name} of {self._source}")
        found = sides.count("height"), sides.count("width")
        sides.finish()
        return found

    def triple(self, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        """One float per colour channel."""
        value = self.take(name, (list, tuple), default)
        if len(value) != 3 or not all(is_number(v) for v in value):
            raise CheckpointError(f"{name} of {self._source} must be three numbers, not {value!r}")
        red, green, blue = (float(v) for v in value)
        return red, green, blue

    def ignore(self, *names: str) -> None:
        """Drop fields that do not change any number."""
        for name in names:
            self._left.pop(name, None)

    def finish(self) -> None:
        """Raise CheckpointError if a field was neither taken nor ignored."""
        left = sorted(name for name, value in self._left.items() if value is not None)
        if left:
            names = ", ".join(left)
            raise CheckpointError(f"{self._source} has settings that are not supported: {names}")
