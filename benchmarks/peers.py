"""The named peers, each as a function from an encoded picture to the float32 tensor of Qwen2.5-VL."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image

CHECKPOINT = Path(__file__).parents[1] / "tests" / "goldens" / "checkpoints" / "qwen2_5_vl"
Contender = Callable[[bytes], np.ndarray]


def transformers(backend: str, *, own_decoder: bool = False) -> Contender:
    """transformers with pictures opened by Pillow, as its users do; or with torchvision's own JPEG decoder."""
    import torch
    import torchvision
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    torch.set_num_threads(1)
    config = json.loads((CHECKPOINT / "preprocessor_config.json").read_text())
    cls = Qwen2VLImageProcessorPil if backend == "pil" else Qwen2VLImageProcessor
    processor = cls(**{k: v for k, v in config.items() if not k.endswith(("_type", "_class"))})

    def opened(data: bytes) -> np.ndarray:
        return processor(PIL.Image.open(io.BytesIO(data)), return_tensors="pt")["pixel_values"].numpy()

    def decoded(data: bytes) -> np.ndarray:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        mode = torchvision.io.ImageReadMode.RGB
        return processor(torchvision.io.decode_image(encoded, mode), return_tensors="pt")["pixel_values"].numpy()

    return decoded if own_decoder else opened


def hf_processors_rs(backend: str) -> Contender:
    """hf-processors-rs, a port to Rust, on one thread, from encoded bytes."""
    import hf_processors_rs

    processor = hf_processors_rs.AutoImageProcessor.from_pretrained(str(CHECKPOINT))
    processor.backend = backend

    def run(data: bytes) -> np.ndarray:
        return processor([data], num_threads=1)["pixel_values"]

    return run
