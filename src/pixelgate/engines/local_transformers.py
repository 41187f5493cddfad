"""A model inside the process, run by an installed transformers: no server, the checkpoint's own weights."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from pixelgate.engines.engine import Delta, EngineFacts, EngineRequest, Sampling
from pixelgate.errors import ConfigError, EngineError, EngineUnavailableError, RequestError

if TYPE_CHECKING:
    from pixelgate.engines.transformers_model import Model

URL = "local:transformers"

log = logging.getLogger(__name__)


class TransformersEngine:
    """The model of ``checkpoint``, a directory with weights, at ``local:transformers``. Fulfils ``Engine``.

    The URL may say more, as ``local:transformers?device=cuda:1&dtype=float16``: by default that is a GPU with bfloat16,
    or where there is none the CPU with float32. `describe` loads the model. Requests are answered one at a time, in a
    thread of their own; the others wait. Closing the iterator ends an answer at its next token. ``eos_token_ids`` end
    one, too. Raises ConfigError for an unknown option, and where the extra ``transformers`` is not installed.
    """

    def __init__(self, url: str, *, checkpoint: Path, eos_token_ids: tuple[int, ...]) -> None:
        self._url = url
        self._eos_token_ids = eos_token_ids
        self._load = _loader(checkpoint, **_options(url))
        self._model: Model | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transformers")
        self._closed = threading.Event()

    @property
    def url(self) -> str:
        """The address as configured."""
        return self._url

    async def describe(self) -> EngineFacts:
        """The model's facts. The first call loads it, however long that takes; ConfigError where it cannot be."""
        self._require_open()
        model = self._model
        if model is None:  # later nobody waits for the answers that the thread has to give
            model = await asyncio.get_running_loop().run_in_executor(self._thread, self._loaded)
        return model.facts(self._eos_token_ids)

    async def healthy(self) -> bool:
        """True until closed."""
        return not self._closed.is_set()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """Yield the answer token by token.

        Raises RequestError that names a parameter which asks for more than there is here.
        """
        _refuse(request.sampling)
        self._require_open()
        loop, told = asyncio.get_running_loop(), asyncio.Queue[Delta | EngineError]()
        gone = threading.Event()

        def tell(delta: Delta) -> None:
            if gone.is_set() or self._closed.is_set():
                raise _UnwantedError
            loop.call_soon_threadsafe(told.put_nowait, delta)

        def work() -> None:
            error = self._answer(request, tell)
            loop.call_soon_threadsafe(told.put_nowait, error)

        answering = self._thread.submit(work)
        try:
            while True:
                found = await told.get()
                if isinstance(found, EngineError):
                    raise found
                yield found
                if found.finish_reason:
                    return
        finally:
            gone.set()
            answering.cancel()

    async def close(self) -> None:
        """End the answer under way, and refuse those that wait."""
        self._closed.set()
        await asyncio.to_thread(self._thread.shutdown)

    def _answer(self, request: EngineRequest, tell: Callable[[Delta], None]) -> EngineError:
        """Tell the answer's deltas. What is returned is of interest to nobody who has seen the last of them."""
        try:
            self._require_open()
            self._loaded().answer(request, self._eos_token_ids, tell)
        except EngineUnavailableError as closed:
            return closed
        except _UnwantedError:
            return EngineUnavailableError("The model has been closed.")
        except Exception as failure:  # of whatever kind: memory, a driver, a shape
            log.exception("%s failed on %s", self._url, request.request_id)
            error = EngineError("The model failed on the request.")
            error.__cause__ = failure
            return error
        return EngineError("The model ended its answer before it was complete.")

    def _loaded(self) -> Model:
        """The model; only ever asked for in its thread."""
        if self._model is None:
            self._model = self._load()
        return self._model

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise EngineUnavailableError("The model has been closed.")


class _UnwantedError(Exception):
    """Nobody waits for the rest of an answer."""


def _options(url: str) -> dict[str, str]:
    """``device`` and ``dtype``, where the URL says them."""
    try:
        options = dict(parse_qsl(query, strict_parsing=True) if (query := urlsplit(url).query) else [])
    except ValueError:
        options = {"": ""}
    if urlsplit(url)._replace(query="").geturl() != URL or not options.keys() <= {"device", "dtype"}:
        raise ConfigError(f"{url!r} must look like {URL} or {URL}?device=cuda&dtype=bfloat16")
    return options


def _loader(checkpoint: Path, device: str = "", dtype: str = "") -> Callable[[], Model]:
    try:
        from pixelgate.engines.transformers_model import DTYPES, load
    except ImportError as failure:
        raise ConfigError(f"{URL} needs {failure.name}: pip install 'pixelgate[gateway,transformers]'") from None
    if dtype not in ("", *DTYPES):
        raise ConfigError(f"dtype of {URL} must be one of {', '.join(DTYPES)}, not {dtype!r}")
    return lambda: load(checkpoint, device, dtype)


def _refuse(sampling: Sampling) -> None:
    asked = {
        "n": sampling.n > 1,
        "frequency_penalty": bool(sampling.frequency_penalty),
        "presence_penalty": bool(sampling.presence_penalty),
        "logit_bias": bool(sampling.logit_bias),
        "response_format": sampling.constraint is not None,
    }
    for name, present in asked.items():
        if present:
            raise RequestError(f"the model runs inside the gateway, where {name} is not carried out", param=name)
    if sampling.max_tokens is not None and (sampling.min_tokens or 0) > sampling.max_tokens:
        raise RequestError("min_tokens must not be greater than max_tokens", param="min_tokens")
    if sampling.repetition_penalty == 0:
        raise RequestError("repetition_penalty must be greater than 0", param="repetition_penalty")
