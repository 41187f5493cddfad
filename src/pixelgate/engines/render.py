"""What a vLLM would make of a picture: its ``/v1/chat/completions/render``, an oracle for comparisons.

The engine must run with ``--enable-scale-out``. Tensors come as msgpack, one map per picture, of
``[dtype, shape, extension 3: bytes]``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from pixelgate.engines.engine import Span
from pixelgate.errors import EngineError

_RAW = 3
_TIMEOUT = aiohttp.ClientTimeout(total=120, connect=10)
_DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Rendered:
    """A picture's prompt as the engine makes it; ``arrays`` of one picture have no dimension that counts pictures."""

    token_ids: tuple[int, ...]
    span: Span
    arrays: Mapping[str, NDArray[Any]]


async def render(url: str, data: bytes, options: Mapping[str, Any]) -> Rendered:
    """Ask the engine at ``url`` about one encoded picture. Raises EngineError."""
    url = url.rstrip("/")
    reference = f"data:image/*;base64,{base64.b64encode(data).decode()}"
    content = [{"type": "image_url", "image_url": {"url": reference}}, {"type": "text", "text": "."}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    if options:
        body["mm_processor_kwargs"] = dict(options)
    async with aiohttp.ClientSession(timeout=_TIMEOUT, trust_env=False) as session:
        models = await _json(session.get(f"{url}/v1/models"), url)
        try:
            body["model"] = models["data"][0]["id"]
        except (LookupError, TypeError):
            raise EngineError(f"the engine at {url} names no model") from None
        answer = await _json(session.post(f"{url}/v1/chat/completions/render", json=body), url)
    try:
        return _rendered(answer)
    except (LookupError, TypeError, ValueError) as failure:
        raise EngineError(f"the engine at {url} rendered something else than a picture: {failure}") from None


async def _json(request: Any, url: str) -> Any:
    try:
        async with request as response:
            if response.status == 403:
                raise EngineError(f"the engine at {url} renders nothing: it must run with --enable-scale-out")
            if response.status != 200:
                words = (await response.text(errors="replace"))[:500]
                raise EngineError(f"the engine at {url} answered with HTTP status {response.status}: {words}")
            return await response.json(loads=msgspec.json.decode)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as failure:
        raise EngineError(f"the engine at {url} did not answer: {failure or type(failure).__name__}") from None


def _rendered(answer: Any) -> Rendered:
    features = answer["features"]
    (item,), (span,) = features["kwargs_data"]["image"], features["mm_placeholders"]["image"]
    elements = msgspec.msgpack.decode(base64.b64decode(item))
    arrays = {name: _array(*element["data"]) for name, element in elements.items()}
    return Rendered(tuple(answer["token_ids"]), Span(span["offset"], span["length"]), arrays)


def _array(dtype: str, shape: list[int], data: Any) -> NDArray[Any]:
    if not isinstance(data, msgspec.msgpack.Ext) or data.code != _RAW:
        raise ValueError("a tensor is not raw bytes")
    kind: np.dtype[Any] = np.dtype(_DTYPES.get(dtype, dtype))
    raw = bytes(data.data)
    if math.prod(shape) * kind.itemsize != len(raw):
        raise ValueError(f"a tensor {dtype}{shape} has {len(raw)} bytes")
    return np.frombuffer(raw, kind).reshape(shape)
