"""Pictures to tensors for vision-language models, bit for bit as transformers, without torch."""

from pixelgate._version import __version__

__all__ = ["__version__"]
