"""How tokens are chosen: what the request says, else what the checkpoint recommends, else neutral."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pixelgate.engines.engine import Sampling
from pixelgate.errors import RequestError
from pixelgate.gateway.constraint import constraint
from pixelgate.gateway.wire import ChatRequest

MAX_BIASES = 1024
_RECOMMENDED: Mapping[str, tuple[type, ...]] = {
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
}


def sampling(request: ChatRequest, generation: Mapping[str, Any], vocab_size: int | None = None) -> Sampling:
    """The parameters for the engine. ``generation`` is the checkpoint's generation_config.json.

    Like vLLM, a gateway follows the recommendation of the checkpoint where the client says nothing. Raises RequestError
    for a token that a vocabulary of ``vocab_size`` does not have.
    """
    chosen = {name: getattr(request, name) for name in _RECOMMENDED}
    for name, kinds in _RECOMMENDED.items():
        recommended = generation.get(name)
        if chosen[name] is None and isinstance(recommended, kinds) and not isinstance(recommended, bool):
            chosen[name] = recommended
    if chosen["temperature"] is None:
        chosen["temperature"] = 1.0
    return Sampling(
        **chosen,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        min_tokens=request.min_tokens,
        seed=request.seed,
        stop=stops(request),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=request.skip_special_tokens is not False,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        n=request.n or 1,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        logit_bias=biases(request.logit_bias or {}, vocab_size),
        constraint=constraint(request.response_format, request.structured_outputs),
    )


def biases(logit_bias: Mapping[str, float], vocab_size: int | None) -> tuple[tuple[int, float], ...]:
    """(token id, bias) of OpenAI's map, whose keys are ids written as text."""
    if len(logit_bias) > MAX_BIASES:
        raise RequestError(
            f"logit_bias may hold at most {MAX_BIASES} tokens, not {len(logit_bias)}", param="logit_bias"
        )
    for key, bias in logit_bias.items():
        if not re.fullmatch("[0-9]{1,9}", key) or (vocab_size is not None and int(key) >= vocab_size):
            raise RequestError("logit_bias has a key that is no token id of this model", param="logit_bias")
        if not -100 <= bias <= 100:
            raise RequestError("a logit_bias must be between -100 and 100", param="logit_bias")
    return tuple((int(key), bias) for key, bias in logit_bias.items())


def stops(request: ChatRequest) -> tuple[str, ...]:
    """The stop strings of a request, in either spelling."""
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
