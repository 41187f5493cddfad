"""What is the same of sampling in every protocol of vLLM: what it refuses, and how zero is said."""

from __future__ import annotations

from pixelgate.engines.engine import Sampling
from pixelgate.errors import RequestError

_SMALLEST_TOP_P = 1e-6
_GREEDY_BELOW = 1e-5  # vLLM's own limit


def refuse_impossible(sampling: Sampling) -> None:
    """Raise RequestError that names the field, where vLLM would refuse a request without saying which."""
    if sampling.max_tokens is not None and (sampling.min_tokens or 0) > sampling.max_tokens:
        raise RequestError("min_tokens must not be greater than max_tokens.", param="min_tokens")
    if sampling.n > 1 and sampling.temperature < _GREEDY_BELOW:
        raise RequestError("n must be 1 at a temperature of 0: all answers would be the same.", param="n")
    if sampling.repetition_penalty == 0:
        raise RequestError("repetition_penalty must be greater than 0.", param="repetition_penalty")


def top_p(sampling: Sampling) -> float | None:
    """``top_p`` as it can be sent: of 0 gRPC makes 1, the opposite, and HTTP a refusal."""
    return None if sampling.top_p is None else max(sampling.top_p, _SMALLEST_TOP_P)
