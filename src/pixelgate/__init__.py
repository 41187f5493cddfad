"""Pictures to tensors for vision-language models, bit for bit as transformers, without torch.

    import pixelgate

    processor = pixelgate.load("Qwen2.5-VL-7B-Instruct/")
    inputs = processor("photo.jpg")
    inputs["pixel_values"], inputs["image_grid_thw"], inputs.token_counts

Everything else in this package may change without notice.
"""

import os

from pixelgate import errors
from pixelgate._version import __version__
from pixelgate.pixels import binding
from pixelgate.pixels.plan import ImagePlan
from pixelgate.processor import ImageInputs, Processor, decode, load

# read once, here; everywhere else the level is an argument
binding.select_level(os.environ.get("PIXELGATE_ISA"))

__all__ = ["ImageInputs", "ImagePlan", "Processor", "__version__", "decode", "errors", "load"]
