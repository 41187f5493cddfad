"""The log: as text or as JSON, each line with its process and the id of its request, none with what a client sent."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime

from pixelgate.gateway.settings import GatewaySettings

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The request that is worked on, in its tasks and on the threads that work for it."""

_ACCESS = logging.getLogger("pixelgate.access")


def configure(settings: GatewaySettings) -> None:
    """Log to standard error as the settings say."""
    handler, root = logging.StreamHandler(), logging.getLogger()
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    for before in [each for each in root.handlers if isinstance(each.formatter, JsonFormatter | TextFormatter)]:
        root.removeHandler(before)
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])


class TextFormatter(logging.Formatter):
    """Lines for people."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, with the request's id before the message and the fields behind it."""
        request = f"{name}: " if (name := REQUEST_ID.get()) else ""
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        head = f"{self.formatTime(record)} {record.levelname} {record.process} {record.name}"
        return f"{head}: {request}{record.message}{fields}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The object: time, level, logger, message, and what else there is."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        found = {
            "time": time,
            "level": record.levelname,
            "process": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := REQUEST_ID.get():
            found["request_id"] = request
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps({**found, **_fields(record)})


def access(path: str, status: int, client: str, facts: Mapping[str, object], seconds: Mapping[str, float]) -> None:
    """Log that a request was answered. ``client`` is the digest of its key, or its address."""
    times = {f"{phase}_ms": round(value * 1000, 2) for phase, value in seconds.items()}
    fields = {"path": path, "status": status, "client": client, **facts, **times}
    _ACCESS.info("answered", extra={"fields": fields})


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return fields
