"""What travels from a family to an engine: a named tensor in parts, one part per image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

DTYPES = ("float32", "bfloat16", "float16", "uint8", "int64")
Field = Literal["batched", "flat"]


@dataclass(frozen=True)
class Tensor:
    """One model input, cut along dimension 0 into one C-contiguous part per image.

    ``field`` is the engine's word for how images share it: ``batched`` (dimension 0 counts images) or ``flat``
    (images are concatenated; the int64 tensor named ``sizes`` holds the rows of each image). ``keep_on_cpu``
    marks what the model reads on the host, such as grids.
    """

    name: str
    dtype: str
    parts: tuple[NDArray[Any], ...]
    field: Field
    sizes: str | None = None
    keep_on_cpu: bool = False

    @property
    def layout(self) -> tuple[str, str, Field, str | None, bool]:
        """All but the parts: what a tensor of other pictures of this family has as well."""
        return self.name, self.dtype, self.field, self.sizes, self.keep_on_cpu

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parts joined along dimension 0."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.nbytes for part in self.parts)

    def joined(self) -> NDArray[Any]:
        """All parts as one array; a view, not a copy, when there is one part."""
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)


def of_one(tensors: Sequence[Tensor], index: int) -> Iterator[tuple[Tensor, NDArray[Any]]]:
    """Image ``index`` as if it were alone, with each tensor's name and layout, for engines that take one at a time.

    What is batched loses the dimension that counts images; tensors that only hold sizes are left out.
    """
    sizes = {tensor.sizes for tensor in tensors}
    for tensor in tensors:
        if tensor.name not in sizes:
            part = tensor.parts[index]
            yield tensor, part[0] if tensor.field == "batched" else part
