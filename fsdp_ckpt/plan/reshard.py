"""Decide which rank stores which box of each tensor, as FSDP2 would place it on a device mesh.

``Shard(dim)`` cuts as ``torch.chunk`` does: equal pieces of ceil(n / ranks), the last ones smaller or empty. Where two
mesh dimensions shard one tensor dimension, the later one cuts first, as FSDP2 over tensor parallelism does. Of replicas
one is stored, by the rank with the least to write (``_dedup_save_plans.py`` of torch).
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.errors import Incompatible, UsageError
from fsdp_ckpt.names import glob_filter
from fsdp_ckpt.plan.boxes import Box

__all__ = ["MAX_RANKS", "Mesh", "Placement", "Sharding", "parse_mesh", "parse_placement"]

MAX_RANKS = 1 << 16
_MAX_DIGITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How tensors of some names lie on the mesh.

    Attributes:
        pattern: A glob over names.
        dims: Per mesh dimension the tensor dimension that it shards; None where it replicates.
    """

    pattern: str
    dims: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A grid of ranks, in row-major order.

    Attributes:
        shape: Ranks per dimension.
    """

    shape: Shape

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return math.prod(self.shape)

    def default(self) -> tuple[int | None, ...]:
        """Return how tensors lie that no placement names: sharded by rows over the last dimension (FSDP, HSDP)."""
        return (*[None] * (len(self.shape) - 1), 0)


def parse_mesh(text: str) -> Mesh:
    """Return a mesh from ``"8"`` or ``"2x4"``.

    Raises:
        UsageError: It is no such text, or has no ranks, or too many.
    """
    sizes = text.lower().split("x")
    if not all(_is_number(size) and 1 <= int(size) <= MAX_RANKS for size in sizes) or len(sizes) > 4:
        raise UsageError(
            f"--mesh {text} is no mesh",
            hint=f"write ranks per dimension, such as 8 or 2x4: at most 4 dimensions, and {MAX_RANKS} ranks in all",
        )
    mesh = Mesh(shape=tuple(map(int, sizes)))
    if mesh.num_ranks > MAX_RANKS:
        raise UsageError(f"--mesh {text} has {mesh.num_ranks} ranks, more than {MAX_RANKS}", hint="take fewer")
    return mesh


def parse_placement(text: str, mesh: Mesh) -> Placement:
    """Return a placement from ``"GLOB=0,r"``: per mesh dimension a tensor dimension, or ``r`` to replicate.

    Raises:
        UsageError: It is no such text, or not of this mesh.

    Example:
        >>> parse_placement("*.up.weight=r,0", Mesh(shape=(2, 4)))
        Placement(pattern='*.up.weight', dims=(None, 0))
    """
    pattern, equals, rest = text.rpartition("=")
    words = rest.split(",")
    example = "*.up.weight=" + ",".join(["0", "r", "1", "r"][: len(mesh.shape)])
    if not equals or not pattern or not all(word == "r" or _is_number(word) for word in words):
        raise UsageError(f"--placement {text} is none", hint=f"such as: --placement '{example}'")
    if len(words) != len(mesh.shape):
        raise UsageError(
            f"--placement {text} has {len(words)} entries, the mesh {len(mesh.shape)} dimensions",
            hint=f"one entry per mesh dimension, such as: --placement '{example}'",
        )
    return Placement(pattern=pattern, dims=tuple(None if word == "r" else int(word) for word in words))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS


@dataclass(kw_only=True)
class Sharding:
    """Places tensors one after the other, and keeps count of what each rank has to write.

    Attributes:
        mesh: The grid.
        placements: The first that matches a name counts.
        load_bytes: What each rank writes so far.
    """

    mesh: Mesh
    placements: Sequence[Placement] = ()
    load_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.load_bytes = self.load_bytes or [0] * self.mesh.num_ranks
        self._patterns = [(glob_filter([one.pattern], ()), one) for one in self.placements]
        self._used: set[str] = set()

    @property
    def unused(self) -> list[str]:
        """Patterns that no name matched."""
        return [one.pattern for one in self.placements if one.pattern not in self._used]

    def place(self, name: str, shape: Shape, itemsize: int) -> Iterator[tuple[int, Box]]:
        """Yield rank and box of each piece of a tensor that is to be stored; at least one, and no further empty ones.

        Args:
            name: What placements go by: the parameter's name, also for what an optimizer keeps of it.
            shape: The whole tensor's.
            itemsize: Bytes of an element.

        Raises:
            Incompatible: A placement names a dimension that the tensor lacks.
        """
        dims = self._dims(name, shape)
        if 0 in shape or all(dim is None for dim in dims):
            yield self._take(range(self.mesh.num_ranks), ((0,) * len(shape), shape), itemsize)
            return
        sharded = [axis for axis, dim in enumerate(dims) if dim is not None]
        replicated = [axis for axis, dim in enumerate(dims) if dim is None]
        for coordinate in itertools.product(*(range(self.mesh.shape[axis]) for axis in sharded)):
            ranges = [(0, size) for size in shape]
            for axis, place in sorted(zip(sharded, coordinate, strict=True), reverse=True):
                dim = dims[axis]
                assert dim is not None
                ranges[dim] = _piece(ranges[dim], self.mesh.shape[axis], place)
            box = tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges)
            if 0 in box[1]:
                continue
            yield self._take(self._ranks(dict(zip(sharded, coordinate, strict=True)), replicated), box, itemsize)

    def _dims(self, name: str, shape: Shape) -> tuple[int | None, ...]:
        for matches, placement in self._patterns:
            if matches.match(name) is None:
                continue
            self._used.add(placement.pattern)
            for dim in placement.dims:
                if dim is not None and shape and dim >= len(shape):
                    raise Incompatible(
                        f"--placement {placement.pattern} shards dimension {dim} of `{name}`, whose shape is {shape}",
                        hint="say what else becomes of it, before that one: --placement "
                        + shlex.quote(f"{name}={','.join('r' * len(self.mesh.shape))}"),
                    )
            return placement.dims if shape else (None,) * len(self.mesh.shape)
        return self.mesh.default() if shape else (None,) * len(self.mesh.shape)

    def _ranks(self, coordinate: dict[int, int], replicated: Sequence[int]) -> Iterator[int]:
        """Yield the ranks that hold a piece: all places along the mesh dimensions that replicate."""
        for others in itertools.product(*(range(self.mesh.shape[axis]) for axis in replicated)):
            full = coordinate | dict(zip(replicated, others, strict=True))
            rank = 0
            for axis, size in enumerate(self.mesh.shape):
                rank = rank * size + full[axis]
            yield rank

    def _take(self, ranks: Iterator[int] | range, box: Box, itemsize: int) -> tuple[int, Box]:
        rank = min(ranks, key=lambda rank: self.load_bytes[rank])
        self.load_bytes[rank] += math.prod(box[1]) * itemsize
        return rank, box


def _piece(whole: tuple[int, int], count: int, number: int) -> tuple[int, int]:
    start, stop = whole
    size = -(-(stop - start) // count)
    return min(start + number * size, stop), min(start + (number + 1) * size, stop)
