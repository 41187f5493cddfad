"""SGLang's HTTP for tests: `OpenAIServer` that says which model it has, and refuses what the real one passes over.

In a test::

    async with SglangServer(model_type="qwen2_5_vl") as server:
        ...  # server.url is the address; server.requests holds what arrived
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pixelgate.testing.openai_server import OpenAIServer

# SGLang's own, of those that a gateway may be asked for
_KNOWN = {
    *("model", "messages", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "max_tokens", "max_completion_tokens"),
    *("min_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim", "logprobs", "top_logprobs"),
    *("logit_bias", "response_format", "regex", "ebnf", "tools", "tool_choice", "continue_final_message"),
    "chat_template_kwargs",
}


class SglangServer(OpenAIServer):
    """A server of a ``model_type`` whose weights are at ``model_path``; other arguments and attributes as its parent's.

    ``well`` is what /health says, ``asked`` counts how often it was asked for its model.
    """

    def __init__(self, *arguments: Any, model_type: str = "", model_path: str = "weights", **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.model_type, self.model_path = model_type, model_path
        self.well = True
        self.asked = 0

    @property
    def url(self) -> str:
        """The address in pixelgate's notation; the port is known once the server runs."""
        return f"sglang+http://{self._host}:{self._port}"

    def _add_routes(self, app: web.Application) -> None:
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._model_info)

    def _takes(self, body: dict[str, Any]) -> bool:
        return body.keys() <= _KNOWN

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.well else 503)

    async def _model_info(self, request: web.Request) -> web.Response:
        self.asked += 1
        info = {"model_path": self.model_path, "model_type": self.model_type or None, "has_image_understanding": True}
        return web.json_response(info)
