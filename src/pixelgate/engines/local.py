"""An engine inside the process, for a first run with nothing to download: it reads the text in the tensors.

The reader is handed what would go to a GPU and never sees the uploaded file. It undoes layout and
normalisation and recognises the text in the picture that comes out: an answer that makes sense shows that
the tensors do too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from pixelgate.engines.engine import Delta, EngineFacts, EngineRequest, Sampling
from pixelgate.errors import ConfigError, EngineError, EngineUnavailableError, RequestError
from pixelgate.pixels.plan import FloatView, ImagePlan
from pixelgate.pixels.unpack import unpack

URL = "local:reader"
NO_PICTURE = "I am a reader: all I can do is read the text in a picture. Please send one with your message."
NO_TEXT = "I find no readable text in the picture."

# onnxruntime would take every core; the gateway needs some of them.
_THREADS = 2
# The recogniser enlarges a picture until its short side has 736 pixels: seconds of work for a narrow one,
# so that is first padded to this ratio of its sides.
_NARROWEST = 1 / 8

Recognize = Callable[[NDArray[np.uint8]], list[str]]
_T = TypeVar("_T")


class ReaderEngine:
    """Answers with the text in the request's pictures, a paragraph for each; the question is not looked at.

    ``encode`` turns a piece of the answer into token ids; it neither adds special tokens nor recognises
    them in the text. ``eos_token_id`` ends an answer that ``max_tokens`` does not cut short; no other
    sampling parameter matters here, and those that promise something about the answer are refused. One
    picture is read at a time, in a thread of its own, in about half a second; closing the iterator drops the
    pictures not yet begun. The packages of the ``reader`` extra are imported by the constructor, which raises
    ConfigError when they are missing.
    """

    def __init__(self, *, model_type: str, encode: Callable[[str], Sequence[int]], eos_token_id: int) -> None:
        self._model_type = model_type
        self._encode = encode
        self._eos_token_id = eos_token_id
        self._recognize = _load_recognizer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._warm = False
        self._closed = False

    @property
    def url(self) -> str:
        """A name in the place of an address."""
        return URL

    async def warm(self) -> None:
        """Load the models and read one word: a second that the first request need not wait for."""
        if not self._warm:
            await self._on_thread(lambda: self._recognize(_sample()))
            self._warm = True

    async def describe(self) -> EngineFacts:
        """The reader's facts: it wants the normalised float32 tensors. Warms up first."""
        await self.warm()
        return EngineFacts(
            model_name="reader",
            model_type=self._model_type,
            pixel_dtype="float32",
            eos_token_ids=(self._eos_token_id,),
        )

    async def healthy(self) -> bool:
        """True until closed."""
        return not self._closed

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        """Yield each picture's text as soon as it has been read, a token at a time."""
        _refuse_promises(request.sampling)
        # Unpacked before the first delta: after it the tensors' memory may be another request's.
        pictures = [await self._on_thread(partial(_picture, plan, part)) for plan, part in _tensors(request)]
        limit = request.sampling.max_tokens or math.inf
        prompt_tokens, sent = len(request.token_ids), 0
        for number in range(max(len(pictures), 1)):
            for token in self._encode(await self._paragraph(pictures, number)):
                sent += 1
                yield Delta((token,), "length" if sent == limit else None, prompt_tokens, sent)
                if sent == limit:
                    return
                # Other requests get their turn, as they do while an engine computes.
                await asyncio.sleep(0)
        yield Delta((self._eos_token_id,), "stop", prompt_tokens, sent + 1)

    async def close(self) -> None:
        """Refuse the pictures not yet begun and wait for the one being read."""
        self._closed = True
        await asyncio.to_thread(self._thread.shutdown)

    async def _paragraph(self, pictures: Sequence[NDArray[np.uint8]], number: int) -> str:
        if not pictures:
            return NO_PICTURE
        lines = await self._on_thread(partial(self._recognize, pictures[number]))
        if len(pictures) == 1:
            return "\n".join(("I read in the picture:", "", *lines)) if lines else NO_TEXT
        gap = "\n\n" if number else ""
        return gap + "\n".join((f"Picture {number + 1}:", *(lines or [NO_TEXT])))

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        """Do ``work`` in the reader's thread."""

        def guarded() -> _T:
            self._require_open()
            try:
                return work()
            except Exception as failure:
                raise EngineError("The reader failed on a picture.") from failure

        self._require_open()
        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    def _require_open(self) -> None:
        if self._closed:
            raise EngineUnavailableError("The reader has been closed.")


def _refuse_promises(sampling: Sampling) -> None:
    promises = {
        "n": sampling.n > 1,
        "logprobs": sampling.logprobs is not None,
        "logit_bias": bool(sampling.logit_bias),
        "response_format": sampling.constraint is not None,
    }
    for name, present in promises.items():
        if present:
            raise RequestError(f"the reader cannot do what {name} asks for", param=name)


def _tensors(request: EngineRequest) -> list[tuple[ImagePlan, NDArray[Any]]]:
    images = request.images
    return list(zip(images.plans, images.tensors[0].parts, strict=True)) if images else []


def _picture(plan: ImagePlan, part: NDArray[Any]) -> NDArray[np.uint8]:
    """The picture in the view with most tiles, whose print is largest; views of floats are but a smaller whole."""
    if part.ndim > len(plan.shape):  # filled up to the tiles of another picture
        part = part[0, : plan.shape[0]]
    views = plan.views
    largest = max(range(len(views)), key=lambda i: (views[i].tiles, not isinstance(views[i], FloatView)))
    return unpack(plan, part, largest)


def _load_recognizer() -> Recognize:
    """Import the recogniser. Its models come with the package and load with the first picture."""
    install = "pip install 'pixelgate[gateway,reader]'"
    try:
        import onnxruntime
        import rapidocr
    except ImportError:
        raise ConfigError(f"The reader engine needs packages that are not installed: {install}") from None

    models = Path(rapidocr.__file__).parent / "models"
    params: dict[str, object] = {
        "Global.log_level": "critical",
        "EngineConfig.onnxruntime.intra_op_num_threads": _THREADS,
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
    }
    for section, name in (
        ("Det", "PP-OCR*_det_*.onnx"),
        ("Cls", "*_cls_*.onnx"),
        ("Rec", "PP-OCR*_rec_*.onnx"),
    ):
        path = max(models.glob(name), default=None)
        if path is None:
            raise ConfigError(f"The installed rapidocr lacks the models of its version 3.10: {install}")
        # A model named by its path is taken as it is; otherwise it would be fetched if its checksum differed.
        params[f"{section}.model_path"] = str(path)
    onnxruntime.set_default_logger_severity(4)
    ocr: Any = rapidocr.RapidOCR(params=params)

    def recognize(picture: NDArray[np.uint8]) -> list[str]:
        height, width, _ = picture.shape
        least = math.ceil(max(height, width) * _NARROWEST)
        picture = np.pad(picture, ((0, max(0, least - height)), (0, max(0, least - width)), (0, 0)))
        # OpenCV's order, blue first
        result = ocr(np.ascontiguousarray(picture[..., ::-1]))
        return _lines(result.boxes, result.txts) if result.txts else []

    return recognize


def _lines(boxes: NDArray[np.float32], texts: Sequence[str]) -> list[str]:
    """Texts in reading order, one string a line.

    ``boxes`` is [n, 4, 2]: corners as (x, y), clockwise from the top left. Lines are taken to be parallel,
    not level: their common direction is that of the boxes together, the long ones counting most.
    """
    right = (boxes[:, 1] - boxes[:, 0] + boxes[:, 2] - boxes[:, 3]).sum(axis=0)
    right = right / np.hypot(*right)
    down = np.array([-right[1], right[0]])
    along, across = boxes.mean(axis=1) @ right, boxes.mean(axis=1) @ down
    heights = (boxes[:, 3] - boxes[:, 0] + boxes[:, 2] - boxes[:, 1]) @ down / 2

    lines: list[list[int]] = []
    for index in np.argsort(across).tolist():
        above = lines[-1][-1] if lines else None
        if above is not None and across[index] - across[above] < min(heights[index], heights[above]) / 2:
            lines[-1].append(index)
        else:
            lines.append([index])
    return [" ".join(texts[index] for index in sorted(line, key=along.__getitem__)) for line in lines]


def _sample() -> NDArray[np.uint8]:
    """A picture of one word."""
    picture = Image.new("RGB", (196, 84), "white")
    ImageDraw.Draw(picture).text((98, 42), "ready", "black", ImageFont.load_default(44), anchor="mm")
    return np.asarray(picture)
