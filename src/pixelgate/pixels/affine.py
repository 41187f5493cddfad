"""Rescale and normalise, as a table: three channels of 256 entries hold every value an 8-bit picture can become.

The two backends of transformers round in different places, so each has its own table, made here in its own operation
order. Sources, transformers 5.24: ``image_processing_backends.py`` (PilBackend and TorchvisionBackend).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Rule = Literal["pil", "torchvision", "llama4"]
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "uint8": np.dtype(np.uint8),
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in NUMPY_DTYPES.items()}  # `dtype.name` takes microseconds


def _float32(values: tuple[float, float, float]) -> NDArray[np.float32]:
    return np.array(values, np.float32)


@dataclass(frozen=True)
class Arithmetic:
    """``(x / divisor - subtract[c]) / divide[c]`` in float32: the table computed instead of looked up."""

    divisor: float
    subtract: tuple[float, float, float]
    divide: tuple[float, float, float]


@dataclass(frozen=True)
class Affine:
    """``(x * rescale_factor - mean) / std`` per channel, rounded where ``rule``'s backend rounds."""

    rule: Rule
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float = 1 / 255

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """float32 [3, 256]: channel c of value v becomes ``table[c, v]``."""
        if self.rule == "pil":
            scaled = (np.arange(256, dtype=np.float64) * self.rescale_factor).astype(np.float32)
            mean, std = _float32(self.mean), _float32(self.std)
        elif self.rule == "llama4":
            return self._bfloat16_table()
        else:
            # the fused form: the constants are scaled, not the pixels
            scaled = np.arange(256, dtype=np.float32)
            mean, std = self._scaled_constants
        table: NDArray[np.float32] = (scaled - mean[:, None]) / std[:, None]
        table.setflags(write=False)
        return table

    def _bfloat16_table(self) -> NDArray[np.float32]:
        """Every step rounded to bfloat16, as ``image_processing_llama4.py`` computes it."""

        def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
            return values.astype(NUMPY_DTYPES["bfloat16"]).astype(np.float32)

        mean, std = rounded(_float32(self.mean)), rounded(_float32(self.std))
        scaled = rounded(np.arange(256, dtype=np.float32) * np.float32(self.rescale_factor))
        table = rounded(rounded(scaled - mean[:, None]) / std[:, None])
        table.setflags(write=False)
        return table

    @property
    def _scaled_constants(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        inverse = np.float32(1.0 / self.rescale_factor)
        return _float32(self.mean) * inverse, _float32(self.std) * inverse

    @cached_property
    def _tables(self) -> dict[str, NDArray[Any]]:
        return {}

    def table_as(self, dtype: str) -> NDArray[Any]:
        """The table rounded to ``dtype`` (to nearest, ties to even); for uint8 the identity."""
        if dtype not in self._tables:
            if dtype == "uint8":
                values: NDArray[Any] = np.tile(np.arange(256, dtype=np.uint8), (3, 1))
            else:
                values = self.table.astype(NUMPY_DTYPES[dtype])
            values.setflags(write=False)
            self._tables[dtype] = values
        return self._tables[dtype]

    @cached_property
    def arithmetic(self) -> Arithmetic | None:
        """A float32 formula that gives all 768 entries bit for bit, if there is one: faster than a look-up."""
        if self.rule == "pil":
            divisor, mean, std = np.float32(255.0), _float32(self.mean), _float32(self.std)
        else:
            divisor, (mean, std) = np.float32(1.0), self._scaled_constants
        values = (np.arange(256, dtype=np.float32) / divisor - mean[:, None]) / std[:, None]
        if values.tobytes() != self.table.tobytes():
            return None
        a, b, c = (float(v) for v in mean)
        x, y, z = (float(v) for v in std)
        return Arithmetic(float(divisor), (a, b, c), (x, y, z))
