"""An HTTP server that does what a test says, where a real engine would answer."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

from aiohttp import web

HEALTHY = {
    "/health": (200, b""),
    "/version": (200, b'{"version": "0.1"}'),
    "/v1/models": (200, b'{"data": [{"id": "m", "max_model_len": 512}]}'),
}


class Scripted:
    """``answers`` by path: (status, body), bytes for a body, or a coroutine function of the request.

    A body that is a list is sent in these pieces; one that ends with None breaks the connection there.
    """

    def __init__(self, answers):
        self.answers = {**HEALTHY, **answers}
        self.asked = []
        self.bodies = []
        self.port = 0

    async def handle(self, request):
        self.asked.append(request.path)
        body = await request.read()
        if body:
            self.bodies.append(json.loads(body))
        answer = self.answers.get(request.path, (404, b"{}"))
        if callable(answer):
            answer = await answer(request)
        status, body = (200, answer) if isinstance(answer, bytes | list) else answer
        if isinstance(body, bytes):
            return web.Response(status=status, body=body, headers={"content-type": "application/json"})
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for piece in body:
            if piece is None:
                request.transport.abort()
                return response
            await response.write(piece)
            await asyncio.sleep(0)
        return response


@asynccontextmanager
async def scripted(answers, port=0):
    """A running Scripted; its port is in ``port``."""
    script = Scripted(answers)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", script.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    script.port = runner.addresses[0][1]
    try:
        yield script
    finally:
        await runner.cleanup()


@asynccontextmanager
async def closing(engine):
    try:
        yield engine
    finally:
        await engine.close()


def events(*objects, done=True):
    """A body of server-sent events."""
    return [*(b"data: " + json.dumps(o).encode() + b"\n\n" for o in objects), *([b"data: [DONE]\n\n"] if done else [])]


def error(code, param=None):
    return {"error": {"message": "secret words of the engine", "param": param, "code": code}}
