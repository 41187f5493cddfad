"""Every error a caller of pixelgate can meet.

Each class knows the HTTP status and the OpenAI error type with which the gateway answers it. Messages speak in
the words of the user's problem and say what to do; they never carry a library's exception text, a payload or an
internal address.
"""

from __future__ import annotations

from typing import ClassVar


class PixelgateError(Exception):
    """Base of all errors raised on purpose. ``param`` names the request field the error is about."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class InternalError(PixelgateError):
    """A mistake of pixelgate itself, caught before it could do harm. The message is for the log."""

    code = "internal_error"


class CheckpointError(PixelgateError):
    """A checkpoint that cannot be had or read, or holds a setting that is not supported."""


class ConfigError(PixelgateError):
    """A setting of the command line or of the configuration file that cannot be used."""


class KernelError(PixelgateError, ValueError):
    """An array of the wrong shape, dtype, layout or size was handed to the native kernels."""


class RequestError(PixelgateError, ValueError):
    """What the client sent is not a valid request."""

    status = 400
    type = "invalid_request_error"


class AuthenticationError(RequestError):
    """The request brings no API key, or a wrong one."""

    status = 401
    code = "invalid_api_key"


class PathError(RequestError):
    """There is nothing at the request's path."""

    status = 404
    code = "unknown_url"


class MethodError(RequestError):
    """The request's path does not take its method."""

    status = 405
    code = "method_not_supported"


class SlowRequestError(RequestError):
    """The request did not arrive in time."""

    status = 408
    code = "request_timeout"


class HeaderError(RequestError):
    """A request head above a configured limit."""

    status = 431
    code = "header_too_large"


class BusyError(PixelgateError):
    """The gateway has no room for the request now; the client should try again later."""

    status = 429
    type = "rate_limit_error"
    code = "gateway_busy"


class FullError(BusyError):
    """The gateway has no room for another connection now."""

    status = 503
    type = "server_error"


class ClosingError(FullError):
    """The gateway ends, and the time that it gives requests under way is over."""

    code = "gateway_closing"


class OptionError(RequestError):
    """A processor option that is unknown or has an impossible value."""

    code = "invalid_option"


class MediaError(RequestError):
    """A picture reference that is malformed, refused, unreachable or not a picture."""

    code = "invalid_image"


class NotKeptError(MediaError):
    """A picture that a client has only named, and that the gateway does not keep: it has to be sent."""

    code = "image_not_kept"


class FetchError(MediaError):
    """A picture that could not be fetched, or must not be."""

    code = "image_fetch_failed"


class DecodeError(MediaError):
    """Bytes that are no picture in an accepted format, or a damaged one."""

    code = "image_decode_failed"


class TooLargeError(RequestError):
    """A body, a picture or a tensor above a configured limit."""

    status = 413
    code = "too_large"


class ImageRefusedError(RequestError):
    """A valid picture whose size this model's processor cannot take."""

    status = 422
    code = "image_refused"


class NotCarriedError(RequestError):
    """A valid request that the protocol of the model's engines has no way to express; nothing was sent."""

    status = 422
    code = "not_carried"


class NotCarriedNowError(NotCarriedError):
    """The same, while an engine of another protocol, which may have a way, is down."""

    status = 503
    type = "server_error"
    code = "engine_unavailable"


class ModelNotFoundError(RequestError):
    """The request names a model that this gateway does not serve."""

    status = 404
    code = "model_not_found"


class EngineError(PixelgateError):
    """The engine answered with a failure or with something that cannot be understood."""

    status = 502
    code = "engine_error"


class EngineUnavailableError(EngineError):
    """No engine of this model can take the request now."""

    status = 503
    code = "engine_unavailable"


class EngineUnreachableError(EngineUnavailableError):
    """The request was certainly not sent to the engine, so another one may take it."""


class EngineDeclinedError(EngineUnavailableError):
    """The engine turned the request away before it began with it, and is well: another one may take it."""


class EngineTimeoutError(EngineError):
    """The engine did not answer in time."""

    status = 504
    code = "engine_timeout"
