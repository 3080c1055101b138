"""Convert float elements, block by block; integers, bools, complex and float8 are never converted."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdp_ckpt.catalog import DType
from fsdp_ckpt.run.gather import numpy_dtype

__all__ = ["cast_bits"]


def cast_bits(
    values: np.ndarray[Any, np.dtype[Any]],
    src: DType,
    dst: DType,
    out: np.ndarray[Any, np.dtype[Any]] | None = None,
) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the elements of a block in another float type, rounded to nearest even as torch does.

    Args:
        values: Elements of ``src`` as raw bits (see ``gather.storage_dtype``), C-contiguous.
        src: Their type.
        dst: The type wanted.
        out: Memory for the result, of ``numpy_dtype(dst)`` and the same shape; new memory costs more than the cast.

    Values beyond the range become infinite, as with ``tensor.to(dtype)``; NaN stay NaN (which bits they have differs
    between torch's own code paths).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        source = values.view(numpy_dtype(src))
        if dst.name == "float16" and src.name in {"bfloat16", "float64"}:
            source = source.astype(np.float32)  # torch goes this way, too
        if out is None:
            return source.astype(numpy_dtype(dst))
        np.copyto(out, source, casting="unsafe")
        return out
