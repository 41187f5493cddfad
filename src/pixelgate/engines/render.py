"""What a vLLM would make of a picture: its ``/v1/chat/completions/render``, an oracle for comparisons.

The engine must run with ``--enable-scale-out``. A gateway of ours answers in the same form.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from numpy.typing import NDArray

from pixelgate.engines import vllm_item
from pixelgate.engines.engine import Span
from pixelgate.errors import EngineError

_PATH = "/v1/chat/completions/render?tensors=1"  # a vLLM gives them unasked
_TIMEOUT = aiohttp.ClientTimeout(total=120, connect=10)


@dataclass(frozen=True)
class Rendered:
    """A picture's prompt as the engine makes it; ``arrays`` of one picture have no dimension that counts pictures."""

    token_ids: tuple[int, ...]
    span: Span
    arrays: Mapping[str, NDArray[Any]]


async def render(url: str, data: bytes, options: Mapping[str, Any], key: str = "") -> Rendered:
    """Ask the engine at ``url`` about one encoded picture. Raises EngineError."""
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise EngineError(f"{url!r} is no address of an engine: give http://HOST:PORT")
    reference = f"data:image/*;base64,{base64.b64encode(data).decode()}"
    content = [{"type": "image_url", "image_url": {"url": reference}}, {"type": "text", "text": "."}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    if options:
        body["mm_processor_kwargs"] = dict(options)
    headers = {"authorization": f"Bearer {key}"} if key else None
    async with aiohttp.ClientSession(timeout=_TIMEOUT, trust_env=False, headers=headers) as session:
        models = await _json(session.get(f"{url}/v1/models"), url)
        try:
            body["model"] = models["data"][0]["id"]
        except (LookupError, TypeError):
            raise EngineError(f"the engine at {url} names no model") from None
        answer = await _json(session.post(f"{url}{_PATH}", json=body), url)
    try:
        return rendered(answer)
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


def rendered(answer: Any) -> Rendered:
    """A reply of ``/render``. Raises LookupError, TypeError or ValueError for anything else."""
    features = answer["features"]
    (item,), (span,) = features["kwargs_data"]["image"], features["mm_placeholders"]["image"]
    arrays = vllm_item.unpack(base64.b64decode(item))
    return Rendered(tuple(answer["token_ids"]), Span(span["offset"], span["length"]), arrays)
