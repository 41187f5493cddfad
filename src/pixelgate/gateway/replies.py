"""JSON replies, and what a client may see of an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from pixelgate.errors import AuthenticationError, BusyError, InternalError, PixelgateError
from pixelgate.gateway.wire import error_body

log = logging.getLogger(__name__)
_RETRY_AFTER = "1"  # seconds

Refused = Callable[[PixelgateError], None]


def as_json(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_response(error: PixelgateError) -> Response:
    """An error's response, with what its status needs in the head."""
    headers = {}
    if isinstance(error, BusyError):
        headers["retry-after"] = _RETRY_AFTER
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return as_json(error_object(error), status=error.status, headers=headers)


def noted(failure: Exception) -> PixelgateError:
    """``failure`` as an error of ours, logged where the operator should know of it."""
    if isinstance(failure, PixelgateError):
        error = failure
    else:
        error = InternalError("an unforeseen failure")
        error.__cause__ = failure
    if error.status == 500:
        log.error("%s", error.message, exc_info=error)
    elif error.status > 500:
        log.warning("%s", error.message)
    return error


def error_object(error: PixelgateError) -> Mapping[str, Any]:
    """An OpenAI error object. Of what is the gateway's own fault the reason stays in the log."""
    if error.status == 500:
        error = InternalError("the gateway failed on this request; its log has the reason")
    return error_body(error)
