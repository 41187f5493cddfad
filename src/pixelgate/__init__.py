"""Pictures to tensors for vision-language models, bit for bit as transformers, without torch.

    import pixelgate

    processor = pixelgate.load("Qwen2.5-VL-7B-Instruct/")
    inputs = processor("photo.jpg")
    inputs["pixel_values"], inputs["image_grid_thw"], inputs.token_counts

Everything else in this package may change without notice.
"""

from typing import TYPE_CHECKING, Any

from pixelgate import errors
from pixelgate._version import __version__

if TYPE_CHECKING:
    from pixelgate.pixels.plan import ImagePlan
    from pixelgate.processor import ImageInputs, Processor, decode, load

__all__ = ["ImageInputs", "ImagePlan", "Processor", "__version__", "decode", "errors", "load"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: a part of this package that touches no array should not have to load numpy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pixelgate import processor

    return getattr(processor, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
