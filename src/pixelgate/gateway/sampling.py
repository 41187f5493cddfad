"""How tokens are chosen: what the request says, else what the checkpoint recommends, else neutral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pixelgate.engines.engine import Sampling
from pixelgate.gateway.wire import ChatRequest

_RECOMMENDED: Mapping[str, tuple[type, ...]] = {
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
}


def sampling(request: ChatRequest, generation: Mapping[str, Any]) -> Sampling:
    """The parameters for the engine. ``generation`` is the checkpoint's generation_config.json.

    Like vLLM, a gateway follows the recommendation of the checkpoint where the client says nothing.
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
    )


def stops(request: ChatRequest) -> tuple[str, ...]:
    """The stop strings of a request, in either spelling."""
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
