"""A model of transformers, fed with a request's own tensors and token ids. Imports torch and transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from pixelgate.engines.engine import Delta, EngineFacts, EngineRequest, Images, Sampling, TokenLogprob
from pixelgate.errors import ConfigError
from pixelgate.pixels.tensor import Tensor

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = get_args(Dtype)

_GREEDY_BELOW = 1e-5  # as vLLM
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # what is asked for comes after the log-probabilities


def load(checkpoint: Path, device: str = "", dtype: str = "") -> Model:
    """The model of a directory; of what is left open the best that there is. Raises ConfigError."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    try:
        network, info = transformers.AutoModelForImageTextToText.from_pretrained(
            str(checkpoint),
            dtype=getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        network = network.to(device).eval()
    except Exception as failure:  # of whatever kind: a file, a driver, memory, a model that transformers does not know
        reason = str(failure).partition("\n")[0]
        raise ConfigError(f"transformers cannot run the model of {checkpoint} on {device}: {reason}") from None
    if missing := sorted(info["missing_keys"]):  # which transformers fills with noise
        raise ConfigError(f"{checkpoint} lacks {len(missing)} of the model's weights, such as {missing[0]}")
    network.generation_config = transformers.GenerationConfig()  # the gateway has read the checkpoint's
    return Model(network, str(checkpoint), device, cast(Dtype, dtype))


@dataclass(frozen=True)
class Model:
    """A model on its device. One thread at a time may use it."""

    network: Any
    checkpoint: str
    device: str
    dtype: Dtype

    def facts(self, eos_token_ids: tuple[int, ...]) -> EngineFacts:
        """What there is to know of it. It wants pixels in its own dtype."""
        text = self.network.config.get_text_config()
        return EngineFacts(
            model_name=Path(self.checkpoint).name,
            model_type=self.network.config.model_type,
            pixel_dtype=self.dtype,
            max_context=text.max_position_embeddings,
            eos_token_ids=eos_token_ids,
            checkpoint=self.checkpoint,
            vocab_size=text.vocab_size,
        )

    def answer(self, request: EngineRequest, eos_token_ids: tuple[int, ...], tell: Callable[[Delta], None]) -> None:
        """Tell each token as it is chosen; what ``tell`` raises ends the answer, and is raised.

        The tensors are copied before anything is computed.
        """
        sampling, prompt = request.sampling, len(request.token_ids)
        stops = sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)})
        room = self.network.config.get_text_config().max_position_embeddings - prompt
        limit = min(sampling.max_tokens or room, room)
        recorder = _Recorder(sampling.logprobs)
        choosing = transformers.GenerationConfig(
            do_sample=sampling.temperature >= _GREEDY_BELOW,
            max_new_tokens=limit,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else None,
            **({} if sampling.temperature < _GREEDY_BELOW else _NEUTRAL),
        )
        torch.seed() if sampling.seed is None else torch.manual_seed(sampling.seed)
        self.network.generate(
            **self._inputs(request),
            generation_config=choosing,
            logits_processor=[recorder, *self._processors(sampling, prompt, stops)],
            streamer=_Streamer(recorder, request, stops, limit, tell),
        )

    def _inputs(self, request: EngineRequest) -> dict[str, Any]:
        """What the network takes of all that is known of a request, copied to its device."""
        ids = torch.tensor([request.token_ids])
        found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if request.images is not None:
            found["mm_token_type_ids"] = (ids == request.images.placeholder_id).long()
            found |= {name: _torch(array) for name, array in _arrays(request.images).items()}
        known = inspect.signature(self.network.forward).parameters
        return {name: tensor.to(self.device, copy=True) for name, tensor in found.items() if name in known}

    def _processors(self, sampling: Sampling, prompt: int, stops: list[int]) -> list[Any]:
        """What decides between tokens, in vLLM's order."""
        found: list[Any] = []
        if sampling.min_tokens and stops:
            found.append(
                transformers.MinNewTokensLengthLogitsProcessor(prompt, sampling.min_tokens, stops, device=self.device)
            )
        if sampling.repetition_penalty not in (None, 1.0):
            found.append(transformers.RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
        if sampling.temperature < _GREEDY_BELOW:
            return found
        if sampling.temperature != 1.0:
            found.append(transformers.TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.min_p:
            found.append(transformers.MinPLogitsWarper(float(sampling.min_p)))
        if sampling.top_k is not None and sampling.top_k > 0:
            found.append(transformers.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None and sampling.top_p < 1:
            found.append(transformers.TopPLogitsWarper(float(sampling.top_p)))
        return found


def _arrays(images: Images) -> dict[str, NDArray[Any]]:
    """transformers' arrays for the pictures: those of the engine, and those of the plans, which vLLM does without."""
    sizes = {tensor.sizes for tensor in images.tensors}
    planned = {name: np.concatenate([plan.aux[name] for plan in images.plans]) for name in images.plans[0].aux}
    return planned | {tensor.name: _joined(tensor) for tensor in images.tensors if tensor.name not in sizes}


def _joined(tensor: Tensor) -> NDArray[Any]:
    """The parts one after the other; a smaller picture leaves a gap of zeros at its right and below."""
    most = tuple(map(max, zip(*(part.shape[1:] for part in tensor.parts), strict=True)))
    if all(part.shape[1:] == most for part in tensor.parts):
        return tensor.joined()
    whole = np.zeros((sum(len(part) for part in tensor.parts), *most), tensor.parts[0].dtype)
    start = 0
    for part in tensor.parts:
        whole[(slice(start, start + len(part)), *map(slice, part.shape[1:]))] = part
        start += len(part)
    return whole


def _torch(array: NDArray[Any]) -> Any:
    """The same memory as a torch tensor. numpy knows bfloat16 from a package that torch does not."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@dataclass
class _Recorder:
    """A logits processor that leaves them as they are and remembers, where ``asked``, what they say.

    ``asked`` is how many alternatives are wanted, or None. There is an entry for each token not told yet.
    """

    asked: int | None
    scores: list[Any] = field(default_factory=list)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self.asked is not None:
            self.scores.append(scores[0].log_softmax(-1))
        return scores

    def told(self, token: int) -> tuple[TokenLogprob, ...]:
        """The log-probability of the next token."""
        if self.asked is None:
            return ()
        scores = self.scores.pop(0)
        values, ids = scores.topk(self.asked)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return (TokenLogprob(token, scores[token].item(), top),)


class _Streamer:
    """Hears of the prompt first, and then of every token."""

    def __init__(
        self,
        recorder: _Recorder,
        request: EngineRequest,
        stops: Collection[int],
        limit: int,
        tell: Callable[[Delta], None],
    ) -> None:
        self._recorder = recorder
        self._request = request
        self._stops = stops
        self._limit = limit
        self._tell = tell
        self._sent = -1

    def put(self, value: Any) -> None:
        """A token of the answer, or the prompt."""
        self._sent += 1
        if not self._sent:
            return
        token = int(value[0])
        ended = token in self._stops
        self._tell(
            Delta(
                (token,),
                "stop" if ended else "length" if self._sent == self._limit else None,
                prompt_tokens=len(self._request.token_ids),
                completion_tokens=self._sent,
                matched_stop=token if token in self._request.sampling.stop_token_ids else None,
                logprobs=self._recorder.told(token),
            )
        )

    def end(self) -> None:
        """The answer has been told whole."""
