"""Requests to a gateway, streamed or not, and what its answer says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

PATH = "/v1/chat/completions"


@dataclass
class Choice:
    """One of the answers to a request."""

    text: str = ""
    reason: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Answer:
    """What came back. A stream that ended well is ``done``, as is an answer that was not streamed."""

    status: int
    choices: list[Choice] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    done: bool = False

    @property
    def text(self) -> str:
        """The text of the only answer."""
        (choice,) = self.choices
        return choice.text


def ask(client: httpx.Client, body: dict[str, Any], stream: bool = False) -> Answer:
    """Ask for a chat completion."""
    if stream:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    response = client.post(PATH, json=body)
    if response.status_code != 200:
        return Answer(response.status_code, error=response.json()["error"])
    return streamed(response.text) if stream else whole(response.json())


def whole(completion: dict[str, Any]) -> Answer:
    """An answer that was not streamed."""
    choices = [
        Choice(found["message"]["content"], found["finish_reason"], (found["logprobs"] or {}).get("content") or [])
        for found in completion["choices"]
    ]
    return Answer(200, choices, completion["usage"], done=True)


def streamed(events: str) -> Answer:
    """An answer put together from its events."""
    answer, choices = Answer(200), {}
    for line in events.splitlines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            answer.done = True
            break
        found = json.loads(line.removeprefix("data: "))
        answer.error = found.get("error") or answer.error
        answer.usage = found.get("usage") or answer.usage
        for part in found.get("choices", ()):
            choice = choices.setdefault(part["index"], Choice())
            choice.text += part["delta"].get("content") or ""
            choice.reason = part["finish_reason"] or choice.reason
            choice.logprobs += (part.get("logprobs") or {}).get("content") or []
    answer.choices = [choices[index] for index in sorted(choices)]
    return answer
