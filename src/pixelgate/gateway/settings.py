"""What the operator configures: from a TOML file or from the command line, checked before anything starts."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args

from pixelgate.errors import ConfigError
from pixelgate.media.policy import MediaPolicy
from pixelgate.models import hub
from pixelgate.models.steps import Backend

MIB = 1 << 20


@dataclass(frozen=True)
class ModelSettings:
    """One ``[[model]]`` table: a name that clients use, a checkpoint (directory or hub id), and its engines.

    The name is by default the directory's, or the id. Without a checkpoint both are asked of the engines.
    """

    checkpoint: str = ""
    engines: tuple[str, ...] = ()
    name: str = ""
    backend: Backend = "torchvision"
    mm_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the processor for every request, which may have its own on top."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""

    def __post_init__(self) -> None:
        if not self.engines:
            raise ConfigError("a model needs at least one engine: --engine URL, or engines in the file")
        if self.backend not in get_args(Backend):
            raise ConfigError(f"backend must be one of {', '.join(get_args(Backend))}, not {self.backend!r}")
        if self.revision is not None and not self.checkpoint:
            raise ConfigError("a revision goes with a hub id; there is no checkpoint")
        if self.checkpoint and not self.name:
            name = self.checkpoint if hub.is_id(self.checkpoint) else Path(self.checkpoint).resolve().name
            object.__setattr__(self, "name", name)


@dataclass(frozen=True)
class GatewaySettings:
    """All limits of the gateway but those of pictures, which are in ``media``."""

    models: tuple[ModelSettings, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    media: MediaPolicy = field(default_factory=MediaPolicy)

    max_body_bytes: int = 64 * MIB
    """Largest request body: pictures as data URLs are a third larger than their files."""

    max_tensor_bytes: int = 1024 * MIB
    """Largest pixel tensors of one request together, known from the headers before any pixel is decoded."""

    trust_request_mm_kwargs: bool = False
    """Whether a request may set options of the processor, and with them how much work a picture makes."""

    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Threads that decode and preprocess pictures. Default: the cores this process may use."""

    buffer_bytes: int = 256 * MIB
    """Tensor memory kept for the next request."""

    engine_wait: float = 60.0
    """Seconds to wait at start-up for the engines to answer."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("no model is configured; give a checkpoint with --engine, or a [[model]] table")
        refuse_same_names([model.name for model in self.models if model.name])
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, not {self.port}")
        for name in ("max_body_bytes", "max_tensor_bytes", "workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.buffer_bytes < 0:
            raise ConfigError(f"buffer_bytes must not be negative, not {self.buffer_bytes}")
        if not 0 <= self.engine_wait < math.inf:
            raise ConfigError(f"engine_wait must be a number of seconds, not {self.engine_wait}")


def refuse_same_names(names: Sequence[str]) -> None:
    """Raise ConfigError where clients could not tell two models apart."""
    if len(set(names)) != len(names):
        raise ConfigError(f"two models have the same name: {', '.join(names)}")


def read(path: str | Path) -> GatewaySettings:
    """Read a configuration file. Raises ConfigError that names the file and the setting."""
    try:
        values = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as failure:
        raise ConfigError(f"{path} cannot be read: {failure.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        raise ConfigError(f"{path} is not valid TOML: {failure}") from None
    try:
        models = values.pop("model", [])
        if not isinstance(models, list) or "models" in values:
            raise ConfigError("models are written as [[model]] tables")
        return _build(
            GatewaySettings,
            {
                **values,
                "models": tuple(_build(ModelSettings, model, "[[model]]") for model in models),
                "media": _build(MediaPolicy, values.pop("media", {}), "[media]"),
            },
            "the configuration",
        )
    except ConfigError as failure:
        raise ConfigError(f"{path}: {failure.message}") from None


_T = TypeVar("_T", GatewaySettings, ModelSettings, MediaPolicy)


def _build(kind: type[_T], values: Any, where: str) -> _T:
    """A dataclass from a table, refusing unknown names and wrong types in the user's terms."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a table")
    known = {f.name: f for f in fields(kind)}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{where} has no setting {name!r}; it knows {', '.join(known)}")
        if (expected := _misfit(str(known[name].type), value)) is not None:
            raise ConfigError(f"{name} in {where} must be {expected}, not {value!r}")
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return kind(**arguments)


def _misfit(kind: str, value: Any) -> str | None:
    """What a setting of type ``kind`` must be, where ``value`` is not that. Other types are their class's to check."""
    match kind:
        case "int" if not isinstance(value, int) or isinstance(value, bool):
            return "a whole number"
        case "float" if not isinstance(value, int | float) or isinstance(value, bool):
            return "a number"
        case "bool" if not isinstance(value, bool):
            return "true or false"
        case "str" | "str | None" if not isinstance(value, str):
            return "a string"
        case "dict[str, Any]" if not isinstance(value, dict):
            return "a table"
        case "tuple[str, ...]" if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            return "a list of strings"
    return None
