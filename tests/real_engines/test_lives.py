"""Engines that end in the middle of an answer and come back, and those that a gateway has beside others."""

from __future__ import annotations

import threading
import time

import pytest
from asking import PATH, Answer, ask, streamed
from chats import DIFFERENT
from kinds import GRPC, HTTP
from processes import START
from questions import BASE, SAMPLED, greedy
from test_answers import every

LONG = {"max_tokens": 1800, "ignore_eos": True, "logprobs": False, "top_logprobs": None}


def until(condition, seconds=START):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.2)


def same_as_before(served, title=BASE):
    answer = ask(served.gateway.client, greedy(served.model, title))
    assert answer.status == 200, answer.error
    (own,) = served.own[title]["choices"]
    return answer.text == own["message"]["content"]


@pytest.mark.breaks
@every(models=[SAMPLED])
def test_an_engine_dies_in_the_middle_and_comes_back(served):
    client = served.gateway.client
    assert same_as_before(served)
    beside: list[Answer] = []
    body = {name: value for name, value in greedy(SAMPLED, BASE, **LONG).items() if value is not None}
    other = threading.Thread(target=lambda: beside.append(ask(client, body)))
    other.start()
    lines = []
    with client.stream("POST", PATH, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 20:
                served.kill()
    other.join()
    answer = streamed("\n".join(lines))
    assert answer.text  # what had come before
    assert not answer.done
    assert answer.error["code"] in ("engine_error", "engine_unavailable")
    assert lines[-3] == "event: error"
    assert beside[0].status in (502, 503)

    assert client.get("/health").status_code == 503
    assert ask(client, greedy(SAMPLED, BASE)).status == 503
    served.start_again()
    until(lambda: client.get("/health").status_code == 200)
    # over HTTP the engine had been sent the picture, and the new one has forgotten it
    assert same_as_before(served)
    assert same_as_before(served, DIFFERENT)


@every(models=[SAMPLED])
def test_who_hangs_up_frees_the_engine(served):
    """As many long answers as the engine computes at once are given up; the next request does not wait for them."""
    client = served.gateway.client
    body = {name: value for name, value in greedy(SAMPLED, BASE, **LONG).items() if value is not None}
    for _ in range(8):
        with client.stream("POST", PATH, json={**body, "stream": True}) as response:
            next(response.iter_lines())
    begun = time.monotonic()
    assert same_as_before(served)
    hung_up = time.monotonic() - begun
    begun = time.monotonic()
    assert ask(client, body).status == 200
    assert hung_up < time.monotonic() - begun


@every(kinds=[GRPC.name], models=[SAMPLED])
def test_the_engine_gives_the_checkpoint(served):
    gateway = served.gateway_for([served.engine_url], checkpoint=False)
    try:
        answer = ask(gateway.client, greedy(SAMPLED, BASE))
        assert answer.text == ask(served.gateway.client, greedy(SAMPLED, BASE)).text
    finally:
        gateway.close()


@every(kinds=[HTTP.name], models=["pixtral"])
def test_what_is_not_carried_goes_to_an_engine_that_prepares_pictures_itself(served):
    """Of the two ways to one engine the second is taken for pictures with tokens that have no embedding."""
    gateway = served.gateway_for([served.engine_url, f"openai+http://127.0.0.1:{served.port}"])
    try:
        for title in (BASE, DIFFERENT):
            answer = ask(gateway.client, greedy("pixtral", title))
            assert answer.status == 200, answer.error
            (own,) = served.own[title]["choices"]
            assert answer.text == own["message"]["content"]
    finally:
        gateway.close()


@every(kinds=[GRPC.name], models=[SAMPLED])
def test_tensors_in_messages_and_in_shared_memory(served):
    """The gateway of the other tests uses shared memory where engine and gateway see the same."""
    gateway = served.gateway_for([served.engine_url], "--shm", "off")
    try:
        ours, other = (ask(client, greedy(SAMPLED, DIFFERENT)) for client in (gateway.client, served.gateway.client))
        assert ours.text == other.text
    finally:
        gateway.close()
