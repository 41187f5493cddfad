"""POST /v1/chat/completions/render: what a chat request would send to the engine, in the words of vLLM's own /render.

Nothing is sent. With ``?tensors=1`` the tensors' bytes are part of the answer.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

import msgspec
from starlette.responses import Response

from pixelgate.engines import vllm_item
from pixelgate.engines.engine import EngineRequest, Images
from pixelgate.errors import RequestError
from pixelgate.gateway.chat import Chat, give_back, prepare
from pixelgate.gateway.endpoint import Endpoint, Exchange
from pixelgate.gateway.services import Held, naming


class RenderChat(Endpoint):
    """A chat request goes the way of any other, and is shown where it would leave for the engine."""

    path = "/v1/chat/completions/render"

    def begin(self, exchange: Exchange, body: bytes, held: Held) -> Coroutine[Any, Any, int]:
        """Read the body and the query."""
        asked = exchange.request.query_params.get("tensors", "0")
        if asked not in ("0", "1"):
            raise RequestError("tensors must be 0 or 1", param="tensors")
        return self._render(self.open_chat(exchange, body, held), exchange, asked == "1")

    async def _render(self, chat: Chat, exchange: Exchange, with_tensors: bool) -> int:
        request = await prepare(chat, self.services)
        if with_tensors and request.images:
            with naming("messages"):
                await chat.held.encoded.take(_answer_bytes(request.images))
        data = await self.services.threads.run(chat.held.owner, rendered, chat.model.name, request, with_tensors)
        give_back(chat, request)
        await exchange.reply(Response(data, media_type="application/json"))
        return 200


def rendered(model: str, request: EngineRequest, with_tensors: bool) -> bytes:
    """The JSON of a request: vLLM's fields, and ``tensors``, which says what they are without their bytes."""
    images = request.images
    return msgspec.json.encode(
        {
            "request_id": request.request_id,
            "model": model,
            "token_ids": request.token_ids,
            "features": _features(request, images, with_tensors) if images else None,
            "sampling_params": {name: value for name, value in asdict(request.sampling).items() if value is not None},
            "stream": request.stream,
            "tensors": [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype,
                    "shape": tensor.shape,
                    "field": tensor.field,
                    "sizes": tensor.sizes,
                    "keep_on_cpu": tensor.keep_on_cpu,
                }
                for tensor in (images.tensors if images else ())
            ],
        }
    )


def _features(request: EngineRequest, images: Images, with_tensors: bool) -> dict[str, Any]:
    features: dict[str, Any] = {
        "mm_hashes": {"image": images.hashes},
        "mm_placeholders": {
            "image": [
                {"offset": span.offset, "length": span.length, "embedded": plan.tokens}
                for span, plan in zip(images.spans, images.plans, strict=True)
            ]
        },
    }
    if with_tensors:  # msgspec writes bytes as base64
        items = [vllm_item.pack(images.tensors, index) for index in range(len(images.plans))]
        features["kwargs_data"] = {"image": items}
    return features


def _answer_bytes(images: Images) -> int:
    """What an answer holds of tensors: a copy of them, and that in base64."""
    return sum(tensor.nbytes for tensor in images.tensors) * 7 // 3
