"""The tasks that write a tensor, or a box of it: copied, cast, cut out of a stack, with an adapter's product added."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_ckpt.plan.boxes import Box
from fsdp_ckpt.plan.output import OutputTensor
from fsdp_ckpt.run.engine import Task
from fsdp_ckpt.run.tasks import ChunkIndex, cut_tasks

__all__ = ["source_box", "tasks_of"]


def source_box(tensor: OutputTensor, box: Box) -> Box:
    """Return a box of the result in the coordinates of its source.

    Example:
        >>> from fsdp_ckpt.catalog import DTYPES, TensorEntry
        >>> from fsdp_ckpt.plan.output import Window
        >>> stack = TensorEntry(key="w", name="w", dtype=DTYPES["float32"], shape=(4, 6, 5), chunks=())
        >>> layer = Window(offsets=(2, 0, 0), lengths=(1, 6, 5), shape=(6, 5))
        >>> one = OutputTensor(name="w.2", dtype=stack.dtype, source=stack, window=layer)
        >>> source_box(one, ((3, 0), (3, 5)))
        ((2, 3, 0), (1, 3, 5))
    """
    window = tensor.window
    if window is None:
        return box
    dropped = len(window.lengths) - len(window.shape)
    offsets, lengths = list(window.offsets), list(window.lengths)
    for dim, (offset, length) in enumerate(zip(*box, strict=True), start=dropped):
        offsets[dim] += offset
        lengths[dim] = length
    return tuple(offsets), tuple(lengths)


def tasks_of(
    tensor: OutputTensor, box: Box | None, *, position: int, index: ChunkIndex | None = None
) -> Iterator[Task]:
    """Yield what writes a tensor, or a box of its source, at byte ``position`` of a file.

    Args:
        tensor: The tensor.
        box: In the coordinates of its source; None for all of the tensor.
        position: Where it goes.
        index: The source's chunks, where many boxes of it are written.
    """
    if box is None and tensor.window is not None:
        box = (tensor.window.offsets, tensor.window.lengths)
    if tensor.addition is not None:
        from fsdp_ckpt.run.fold import fold_tasks  # NumPy, which merges seldom need

        yield from fold_tasks(tensor, box, position=position)
    else:
        yield from cut_tasks(tensor.source, tensor.dtype, position=position, box=box, index=index)
