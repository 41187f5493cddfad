"""LLaVA 1.5: the shortest edge to one size, and a centre crop; the original LLaVA pads to a square first.

Source: transformers 5.24 ``models/clip/image_processing_clip.py``, ``models/llava/image_processing_llava.py`` and their
pil counterparts; ``processing_llava.py`` for the placeholders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from pixelgate.errors import CheckpointError, ImageRefusedError
from pixelgate.models.backend import Backend
from pixelgate.models.batch import Batch, concatenated
from pixelgate.models.checkpoint import Checkpoint, Settings
from pixelgate.models.placeholder import OnePlaceholder
from pixelgate.models.steps import BOTH, COMMON_OPTIONS, Steps, take_steps
from pixelgate.pixels.affine import DTYPE_NAMES
from pixelgate.pixels.kernels import MAX_SIDE, Window
from pixelgate.pixels.plan import Canvas, ImagePlan, Tiles, View
from pixelgate.pixels.resample import PillowOrder
from pixelgate.pixels.tensor import Tensor

MODEL_TYPES = ("llava",)
PROCESSORS: Mapping[str, tuple[Backend, ...]] = {"CLIPImageProcessor": BOTH, "LlavaImageProcessor": BOTH}
OPTIONS = ("do_resize", "do_pad", *COMMON_OPTIONS)


@dataclass(frozen=True)
class Llava(OnePlaceholder):
    """The arithmetic of one LLaVA checkpoint."""

    shortest_edge: int
    crop: tuple[int, int]
    pad_to_square: bool
    tokens: int
    steps: Steps
    placeholder_id: int
    placeholder: str = "<image>"
    pixels_name: str = "pixel_values"
    drops_alpha: bool = False

    def plan(self, height: int, width: int, *, images_in_sample: int = 1) -> ImagePlan:
        """What a picture of this size becomes: always one tile. Raises ImageRefusedError for an extreme ratio."""
        pre_pad = square_canvas(height, width, self.steps.affine.mean) if self.pad_to_square else None
        padded = (pre_pad.height, pre_pad.width) if pre_pad else (height, width)
        resized = shortest_edge_size(*padded, self.shortest_edge) if self.steps.resizes else padded
        if resized[0] < self.crop[0] or resized[1] < self.crop[1]:
            raise ImageRefusedError(
                f"without do_resize a picture must cover the crop of {self.crop[1]}x{self.crop[0]}; "
                f"this one is {width}x{height}"
            )
        if max(resized) > MAX_SIDE:
            raise ImageRefusedError(
                f"a picture of {width}x{height} is too narrow: it would be resized to {resized[1]}x{resized[0]} before "
                f"it is cropped, and {MAX_SIDE} a side is the most"
            )
        top, left = (resized[0] - self.crop[0]) // 2, (resized[1] - self.crop[1]) // 2
        view = View(resized, self.steps.resample, pre_pad=pre_pad, crop=Window(top, left, *self.crop))
        return ImagePlan(height, width, (view,), Tiles(), self.steps.affine, self.tokens)

    def collate(self, plans: Sequence[ImagePlan]) -> Batch:
        """[pictures, 3, height, width]."""
        return concatenated(plans)

    def outputs(self, plans: Sequence[ImagePlan], samples: Sequence[int]) -> Mapping[str, NDArray[Any]]:
        """Nothing besides the pixels."""
        return {}

    def tensors(self, plans: Sequence[ImagePlan], pixels: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        """The model inputs for an engine."""
        return (Tensor("pixel_values", DTYPE_NAMES[pixels[0].dtype], tuple(pixels), "batched"),)


def shortest_edge_size(height: int, width: int, edge: int) -> tuple[int, int]:
    """(height, width) with the shorter side at ``edge``: ``get_resize_output_image_size`` of transformers."""
    short, long = (width, height) if width <= height else (height, width)
    longer = int(edge * long / short)
    return (longer, edge) if width <= height else (edge, longer)


def square_canvas(height: int, width: int, mean: tuple[float, float, float]) -> Canvas | None:
    """The square that a picture is centred on, in the colour of the mean; None where it is one."""
    if height == width:
        return None
    side = max(height, width)
    red, green, blue = (int(value * 255) for value in mean)
    return Canvas((side - height) // 2, (side - width) // 2, side, side, (red, green, blue))


def check_fill(mean: tuple[float, float, float]) -> None:
    """Raise CheckpointError where a mean is no colour to pad with."""
    if not all(0 <= value <= 1 for value in mean):
        raise CheckpointError(f"image_mean must be from 0 to 1 to pad with, not {list(mean)}")


def from_checkpoint(checkpoint: Checkpoint, *, backend: Backend, pillow_order: PillowOrder) -> Llava:
    """Read the settings; defaults are those of transformers' classes where the checkpoint is silent."""
    settings = checkpoint.image_settings()
    steps = take_steps(settings, backend=backend, pillow_order=pillow_order, square=False, may_keep_size=True)
    edge = shortest_edge(settings)
    settings.expect("do_center_crop", True)
    crop = settings.size("crop_size", 224)
    settings.nullable("do_pad")
    pads = settings.take("do_pad", bool, False) and checkpoint.image_processor == "LlavaImageProcessor"
    settings.expect("use_square_size", False)
    settings.finish()
    if max(crop) > edge:
        raise CheckpointError(f"crop_size {crop} is larger than the shortest edge {edge}: padding is not supported")
    if pads:
        check_fill(steps.affine.mean)
    vision = Vision.read(checkpoint)
    tokens = vision.features(*crop)
    return Llava(edge, crop, pads, tokens, steps, checkpoint.image_token_id, checkpoint.image_token("<image>"))


def shortest_edge(settings: Settings) -> int:
    """``size``, in either of its spellings: a number, or a mapping with ``shortest_edge``."""
    value = settings.take("size", (int, dict), {"shortest_edge": 224})
    if isinstance(value, int):
        value = {"shortest_edge": value}
    size = Settings(value, "size of the image processor's configuration")
    edge = size.count("shortest_edge")
    size.finish()
    return edge


def drops_class_token(strategy: object) -> bool:
    """What ``vision_feature_select_strategy`` says of the vision tower's first feature. Raises CheckpointError."""
    if strategy not in ("default", "full"):
        raise CheckpointError(f"vision_feature_select_strategy must be 'default' or 'full', not {strategy!r}")
    return strategy == "default"


@dataclass(frozen=True)
class Vision:
    """How many features a model's vision tower gives for a tile; from processor_config.json, or config.json."""

    patch: int
    additional: int
    drops_class_token: bool

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Vision:
        """Read from the checkpoint. Raises CheckpointError."""
        processor, config = checkpoint.processor, checkpoint.config
        strategy = processor.get("vision_feature_select_strategy", config.get("vision_feature_select_strategy"))
        vision = checkpoint.section("vision_config")
        values = Settings({"patch_size": vision.get("patch_size"), **processor}, "the processor's configuration")
        additional = values.take("num_additional_image_tokens", int, 0)
        return cls(values.count("patch_size"), additional, drops_class_token(strategy))

    def features(self, height: int, width: int) -> int:
        """Tokens of one tile."""
        return (height // self.patch) * (width // self.patch) + self.additional - self.drops_class_token
