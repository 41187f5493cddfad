"""A workshop in which one engine runs at a time, with a gateway in front of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from kinds import HTTP, KINDS, Kind
from processes import ROOT, Gateway, Process, free_port, healthy, serving
from questions import questions


class Workshop:
    """Engines of ``environments``, by their makers, and gateways, with the checkpoints in ``folder``."""

    def __init__(self, environments: Mapping[str, Path], folder: Path) -> None:
        self.environments, self.folder = environments, folder
        self.checkpoints = folder / "checkpoints"
        self._expected: dict[str, Any] = json.loads((folder / "transformers.json").read_text())
        self._own: dict[tuple[str, str], dict[str, Any]] = {}
        self._rendered: dict[str, dict[str, Any]] = {}
        self.kind, self.model, self.port = HTTP, "", 0
        self._engine: Process | None = None
        self.gateway: Gateway | None = None

    @property
    def engine_url(self) -> str:
        """The engine's address in pixelgate's notation."""
        return f"{self.kind.scheme}://127.0.0.1:{self.port}"

    @property
    def expected(self) -> dict[str, Any]:
        """What transformers answers, by title."""
        return dict(self._expected[self.model])

    @property
    def own(self) -> dict[str, Any]:
        """What the engine answers by its own chat API, by title."""
        return self._own[self.kind.reference, self.model]

    @property
    def rendered(self) -> dict[str, Any]:
        """What a vLLM makes of the requests, by title."""
        return self._rendered[self.model]

    @property
    def questions(self) -> dict[str, dict[str, Any]]:
        """What the engine is asked, by title."""
        return questions(self.model, self.expected, self.kind.maker)

    def serve(self, kind: Kind, model: str) -> Gateway:
        """A gateway in front of an engine of this kind with this model; whatever else runs is ended first.

        A model is asked about by the engine's own chat API before, if it was not yet.
        """
        if self.gateway and (self.kind, self.model) == (kind, model):
            return self.gateway
        if (kind.reference, model) not in self._own:
            self.start(KINDS[kind.reference], model)
            self._ask()
        if (self.kind, self.model) != (kind, model):
            self.start(kind, model)
        self.gateway = self.gateway_for([self.engine_url])
        return self.gateway

    def start(self, kind: Kind, model: str) -> None:
        """Start an engine, in the place of the one that runs."""
        self.close()
        self.kind, self.model, self.port = kind, model, free_port()
        self.start_again()

    def start_again(self) -> None:
        """The same engine at the same port, which must have ended."""
        log = self.folder / f"{self.kind.name}.{self.model}.log"
        checkpoint = (self.checkpoints / self.model).relative_to(ROOT)  # as the engine tells others
        command = self.kind.command(self.environments[self.kind.maker], checkpoint, self.port)
        self._engine = Process(command, log, self.kind.variables)
        address = f"127.0.0.1:{self.port}"
        self._engine.wait_for(lambda: serving(address) if self.kind.speaks_grpc else healthy(f"http://{address}"))

    def kill(self) -> None:
        """End the engine as a crash would."""
        assert self._engine
        self._engine.kill()

    def gateway_for(self, urls: list[str], *flags: str, checkpoint: bool = True) -> Gateway:
        """A further gateway in front of ``urls``."""
        own = self.checkpoints / self.model if checkpoint else None
        return Gateway(own, urls, self.folder / f"gateway.{self.kind.name}.{self.model}.log", *flags)

    def close(self) -> None:
        """End everything."""
        if self.gateway:
            self.gateway.close()
        if self._engine:
            self._engine.end()
        self.gateway = self._engine = None

    def _ask(self) -> None:
        """What the engine itself answers, and what it makes of the pictures."""
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=180, trust_env=False) as client:
            own, rendered = {}, {}
            for title, body in self.questions.items():
                with_ids = {**body, "return_token_ids": True}
                own[title] = _json(client.post("/v1/chat/completions", json=with_ids))
                if self.kind is HTTP:
                    rendered[title] = _json(client.post("/v1/chat/completions/render", json=body))
        self._own[self.kind.name, self.model] = own
        self._rendered.setdefault(self.model, rendered)


def _json(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text[:1000]
    return response.json()
