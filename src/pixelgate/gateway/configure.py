"""How the settings are said: by flag, environment or file, in this order, else by default.

The rule is the same for every field of ``GatewaySettings`` and ``MediaPolicy``, and made from the field: its flag, its
variable, and its place in the file. So a new field needs nothing here.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from pixelgate.errors import ConfigError
from pixelgate.gateway.environment import refuse_unknown
from pixelgate.gateway.explained import explanations
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.media.policy import MediaPolicy

# Names that read better than what the rule would give.
_FLAGS = {"api_keys": "--api-key", "trusted_proxies": "--trusted-proxy", "egress_proxy": "--egress-proxy"}
_VARIABLES = {"api_keys": "PIXELGATE_API_KEY"}
_EMPTY_LIST = "none"
_TABLES = ("models", "media")  # not values, and said otherwise

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "tuple[str, ...]": "a list of strings",
    "dict[str, Any]": "a table",
}
_METAVARS = {"int": "N", "float": "SECONDS", "trace_sample": "SHARE"}


@dataclass(frozen=True)
class Setting:
    """One field of a settings class, and its names."""

    section: type
    field: Field[Any]

    @property
    def name(self) -> str:
        """The field's name, and the file's."""
        return self.field.name

    @property
    def kind(self) -> str:
        """The field's type, without None. What is not in ``_WORDS`` is text, for the class to check."""
        return str(self.field.type).removesuffix(" | None")

    @property
    def flag(self) -> str:
        """The command line's option; one that takes a list may be given several times."""
        prefix = "--media-" if self.section is MediaPolicy else "--"
        return _FLAGS.get(self.name) or prefix + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment's variable. Not PIXELGATE_PORT: Kubernetes sets that for a service named pixelgate."""
        prefix = "PIXELGATE_MEDIA_" if self.section is MediaPolicy else "PIXELGATE_SERVE_"
        return _VARIABLES.get(self.name) or prefix + self.name.upper()

    @property
    def default(self) -> Any:
        """The value that is used where nobody says one."""
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()

    @property
    def explanation(self) -> str:
        """What it is for, in the words of its class."""
        return explanations(self.section)[self.name]

    def refuse(self, where: str, value: Any) -> ConfigError:
        """The error of a value of another type, which is shown unless it is a secret."""
        shown = f", not {value!r}" if self.field.repr else ""
        return ConfigError(f"{where} must be {_WORDS[self.kind]}{shown}")

    def from_text(self, text: str, where: str) -> Any:
        """The value that ``text`` means. Raises ConfigError that begins with ``where``."""
        # An empty variable is one that did not arrive. An empty secret must not open the gateway.
        if not text:
            raise ConfigError(f"{where} is empty; leave it out for the default")
        try:
            match self.kind:
                case "int":
                    return int(text)
                case "float":
                    return float(text)
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "tuple[str, ...]":
                    if text == _EMPTY_LIST:
                        return ()
                    return (text,) if self.name == "api_keys" else tuple(text.split(","))
        except (ValueError, KeyError):
            raise self.refuse(where, text) from None
        return text


def settings() -> Iterator[Setting]:
    """Every setting there is."""
    for section in (GatewaySettings, MediaPolicy):
        for each in fields(section):
            if each.name not in _TABLES:
                yield Setting(section, each)


class Explaining(argparse.HelpFormatter):
    """Puts what a setting is for before its default; only for a help that is printed is the source read."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        setting = next((each for each in settings() if each.flag == action.dest), None)
        if setting is None:
            return action.help
        return f"{setting.explanation} ({action.help})".replace("``", "").replace("%", "%%")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One option for every setting. Their help is that of a parser whose formatter is `Explaining`."""
    groups = {
        GatewaySettings: parser.add_argument_group("settings of the gateway", "more in docs/gateway.md"),
        MediaPolicy: parser.add_argument_group("pictures", "more in docs/gateway.md"),
    }
    for setting in settings():
        group, default = groups[setting.section], setting.default
        if setting.kind == "bool":
            group.add_argument(
                setting.flag, dest=setting.flag, action=argparse.BooleanOptionalAction, help=f"default: {default}"
            )
            continue
        several = setting.kind == "tuple[str, ...]"
        shown = ", ".join(default) if several else default
        if shown in ("", None):
            shown = "none"
        group.add_argument(
            setting.flag,
            dest=setting.flag,
            action="append" if several else "store",
            metavar=_METAVARS.get(setting.name) or _METAVARS.get(setting.kind, "TEXT"),
            help=f"default: {shown}",
        )


@dataclass
class _Values:
    """Values by field, and who said each."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: Any, origin: str) -> None:
        """Keep a value; a later one replaces it."""
        self.values[name] = value
        self.origins[name] = origin


def configure(
    *,
    file: str | Path | None = None,
    models: tuple[ModelSettings, ...] = (),
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> GatewaySettings:
    """The settings, with ``models`` or those of ``file``. ``flags`` are the parsed options of `add_flags`.

    Raises ConfigError that names the flag, the variable or the file with the mistake.
    """
    found: dict[type, _Values] = {GatewaySettings: _Values(), MediaPolicy: _Values()}
    refuse_unknown(environment or {}, [setting.variable for setting in settings()])
    if file is not None:
        models = _read(file, found)
    for setting in settings():
        values = found[setting.section]
        if (text := (environment or {}).get(setting.variable)) is not None:
            values.add(setting.name, setting.from_text(text, setting.variable), setting.variable)
        if (given := (flags or {}).get(setting.flag)) is not None:
            if given == [""]:
                raise ConfigError(f"{setting.flag} is empty; leave it out for the default")
            if isinstance(given, str):
                given = setting.from_text(given, setting.flag)
            if isinstance(given, list):
                given = () if given == [_EMPTY_LIST] else tuple(given)
            values.add(setting.name, given, setting.flag)
    media = _make(MediaPolicy, found[MediaPolicy], file)
    found[GatewaySettings].values |= {"models": models, "media": media}
    return _make(GatewaySettings, found[GatewaySettings], file)


_T = TypeVar("_T", GatewaySettings, MediaPolicy, ModelSettings)


def _make(kind: type[_T], given: _Values, file: str | Path | None) -> _T:
    try:
        return kind(**given.values)
    except ConfigError as failure:
        origin = given.origins.get(failure.param or "", file)
        raise ConfigError(f"{origin}: {failure.message}" if origin else failure.message) from None


def _read(path: str | Path, found: Mapping[type, _Values]) -> tuple[ModelSettings, ...]:
    """Add a file's values to ``found``, and return its models. Raises ConfigError that names the file."""
    try:
        values = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as failure:
        raise ConfigError(f"{path} cannot be read: {failure.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        raise ConfigError(f"{path} is not valid TOML: {failure}") from None
    try:
        tables = values.pop("model", [])
        if not isinstance(tables, list) or "models" in values:
            raise ConfigError("models are written as [[model]] tables")
        media = values.pop("media", {})
        for kind, table, where in ((GatewaySettings, values, "the configuration"), (MediaPolicy, media, "[media]")):
            for name, value in _table(kind, table, where).items():
                found[kind].add(name, value, str(path))
        return tuple(ModelSettings(**_table(ModelSettings, table, "[[model]]")) for table in tables)
    except ConfigError as failure:
        raise ConfigError(f"{path}: {failure.message}") from None


def _table(kind: Any, table: Any, where: str) -> dict[str, Any]:
    """The values of a table, refusing unknown names and wrong types in the user's terms."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table")
    known = {each.name: Setting(kind, each) for each in fields(kind) if each.name not in _TABLES}
    for name, value in table.items():
        if name not in known:
            raise ConfigError(f"{where} has no setting {name!r}; it knows {', '.join(known)}")
        if not _fits(known[name].kind, value):
            raise known[name].refuse(f"{name} in {where}", value)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


def _fits(kind: str, value: Any) -> bool:
    """Whether a value of a file has the type of its setting. Other types are their class's to check."""
    match kind:
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "bool":
            return isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "tuple[str, ...]":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case "dict[str, Any]":
            return isinstance(value, dict)
    return True
