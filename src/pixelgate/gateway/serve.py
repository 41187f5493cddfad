"""Runs the gateway in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings

import uvicorn

from pixelgate.errors import ConfigError
from pixelgate.gateway import received
from pixelgate.gateway.app import create_app
from pixelgate.gateway.served import ServedModel, open_model
from pixelgate.gateway.settings import GatewaySettings, refuse_same_names
from pixelgate.process import keep_memory


def run(settings: GatewaySettings) -> None:
    """Serve until a signal ends it. Raises ConfigError or CheckpointError when the gateway cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    quieten_decoders()
    quieten_downloads()
    keep_memory(pictures=settings.workers)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises SIGINT anew once everything is closed
        _run(settings)


def _run(settings: GatewaySettings) -> None:
    models = _open_models(settings)
    server = uvicorn.Server(server_config(create_app(settings, models), settings))

    async def serve() -> None:
        # Before the server starts: so a refusal is one readable line, and a signal ends the wait for an engine.
        for model in models:
            await model.connect(settings.engine_wait)
        await server.serve()

    try:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(serve())
    except SystemExit:  # its way to say that it cannot listen
        pass
    if not server.started:
        raise ConfigError("the gateway did not start; the log above says why")


def _open_models(settings: GatewaySettings) -> list[ServedModel]:
    models = []
    for model in settings.models:
        with received.complete(model, settings.engine_wait) as complete:
            models.append(open_model(complete, settings))
    refuse_same_names([model.name for model in models])
    return models


def server_config(app: object, settings: GatewaySettings) -> uvicorn.Config:
    """How the HTTP server runs: fast loop and parser, no log line a request, no name of the software in replies."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        log_config=None,
        timeout_graceful_shutdown=30,
    )


def quieten_downloads() -> None:
    """huggingface_hub and its HTTP client, of either name, log the address of every file, signatures included."""
    for name in ("huggingface_hub.file_download", "httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.ERROR)


def quieten_decoders() -> None:
    """Strangers' broken files are answered, not logged: Pillow would log and warn about every one."""
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module=r"PIL\.")
