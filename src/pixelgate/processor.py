"""The library: a checkpoint's image processor, from pictures of any kind to the model's input arrays."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import PIL
import PIL.Image
from numpy.typing import NDArray

from pixelgate._version import __version__
from pixelgate.errors import KernelError, OptionError, RequestError, TooLargeError
from pixelgate.media import decode as decoder
from pixelgate.media import fast, formats
from pixelgate.media.policy import MediaPolicy
from pixelgate.models import checkpoint as checkpoints
from pixelgate.models import family as families
from pixelgate.models import hub
from pixelgate.models.backend import Backend
from pixelgate.models.batch import Batch
from pixelgate.models.checkpoint import Checkpoint
from pixelgate.models.family import Family
from pixelgate.pixels.affine import NUMPY_DTYPES
from pixelgate.pixels.kernels import MAX_SIDE
from pixelgate.pixels.plan import FloatView, ImagePlan, execute
from pixelgate.pixels.resample import PillowOrder

Rgb = Literal["pixelgate", "hf"]
ImageLike: TypeAlias = "PIL.Image.Image | NDArray[np.uint8] | bytes | bytearray | memoryview | str | Path"


class ImageInputs(Mapping[str, NDArray[Any]]):
    """The arrays of one call, under transformers' own names, with the plans they came from.

    ``token_counts[i]`` is the number of placeholder tokens of image i.
    """

    def __init__(
        self,
        arrays: Mapping[str, NDArray[Any]],
        parts: Sequence[Mapping[str, NDArray[Any]]],
        plans: Sequence[ImagePlan],
    ) -> None:
        self._arrays = dict(arrays)
        self._parts = tuple(parts)
        self.plans = tuple(plans)
        self.token_counts = tuple(plan.tokens for plan in plans)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        arrays = ", ".join(f"{name}: {a.dtype}{list(a.shape)}" for name, a in self._arrays.items())
        return f"ImageInputs({arrays}; {len(self.plans)} images, {sum(self.token_counts)} tokens)"

    def per_image(self, index: int) -> dict[str, NDArray[Any]]:
        """Image ``index``'s share of every array, without gaps: views, not copies.

        Shapes are those that the image has alone: [patches, elements], or [tiles, 3, height, width].
        """
        return dict(self._parts[index])


@dataclass(frozen=True)
class Processor:
    """A checkpoint's image processor. Made by `load`; safe to share between threads."""

    checkpoint: Checkpoint
    family: Family
    backend: Backend
    pillow_order: PillowOrder
    policy: MediaPolicy

    def with_options(self, /, **options: Any) -> Processor:
        """The same processor with a call's options made its own, such as ``max_pixels`` of Qwen-VL.

        Options go by the names of transformers' call, which are those of the image processor's settings. Raises
        OptionError, naming what the family knows, for one that is unknown or impossible.
        """
        if not options:
            return self
        checkpoint = self.checkpoint.with_options(options)
        family = families.from_checkpoint(checkpoint, backend=self.backend, pillow_order=self.pillow_order)
        return replace(self, checkpoint=checkpoint, family=family)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.checkpoint.options.items())
        return f"Processor({str(self.checkpoint.path)!r}, backend={self.backend!r}, rgb={self.policy.rgb!r}{options})"

    def plan(self, *, height: int, width: int, images_in_sample: int = 1, **options: Any) -> ImagePlan:
        """What a picture of this size will become: ``.tokens``, ``.nbytes``, ``.views``; no pixel is touched.

        ``images_in_sample`` is the number of pictures in its sample, which matters to LLaVA-OneVision; ``options``
        are as in `with_options`.
        """
        if options:
            return self.with_options(**options).plan(height=height, width=width, images_in_sample=images_in_sample)
        try:
            height, width = operator.index(height), operator.index(width)
            images_in_sample = operator.index(images_in_sample)
        except TypeError:
            found = f"{height!r}, {width!r} and {images_in_sample!r}"
            raise OptionError(f"height, width and images_in_sample must be whole numbers, not {found}") from None
        if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
            raise OptionError(f"a picture has 1 to {MAX_SIDE} pixels a side, not {width}x{height}")
        if images_in_sample < 1:
            raise OptionError(f"images_in_sample counts the picture itself, so it cannot be {images_in_sample}")
        return self.family.plan(height, width, images_in_sample=images_in_sample)

    def __call__(
        self,
        images: ImageLike | Sequence[ImageLike] | Sequence[Sequence[ImageLike]],
        *,
        out: NDArray[Any] | None = None,
        dtype: str | None = None,
        **options: Any,
    ) -> ImageInputs:
        """Turn one picture or a list of them into the model's input arrays.

        A picture is a ``PIL.Image``, a uint8 array [height, width, 3], encoded bytes, or a path. A list of lists holds
        the pictures of each sample, which matters to families that treat a picture alone otherwise than several
        together; a flat list has one picture a sample. ``dtype`` is that of the pixel tensor: None (what transformers
        returns), "float32", "bfloat16", "float16", or "uint8" (the pixels before normalisation). ``out`` is
        C-contiguous memory of the result's shape and dtype for the pixel tensor. ``options`` are as in
        `with_options`.
        """
        if options:
            return self.with_options(**options)(images, out=out, dtype=dtype)
        samples = _as_samples(images)
        pictures: list[NDArray[np.uint8]] = []
        plans: list[ImagePlan] = []
        for sample in samples:
            for image in sample:
                try:
                    picture = self.rgb(image)
                    height, width = picture.shape[:2]
                    plans.append(self.plan(height=height, width=width, images_in_sample=len(sample)))
                except RequestError as error:
                    where = f"images[{len(pictures)}]"
                    error.param = error.param or where
                    if len(samples) > 1 or len(sample) > 1:
                        error.message = f"{where}: {error.message}"
                    raise
                pictures.append(picture)
        if not pictures:
            raise OptionError("give at least one picture")
        dtype = _checked_dtype(dtype) or plans[0].dtype
        batch = self.family.collate(plans)
        if dtype == "uint8":
            refuse_uint8(plans[0], batch)
        if out is None:
            try:
                out = np.empty(batch.shape, NUMPY_DTYPES[dtype])
            except MemoryError:
                size = math.prod(batch.shape) * np.dtype(NUMPY_DTYPES[dtype]).itemsize
                raise TooLargeError(f"there is no memory for a result of {size >> 20} MiB") from None
        elif not isinstance(out, np.ndarray) or out.shape != batch.shape or out.dtype != NUMPY_DTYPES[dtype]:
            found = f"{out.dtype} {list(out.shape)}" if isinstance(out, np.ndarray) else type(out).__name__
            raise KernelError(f"out must be an array {dtype} {list(batch.shape)}, not {found}")
        elif not out.flags.writeable:
            raise KernelError("out is read-only")
        elif any(np.may_share_memory(out, picture) for picture in pictures):
            raise KernelError("out shares memory with a picture")
        if batch.gaps:
            out[:] = 0
        pixels = [out[slot] for slot in batch.slots]
        for plan, picture, part in zip(plans, pictures, pixels, strict=True):
            execute(plan, picture, part, dtype=dtype)
        name = self.family.pixels_name
        parts = [{name: part, **plan.aux} for plan, part in zip(plans, pixels, strict=True)]
        return ImageInputs({name: out, **self.family.outputs(plans, [len(s) for s in samples])}, parts, plans)

    def rgb(self, image: ImageLike) -> NDArray[np.uint8]:
        """A picture of any accepted kind as rows for `execute`, by this processor's decode policy.

        uint8 [height, width, 3], or 4 with a byte that means nothing; may be read-only, and the picture's own memory.
        """
        if isinstance(image, PIL.Image.Image):
            return decoder.from_pil(image, self.policy, drops_alpha=self.policy.rgb == "hf" and self.family.drops_alpha)
        if isinstance(image, np.ndarray):
            return decoder.from_array(image)
        if isinstance(image, str | Path):
            image = decoder.read_path(image, self.policy)
        elif not isinstance(image, bytes | bytearray | memoryview):
            raise RequestError(
                f"a picture must be a PIL.Image, a uint8 array, encoded bytes or a path, not {type(image).__name__}"
            )
        return decoder.decode_rows(bytes(image), self.policy, self.decoding)

    def header(self, data_or_path: bytes | str | Path) -> decoder.Header:
        """The upright size and the format of an encoded picture; no pixel is decoded."""
        if isinstance(data_or_path, str | Path):
            data_or_path = decoder.read_path(data_or_path, self.policy)
        return decoder.header(data_or_path, self.policy, self.decoding)

    @property
    def decoding(self) -> decoder.Backend:
        """Whose way with files ``rgb="hf"`` follows: remote code is handed pictures that Pillow opened."""
        return "torchvision" if self.backend == "torchvision" else "pil"

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits over everything that decides the pixels, besides the encoded picture and the call."""
        rgb = (self.policy.rgb, self.policy.background_rgb)
        facts = (self.family, self.backend, rgb, __version__, PIL.__version__, *fast.VERSIONS, *formats.VERSIONS)
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def refuse_uint8(plan: ImagePlan, batch: Batch) -> None:
    """Raise OptionError where bytes before normalisation cannot express the tensor."""
    if any(isinstance(view, FloatView) for view in plan.views):
        raise OptionError("dtype 'uint8' is not possible: the first tile is interpolated from normalised floats")
    if batch.gaps:
        raise OptionError(
            "dtype 'uint8' is not possible: pictures of different shapes leave gaps of 0.0 in the batch; "
            "give them one by one"
        )


def load(
    checkpoint: str | Path,
    *,
    revision: str | None = None,
    backend: Backend | None = None,
    pillow_order: PillowOrder = "13",
    rgb: Rgb = "pixelgate",
    policy: MediaPolicy | None = None,
) -> Processor:
    """The image processor of a checkpoint: a directory, or an id on the Hugging Face hub, at a branch, tag or commit.

    Its weights are not needed. A string that names a directory is never taken for an id. Of an id the small files are
    downloaded to huggingface_hub's cache (extra ``hub``); ``revision`` None is the main branch.
    ``backend`` names the transformers backend whose numbers to reproduce, "torchvision" or "pil", or "remote" for code
    that a checkpoint brings along (Phi); None is "torchvision" where there is a choice. ``pillow_order`` is the Pillow
    release whose pass order pil and remote follow: "13", "12.2" (12.2 and 12.3) or "12.1" (and older).
    ``rgb="hf"`` converts every kind of input as transformers itself does, instead of by pixelgate's policy (upright, on
    white, 16 bit scaled). ``policy`` holds the decode limits, a ``pixelgate.media.policy.MediaPolicy``.
    Raises CheckpointError for what cannot be read or is not supported.
    """
    if not isinstance(checkpoint, str | Path) or not str(checkpoint):
        raise OptionError(f"a checkpoint is a directory or a hub id, not {checkpoint!r}", param="checkpoint")
    if not isinstance(policy, MediaPolicy | None):
        raise OptionError(f"policy must be a MediaPolicy, not {policy!r}", param="policy")
    for name, value, allowed in (
        ("backend", backend, Backend),
        ("pillow_order", pillow_order, PillowOrder),
        ("rgb", rgb, Rgb),
    ):
        if not (value is None and name == "backend") and value not in get_args(allowed):
            raise OptionError(f"{name} must be one of {', '.join(get_args(allowed))}, not {value!r}", param=name)
    settings = checkpoints.read(hub.find(checkpoint, revision))
    chosen = families.choose_backend(settings, backend)
    family = families.from_checkpoint(settings, backend=chosen, pillow_order=pillow_order)
    return Processor(settings, family, chosen, pillow_order, replace(policy or MediaPolicy(), rgb=rgb))


def decode(
    data_or_path: bytes | bytearray | memoryview | str | Path, policy: MediaPolicy | None = None
) -> NDArray[np.uint8]:
    """Decode a picture to upright uint8 RGB [height, width, 3]: alpha on white, 16 bit scaled to 8, first frame."""
    policy = policy or MediaPolicy()
    if isinstance(data_or_path, str | Path):
        return decoder.decode(decoder.read_path(data_or_path, policy), policy)
    return decoder.decode(bytes(data_or_path), policy)


def _as_samples(images: Any) -> list[Sequence[ImageLike]]:
    """Pictures by sample: a flat list has one picture a sample, as in transformers."""
    if not isinstance(images, list | tuple):
        return [[images]]
    nested = [isinstance(image, list | tuple) for image in images]
    if any(nested) and not all(nested):
        raise RequestError("give either pictures, or lists of pictures, one for each sample; not both")
    return [sample for sample in images if sample] if any(nested) else [[image] for image in images]


def _checked_dtype(dtype: str | None) -> str | None:
    if dtype is not None and (not isinstance(dtype, str) or dtype not in NUMPY_DTYPES):
        raise OptionError(f"dtype must be one of {', '.join(NUMPY_DTYPES)}, not {dtype!r}", param="dtype")
    return dtype
