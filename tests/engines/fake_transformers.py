"""Stand-ins for torch and transformers, as far as an engine uses them: tensors are numpy's, and a model counts.

What it counts decides its answer, so that a test sees what it was given. The real ones: real_transformers.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np

VOCABULARY, CONTEXT = 64, 32
_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class FakeTensor:
    def __init__(self, array, device="cpu"):
        self.array, self.device = np.asarray(array), device

    def __eq__(self, other):
        return FakeTensor(self.array == other)

    __hash__ = None

    def __getitem__(self, key):
        return FakeTensor(self.array[key])

    def __int__(self):
        return int(self.array)

    def long(self):
        return FakeTensor(self.array.astype(np.int64))

    def view(self, dtype):
        return FakeTensor(self.array.view(_DTYPES[dtype]))

    def to(self, device, copy):
        assert copy
        return FakeTensor(self.array.copy(), device)

    def log_softmax(self, axis):
        return FakeTensor(self.array - np.log(np.exp(self.array).sum(axis)))

    def topk(self, count):
        order = np.argsort(-self.array)[:count]
        return FakeTensor(self.array[order]), FakeTensor(order)

    def tolist(self):
        return self.array.tolist()

    def item(self):
        return self.array.item()


class Step:
    """A logits processor or warper, by its arguments."""

    def __init__(self, *arguments, **named):
        self.arguments, self.named = arguments, named

    def __call__(self, input_ids, scores):
        return scores


class Network:
    """Answers with the number of placeholders, then counts up from there; notes what it was asked."""

    def __init__(self, known=("input_ids", "attention_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids")):
        text = SimpleNamespace(max_position_embeddings=CONTEXT, vocab_size=VOCABULARY)
        self.config = SimpleNamespace(model_type="qwen2_5_vl", get_text_config=lambda: text)
        self.generation_config = "the checkpoint's"
        self.asked, self.steps, self.device = [], 0, None
        self.failure = None
        self.before_token = lambda number: None
        names = ", ".join(known)
        self.forward = eval(f"lambda {names}: None")

    def to(self, device):
        self.device = device
        return self

    def eval(self):
        return self

    def generate(self, *, generation_config, logits_processor, streamer, **inputs):
        self.asked.append(SimpleNamespace(config=generation_config, processors=logits_processor, inputs=inputs))
        if self.failure:
            raise self.failure
        streamer.put(inputs["input_ids"])
        first = int(inputs["mm_token_type_ids"].array.sum()) if "mm_token_type_ids" in inputs else 1
        options = generation_config.options
        for number in range(options["max_new_tokens"]):
            self.before_token(number)
            self.steps += 1
            scores = FakeTensor(np.zeros((1, VOCABULARY)))
            scores.array[0, [first + number, 3]] = 4.0, 2.0
            for processor in logits_processor:
                scores = processor(inputs["input_ids"], scores)
            token = int(scores.array[0].argmax())
            streamer.put(FakeTensor([token]))
            if token in (options["eos_token_id"] or ()):
                break
        streamer.end()


@dataclass
class Installed:
    """What the two modules are told to do, and what they were asked for."""

    network: Network = field(default_factory=Network)
    missing_keys: tuple[str, ...] = ()
    refusal: Exception | None = None
    gpu: bool = False
    loaded: list = field(default_factory=list)
    seeds: list = field(default_factory=list)


def install(monkeypatch):
    """Both modules in the place of the real ones."""
    state = Installed()
    torch, transformers = ModuleType("torch"), ModuleType("transformers")
    for name in _DTYPES:
        setattr(torch, name, name)
    torch.cuda = SimpleNamespace(is_available=lambda: state.gpu)
    torch.tensor = torch.from_numpy = FakeTensor
    torch.ones_like = lambda tensor: FakeTensor(np.ones_like(tensor.array))
    torch.seed = lambda: state.seeds.append(None)
    torch.manual_seed = state.seeds.append

    class Auto:
        @staticmethod
        def from_pretrained(path, **options):
            state.loaded.append((path, options))
            if state.refusal:
                raise state.refusal
            return state.network, {"missing_keys": set(state.missing_keys)}

    transformers.AutoModelForImageTextToText = Auto
    transformers.GenerationConfig = lambda **options: SimpleNamespace(options=options)
    for name in ("MinNewTokensLength", "RepetitionPenalty"):
        setattr(transformers, f"{name}LogitsProcessor", type(name, (Step,), {}))
    for name in ("Temperature", "MinP", "TopK", "TopP"):
        setattr(transformers, f"{name}LogitsWarper", type(name, (Step,), {}))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.delitem(sys.modules, "pixelgate.engines.transformers_model", raising=False)
    return state
