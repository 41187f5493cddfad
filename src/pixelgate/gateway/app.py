"""Routes and lifespan of the gateway. The route that does the work is in completions.py, what it does in chat.py."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pixelgate.errors import MethodError, PathError, PixelgateError
from pixelgate.gateway.access import Access, digests
from pixelgate.gateway.completions import ChatCompletions
from pixelgate.gateway.endpoint import Endpoint
from pixelgate.gateway.idle import give_back_memory
from pixelgate.gateway.metrics import exposition
from pixelgate.gateway.passthrough import PassThrough
from pixelgate.gateway.render import RenderChat
from pixelgate.gateway.replies import as_json, error_object
from pixelgate.gateway.served import ServedModel
from pixelgate.gateway.services import Services
from pixelgate.gateway.settings import GatewaySettings
from pixelgate.gateway.sums import Family
from pixelgate.gateway.tokenization import Detokenize, Tokenize
from pixelgate.gateway.watchdog import watch

log = logging.getLogger(__name__)
_WITHOUT_ENGINES: tuple[type[Endpoint], ...] = (RenderChat, Tokenize, Detokenize)


def create_app(
    settings: GatewaySettings,
    models: Sequence[ServedModel | PassThrough],
    summed: Callable[[], Awaitable[list[Family]]] | None = None,
) -> Starlette:
    """The ASGI application, to be run once. Engines are connected when it starts; ConfigError ends the start.

    With ``settings.admin_host`` its ``state.admin`` is the application of the admin listener, to be run beside it.
    ``state.drain`` is to be called when it will end soon, ``state.refused`` with what is refused before it is asked;
    once ``state.closing`` is set an answer is its connection's last. ``state.report`` gives its metrics; beside other
    workers ``summed`` gives those of all, or raises TimeoutError.
    """
    gateway = _Gateway(settings, models, summed)
    states = [Route("/health", gateway.health), Route("/ready", gateway.ready)]
    metrics = Route("/metrics", gateway.show_metrics)
    refused, closing = gateway.services.metrics.refused, asyncio.Event()
    admin_address = settings.admin_address
    app = Starlette(
        routes=[
            Route(ChatCompletions.path, ChatCompletions(*gateway.shared), methods=["POST"]),
            *(Route(kind.path, kind(*gateway.shared), methods=["POST"]) for kind in _WITHOUT_ENGINES),
            Route("/v1/models", gateway.list_models),
            *states,
            *([metrics] if admin_address is None else []),
        ],
        middleware=[Middleware(Access, keys=digests(settings), trusted=settings.trusted_networks, refused=refused)],
        lifespan=gateway.lifespan,
        exception_handlers={HTTPException: _not_found},
    )
    app.state.drain, app.state.report = gateway.drain, gateway.report
    app.state.refused, app.state.closing = refused, closing
    app.state.admin = None
    if admin_address is not None:
        app.state.admin = Starlette(routes=[*states, metrics], exception_handlers={HTTPException: _not_found})
        app.state.admin.router.redirect_slashes = False
        app.state.admin.state.refused, app.state.admin.state.closing = refused, closing
    app.router.redirect_slashes = False  # a redirect would repeat whatever Host the client sent
    return app


class _Gateway:
    """The routes, and what they share."""

    def __init__(
        self,
        settings: GatewaySettings,
        models: Sequence[ServedModel | PassThrough],
        summed: Callable[[], Awaitable[list[Family]]] | None,
    ) -> None:
        self._settings = settings
        self._summed = summed
        self._both = models
        self._models = {model.name: model for model in models if isinstance(model, ServedModel)}
        self.passing = {model.name: model for model in models if isinstance(model, PassThrough)}
        # where a model has both, the first is asked first, so what holds for it holds for the model
        self._by_name: dict[str, ServedModel | PassThrough] = {**self.passing, **self._models}
        self._started = int(time.time())
        self.services = Services.of(settings)
        self.shared = self.services, self._models, self.passing
        self._ready = False

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Open what requests share, connect the engines, and close it all in reverse."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.services.running())
            for model in self._both:
                stack.push_async_callback(model.fleet.close)
            for name, passing in self.passing.items():
                await passing.connect(self._settings.engine_wait)
                log.info("model %s is ready; it has engines that prepare pictures themselves", name)
            for name, served in self._models.items():
                facts = await served.connect(self._settings.engine_wait)
                log.info("model %s is ready; its engines want %s pixels", name, facts.pixel_dtype)
            resting = give_back_memory(self.services.activity, self.services.isolation.rest)
            for beside in (watch(self.services.metrics), resting):
                stack.push_async_callback(_ended, asyncio.create_task(beside))
            stack.callback(self.drain)
            self._ready = True
            yield

    def drain(self) -> None:
        """Say from now on that requests should go elsewhere. Those that come are answered all the same."""
        self._ready = False

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models."""
        models = [
            {
                "id": name,
                "object": "model",
                "created": self._started,
                "owned_by": "pixelgate",
                "max_model_len": model.facts.max_context,
            }
            for name, model in self._by_name.items()
        ]
        return as_json({"object": "list", "data": models})

    async def health(self, request: Request) -> Response:
        """GET /health: 200 when every model has an engine that takes requests, else 503. Says why engines do not."""
        healthy = await asyncio.gather(*(model.fleet.healthy() for model in self._by_name.values()))
        states = dict(zip(self._by_name, healthy, strict=True))
        status = 200 if all(healthy) else 503
        troubles: dict[str, list[str]] = {}
        for model in self._both:
            if words := model.fleet.troubles:
                troubles.setdefault(model.name, []).extend(words)
        body = {"status": "ok" if all(healthy) else "unavailable", "models": states}
        return as_json(body | ({"troubles": troubles} if troubles else {}), status=status)

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 when this process takes requests, be engines up or not; 503 before, and once it is to end."""
        status, words = (200, "ready") if self._ready else (503, "not ready")
        return as_json({"status": words}, status=status)

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics, in Prometheus' text format."""
        try:
            report = self.report() if self._summed is None else await self._summed()
        except TimeoutError:
            return Response(status_code=503)
        return Response(exposition(report), media_type="text/plain; version=0.0.4")

    def report(self) -> list[Family]:
        """The metrics of this process."""
        self._show()
        return self.services.metrics.report()

    def _show(self) -> None:
        """Put the state of budgets and engines into the metrics."""
        metrics, services = self.services.metrics, self.services
        budgets = {"bytes": services.encoded, "pixels": services.pixels, "tensors": services.tensors}
        metrics.budgets({name: (budget.used, budget.total) for name, budget in budgets.items()})
        for name in self._by_name:
            fleets = [model.fleet for model in self._both if model.name == name]
            metrics.engines(name, [state for fleet in fleets for state in fleet.states])


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _not_found(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, HTTPException)
    error: PixelgateError = PathError("there is nothing at this path")
    if failure.status_code == MethodError.status:
        error = MethodError("this path does not take that method")
    request.app.state.refused(error)
    return as_json(error_object(error), status=error.status, headers=failure.headers)
