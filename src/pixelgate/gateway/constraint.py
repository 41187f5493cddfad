"""What a request says its answer must be: OpenAI's response_format, and vLLM's structured_outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pixelgate.engines.engine import Constraint
from pixelgate.errors import RequestError

_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_OUTPUTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MAX_CHOICES = 256


def constraint(response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None) -> Constraint | None:
    """The constraint of a request, in either spelling. Raises RequestError that names the field."""
    formatted = None if response_format is None else _response_format(response_format)
    asked = {name: value for name, value in (structured or {}).items() if value is not None and value is not False}
    if not asked:
        return formatted
    if formatted is not None:
        raise RequestError("give either response_format or structured_outputs", param="structured_outputs")
    if unknown := sorted(asked.keys() - {*_OUTPUTS}):
        raise RequestError(
            f"structured_outputs.{unknown[0]} is not supported; there is {', '.join(_OUTPUTS)}",
            param=f"structured_outputs.{unknown[0]}",
        )
    if len(asked) > 1:
        raise RequestError(f"structured_outputs must have one of {', '.join(asked)}", param="structured_outputs")
    [(name, value)] = asked.items()
    return _structured(name, value, f"structured_outputs.{name}")


def _response_format(response_format: Mapping[str, Any]) -> Constraint | None:
    kind = response_format.get("type")
    if kind not in _FORMATS:
        raise RequestError(f"response_format.type must be one of {', '.join(_FORMATS)}", param="response_format.type")
    match kind:
        case "json_object":
            return Constraint("json_object")
        case "json_schema":
            place = "response_format.json_schema"
            wrapper = response_format.get("json_schema")
            schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
            return Constraint("json_schema", _json(schema, f"{place}.schema"))
        case "structural_tag":
            return Constraint("structural_tag", _json(dict(response_format), "response_format"))
    return None


def _structured(name: str, value: Any, place: str) -> Constraint:
    match name:
        case "json_object":
            if value is not True:
                raise RequestError(f"{place} must be true or false", param=place)
            return Constraint("json_object")
        case "json":
            return Constraint("json_schema", value if isinstance(value, str) and value else _json(value, place))
        case "choice":
            if not isinstance(value, list) or not value or not all(isinstance(c, str) and c for c in value):
                raise RequestError(f"{place} must be a list of strings that are not empty", param=place)
            if len(value) > MAX_CHOICES:
                raise RequestError(f"{place} may hold at most {MAX_CHOICES} strings, not {len(value)}", param=place)
            return Constraint("choice", tuple(value))
    if not isinstance(value, str) or not value:
        raise RequestError(f"{place} must be a string that is not empty", param=place)
    return Constraint("regex" if name == "regex" else "grammar" if name == "grammar" else "structural_tag", value)


def _json(value: Any, place: str) -> str:
    if not isinstance(value, dict):
        raise RequestError(f"{place} must be an object", param=place)
    return json.dumps(value, ensure_ascii=False)
