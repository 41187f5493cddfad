"""Our arrays beside those of the checkpoint's own processor, in an installed transformers or in a running vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from pixelgate.errors import ConfigError, MediaError
from pixelgate.media.decode import read_path
from pixelgate.models.pixtral import Pixtral
from pixelgate.pixels.plan import ImagePlan
from pixelgate.pixels.tensor import of_one
from pixelgate.processor import Processor

if TYPE_CHECKING:
    from pixelgate.engines.render import Rendered


@dataclass(frozen=True)
class Verdict:
    """What became of one array; ``words`` say where it differs, or what it is."""

    name: str
    equal: bool
    words: str


def against_transformers(processor: Processor, images: Sequence[str | Path]) -> list[Verdict]:
    """Run both on the pictures, opened with Pillow, in one call. Raises ConfigError where there is nothing to run."""
    theirs = _their_processor(processor)
    opened = [_opened(image) for image in images]
    ours = processor(opened)
    kind = "pt" if processor.backend == "torchvision" else "np"
    try:
        expected = theirs(opened, return_tensors=kind, **processor.checkpoint.options)
    except Exception as failure:  # of whatever kind: it is theirs
        raise ConfigError(f"transformers refuses what pixelgate takes: {failure}") from None
    return list(compare(ours, {name: _array(value) for name, value in expected.items()}))


async def against_engine(processor: Processor, images: Sequence[str | Path], url: str, key: str = "") -> list[Verdict]:
    """Compare with what the vLLM at ``url`` would feed its model, one picture at a time. Raises EngineError."""
    from pixelgate.engines.render import render

    verdicts = []
    for number, image in enumerate(images):
        data = read_path(image, processor.policy)
        theirs = await render(url, data, processor.checkpoint.options, key)
        dtype = theirs.arrays[processor.family.pixels_name].dtype.name if theirs.arrays else None
        plan, ours = _item(processor, data, dtype)
        name = f"[{number}] " if len(images) > 1 else ""
        for verdict in (_tokens(processor, plan, theirs), *compare(ours, theirs.arrays, "the engine")):
            verdicts.append(Verdict(name + verdict.name, verdict.equal, verdict.words))
    return verdicts


def _tokens(processor: Processor, plan: ImagePlan, theirs: Rendered) -> Verdict:
    """Whether the picture takes as many tokens, and of them as many embeddings, in the engine's prompt."""
    inside = theirs.token_ids[theirs.span.offset :][: theirs.span.length]
    found = theirs.span.length, inside.count(processor.family.placeholder_id)
    expected = sum(count for _, count in processor.family.expansion(plan)), plan.tokens
    words = "{} in the prompt, {} of them embedded"
    if found == expected:
        return Verdict("tokens", True, words.format(*expected))
    return Verdict("tokens", False, f"{words.format(*expected)}, but {words.format(*found)} in the engine")


def _item(processor: Processor, data: bytes, dtype: str | None) -> tuple[ImagePlan, dict[str, NDArray[Any]]]:
    """One picture as its plan and as an engine's item: batched tensors without the dimension that counts pictures."""
    inputs = processor(data, dtype=dtype)
    pixels = inputs.per_image(0)[processor.family.pixels_name]
    tensors = processor.family.tensors(inputs.plans, [pixels])
    return inputs.plans[0], {tensor.name: array for tensor, array in of_one(tensors, 0)}


def compare(
    ours: Mapping[str, NDArray[Any]], theirs: Mapping[str, NDArray[Any]], other_side: str = "transformers"
) -> Iterator[Verdict]:
    """One verdict for each name of either side, on bytes."""
    for name in dict.fromkeys([*theirs, *ours]):
        if name not in ours or name not in theirs:
            yield Verdict(name, False, "is made by " + ("pixelgate alone" if name in ours else f"{other_side} alone"))
            continue
        mine, other = ours[name], theirs[name]
        if (mine.dtype, mine.shape) != (other.dtype, other.shape):
            yield Verdict(name, False, f"is {_described(mine)}, but {_described(other)} in {other_side}")
            continue
        wrong = _bits(mine) != _bits(other)
        yield Verdict(name, not wrong.any(), _difference(mine, other, wrong) if wrong.any() else _described(mine))


def _their_processor(processor: Processor) -> Any:
    if processor.backend == "remote":
        raise ConfigError(
            "this checkpoint's processor is code of its own, which pixelgate does not run to compare with"
        )
    try:
        from transformers import AutoImageProcessor
    except ImportError:
        raise ConfigError("parity needs transformers: pip install transformers torch torchvision") from None
    # PixtralProcessor calls its image processor with what one token covers
    options = {"patch_size": processor.family.patch} if isinstance(processor.family, Pixtral) else {}
    try:
        made = AutoImageProcessor.from_pretrained(processor.checkpoint.path, backend=processor.backend, **options)
    except (ImportError, OSError, ValueError) as failure:
        raise ConfigError(f"transformers cannot load the image processor: {failure}") from None
    if type(made).__name__.endswith("Pil") != (processor.backend == "pil"):  # it falls back with a warning
        raise ConfigError(f"transformers has no {processor.backend} backend here; is torchvision installed?")
    return made


def _opened(image: str | Path) -> PIL.Image.Image:
    try:
        return PIL.Image.open(image)
    except OSError as failure:
        raise MediaError(f"{image} cannot be opened: {failure.strerror or 'it is no picture to Pillow'}") from None


def _array(value: Any) -> NDArray[Any]:
    """transformers' tensor as an array; numpy gets a bfloat16 tensor by its bits."""
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":
        import ml_dtypes
        import torch

        return np.asarray(value.contiguous().view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
    return np.asarray(value)


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    """The elements as unsigned numbers, so that every difference counts, and NaN is equal to itself."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _described(array: NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _difference(mine: NDArray[Any], other: NDArray[Any], wrong: NDArray[np.bool_]) -> str:
    place = tuple(int(index[0]) for index in np.nonzero(wrong))
    largest = np.abs(mine.astype(np.float64) - other.astype(np.float64)).max()
    return (
        f"differs in {wrong.sum()} of {wrong.size} values ({wrong.mean():.2%}), by {largest:.6g} at most; "
        f"the first is {list(place)}: {mine[place]} instead of {other[place]}"
    )
