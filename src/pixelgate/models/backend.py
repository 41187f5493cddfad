"""Whose numbers a processor gives: an image processor of transformers, or the code that a checkpoint brings along."""

from typing import Literal

Backend = Literal["torchvision", "pil", "remote"]
