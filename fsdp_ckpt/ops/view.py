"""Read single tensors and slices of any checkpoint, as if it were one safetensors file."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.errors import Incompatible, UsageError
from fsdp_ckpt.layouts.registry import PathLike
from fsdp_ckpt.ops.merge_plan import plan_merge
from fsdp_ckpt.plan.boxes import intersect
from fsdp_ckpt.plan.output import OutputTensor
from fsdp_ckpt.run.sources import Sources
from fsdp_ckpt.store.remote.places import speaks_urls

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CheckpointView", "SliceView", "open_checkpoint"]


@speaks_urls
def open_checkpoint(
    path: PathLike | Sequence[PathLike], *, framework: Literal["np", "pt"] = "np", **options: Any
) -> CheckpointView:
    """Open the model of a checkpoint for reading, with the manners of ``safetensors.safe_open``.

    Nothing but metadata is read until a tensor is asked for, and then only the bytes of that tensor or slice.

    Args:
        path: Anything that ``merge`` reads; a list of folders where nodes saved to disks of their own.
        framework: ``"np"`` for NumPy arrays (bfloat16 and float8 through ml_dtypes), ``"pt"`` for torch tensors.
        **options: As for ``merge``, to see the model as it would be merged: ``dtype``, ``include``, ``exclude``,
            ``rename``, ``tie``, ``part``, ``verify``.

    Returns:
        A view; close it, or use it as a context manager.

    Raises:
        As ``merge``.

    Example:
        >>> with open_checkpoint("fixtures/edge/tied") as model:  # doctest: +SKIP
        ...     first_rows = model.get_slice("a")[:2]
    """
    if framework not in ("np", "pt"):
        raise UsageError(f"framework {framework!r} is not possible", hint='choose "np" or "pt"')
    return CheckpointView(path, framework, options)


class CheckpointView:
    """The model of a checkpoint; made by ``open_checkpoint``."""

    def __init__(
        self, path: PathLike | Sequence[PathLike], framework: Literal["np", "pt"], options: dict[str, Any]
    ) -> None:
        plan = plan_merge(path, **options)
        self._framework: Literal["np", "pt"] = framework
        self._verify = options.get("verify", True)
        self._sources = Sources(plan.roots)
        by_name = {tensor.name: tensor for tensor in plan.selection.tensors}
        self._tensors = by_name | {name: by_name[kept] for name, kept in plan.selection.tied.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def close(self) -> None:
        """Close all files."""
        self._sources.__exit__(None, None, None)

    def keys(self) -> list[str]:
        """Return the names, as a merge would write them; a tied name is there, too."""
        return list(self._tensors)

    def metadata(self) -> dict[str, str]:
        """Return what the header of the merged file would say."""
        return {"format": "pt"}

    def get_tensor(self, name: str) -> Any:
        """Return a whole tensor, its checksums compared.

        Raises:
            KeyError: There is no such tensor.
            ChecksumMismatch: Its bytes are damaged.
        """
        view = self.get_slice(name)
        return view.read((0,) * len(view.shape), view.shape)

    def get_slice(self, name: str) -> SliceView:
        """Return a view that reads what is indexed: ``view[2:5, ::2]``.

        Raises:
            KeyError: There is no such tensor.
        """
        if name not in self._tensors:
            raise KeyError(f"no tensor `{name}` in the checkpoint")
        return SliceView(self._tensors[name], self._sources, self._framework, verify=self._verify)


class SliceView:
    """A tensor of which only the indexed part is read."""

    def __init__(self, tensor: OutputTensor, sources: Sources, framework: Literal["np", "pt"], *, verify: bool) -> None:
        self._tensor = tensor
        self._sources = sources
        self._framework = framework
        self._verify = verify

    @property
    def shape(self) -> Shape:
        """Shape of the whole tensor."""
        return self._tensor.source.shape

    def get_shape(self) -> list[int]:
        """Return the shape, as safetensors' slices do."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the dtype's code, as safetensors' slices do (``F32``)."""
        return self._tensor.dtype.safetensors or self._tensor.dtype.name

    def __getitem__(self, index: Any) -> Any:
        """Read a slice.

        Args:
            index: Integers, slices with positive steps, and ``...``, per dimension.

        Raises:
            IndexError: An index is out of range, or there are too many.
        """
        items = index if isinstance(index, tuple) else (index,)
        offsets, lengths, post = _plan_index(items, self.shape)
        values = self.read(offsets, lengths)
        return values[post] if post else values

    def read(self, offsets: Shape, lengths: Shape) -> Any:
        """Return a box of the tensor: elements from ``offsets``, ``lengths`` of them per dimension."""
        import numpy as np

        from fsdp_ckpt.run.gather import Gatherer, storage_dtype

        source = self._tensor.source
        whole = lengths == source.shape
        box = (offsets, lengths)
        wanted = [chunk for chunk in source.chunks if intersect((chunk.offsets, chunk.lengths), box) is not None]
        located = [self._sources.resolve(source, chunk) for chunk in wanted]
        verify: Literal["full", "off"] = "full" if self._verify and whole else "off"
        gatherer = Gatherer(source.key, source.dtype, source.shape, located, verify=verify)
        bits: np.ndarray[Any, np.dtype[Any]] = np.empty(lengths, dtype=storage_dtype(source.dtype))
        gatherer.read((offsets, lengths), bits)
        if whole:
            gatherer.finish()
        return self._finish(bits)

    def _finish(self, bits: Any) -> Any:
        from fsdp_ckpt.run.cast import cast_bits
        from fsdp_ckpt.run.gather import numpy_dtype, storage_dtype

        src, dst = self._tensor.source.dtype, self._tensor.dtype
        shape = bits.shape
        if self._tensor.is_cast:
            bits = cast_bits(bits.reshape(-1), src, dst).view(storage_dtype(dst)).reshape(shape)
        if self._framework == "pt":
            import torch

            raw = torch.from_numpy(bits.reshape(-1).view("u1"))
            return raw.view(getattr(torch, dst.name)).reshape(shape)
        try:
            return bits.view(numpy_dtype(dst))
        except TypeError as error:
            raise Incompatible(f"`{self._tensor.name}`: {error}", hint='open it with framework="pt"') from None


def _plan_index(items: Sequence[Any], shape: Shape) -> tuple[Shape, Shape, tuple[Any, ...]]:
    """Return the box to read and what to index in it afterwards (steps, dropped dimensions)."""
    if sum(item is Ellipsis for item in items) > 1:
        raise IndexError("an index can have only one ellipsis")
    if Ellipsis in items:
        at = list(items).index(Ellipsis)
        fill = len(shape) - (len(items) - 1)
        items = [*items[:at], *[slice(None)] * fill, *items[at + 1 :]]
    if len(items) > len(shape):
        raise IndexError(f"{len(items)} indices for {len(shape)} dimensions")
    offsets: list[int] = []
    lengths: list[int] = []
    post: list[slice | int] = []
    for size, item in zip(shape, [*items, *[slice(None)] * (len(shape) - len(items))], strict=True):
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step < 1:
                raise IndexError("steps must be positive")
            offsets.append(start)
            lengths.append(max(stop - start, 0))
            post.append(slice(None, None, step))
        else:
            try:
                number = operator.index(item)
            except TypeError:
                raise IndexError(f"an index is an integer, a slice or ..., not {type(item).__name__}") from None
            if not -size <= number < size:
                raise IndexError(f"index {number} is out of range for {size} elements")
            offsets.append(number % size)
            lengths.append(1)
            post.append(0)
    trivial = all(isinstance(item, slice) and item.step in (None, 1) for item in post)
    return tuple(offsets), tuple(lengths), () if trivial else tuple(post)
