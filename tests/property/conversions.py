"""Strategies for conversions: sources of several formats, meshes, placements; and torch as the judge of the results."""

from __future__ import annotations

import io
import itertools
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_ckpt.catalog import DTYPES
from tests.build import Sharded, save_dcp
from tests.property.tilings import shapes, tilings

__all__ = [
    "Cut", "Source", "bare_tensors", "cuts", "is_kept", "judge_cut", "local_indices", "read_dcp", "read_object",
    "sources",
]  # fmt: skip

KINDS = [getattr(torch, name) for name in DTYPES if name != "float4_e2m1fn_x2"]
"""torch can hardly make packed fp4; the fixtures have one."""
_EASY = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
"""What torch's loader can make up tensors of."""
_NAMES = ["w", "layers.0.scale", "größe.権重", "a b", "x" * 200, "model", "state", "0", "b.shift", "z"]


@dataclass(frozen=True)
class Source:
    """Tensors, and how they are stored.

    Attributes:
        kind: ``dcp``, ``safetensors`` or ``pt``.
        tensors: Whole.
        state: For ``dcp``: what torch saves, some of it cut.
        ranks: For ``dcp``: who saves it.
    """

    kind: str
    tensors: dict[str, Tensor]
    state: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1

    def write(self, folder: Path) -> Path:
        """Store them below an empty folder."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        match self.kind:
            case "dcp":
                path = save_dcp(folder / "src", {"model": self.state}, ranks=self.ranks)
                (path / "config.json").write_text('{"model_type": "nobody-knows-it"}')
                return path
            case "safetensors":
                save_file({key: tensor.contiguous() for key, tensor in self.tensors.items()}, folder / "m.safetensors")
                return folder / "m.safetensors"
            case _:
                torch.save(self.tensors, folder / "m.pt")
                return folder / "m.pt"


@dataclass(frozen=True)
class Cut:
    """How tensors are cut: options of ``reshard``, and the same as numbers.

    Attributes:
        mesh: Ranks per dimension.
        dims: What one placement for all tensors says; None to leave it to the default.
        axes: Per mesh dimension the tensor dimension that is cut.
    """

    mesh: tuple[int, ...]
    dims: tuple[int | None, ...] | None
    axes: tuple[int | None, ...]

    @property
    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"mesh": "x".join(map(str, self.mesh))}
        if self.dims is not None:
            found["placements"] = ["*=" + ",".join("r" if dim is None else str(dim) for dim in self.dims)]
        return found


@st.composite
def bare_tensors(draw: st.DrawFn, *, min_dims: int = 0) -> Tensor:
    """Return a tensor of any dtype, shape and bits, perhaps strided."""
    dtype = draw(st.sampled_from(KINDS))
    shape = draw(shapes(max_dims=4, max_side=7).filter(lambda shape: len(shape) >= min_dims or not shape))
    shape = (*shape, *[3] * (min_dims - len(shape))) if shape else shape
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator).to(torch.uint8)
    tensor = (raw & 1 if dtype == torch.bool else raw).view(dtype).reshape(shape)
    way = draw(st.sampled_from(["plain", "plain", "transposed", "strided", "conj", "neg"]))
    if way == "transposed":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if way == "strided" and tensor.dim() and dtype in _EASY:
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]
    if way == "conj" and dtype in (torch.complex64, torch.complex128):
        return tensor.conj()
    if way == "neg" and dtype in (torch.complex64, torch.complex128):
        return tensor.conj().imag
    return tensor


def is_kept(tensor: Tensor) -> bool:
    """Whether safetensors has the type."""
    return DTYPES[str(tensor.dtype).removeprefix("torch.")].safetensors is not None


@st.composite
def sources(draw: st.DrawFn, *, min_dims: int = 0) -> Source:
    """Return a model, stored in one way or another."""
    kind = draw(st.sampled_from(["dcp", "dcp", "safetensors", "pt"]))
    ranks = draw(st.integers(1, 4)) if kind == "dcp" else 1
    found: dict[str, Tensor] = {}
    state: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=4, unique=True)):
        tensor = draw(bare_tensors(min_dims=min_dims).filter(lambda tensor: kind != "safetensors" or is_kept(tensor)))
        if kind == "safetensors":
            tensor = tensor.resolve_conj().resolve_neg()
        state[name] = found[name] = tensor
        if kind == "dcp" and draw(st.booleans()) and not (tensor.is_conj() or tensor.is_neg()):
            boxes = draw(tilings(tuple(tensor.shape)))
            boxes = list({box[0]: box for box in sorted(boxes, key=lambda box: math.prod(box[1]))}.values())
            owners = [draw(st.integers(0, ranks - 1)) for _ in boxes]
            state[name] = Sharded(tensor, boxes, owners, draw(st.booleans()))
    return Source(kind, found, state, ranks)


def cuts(*, max_dims: int = 0) -> st.SearchStrategy[Cut]:
    """Return meshes, with placements where tensors have up to ``max_dims`` dimensions for certain."""

    @st.composite
    def draw_one(draw: st.DrawFn) -> Cut:
        mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
        default = (*[None] * (len(mesh) - 1), 0)
        if not max_dims or draw(st.booleans()):
            return Cut(mesh, None, default)
        dims = tuple(draw(st.sampled_from([None, *range(max_dims)])) for _ in mesh)
        return Cut(mesh, dims, dims)

    return draw_one()


def read_dcp(folder: Path, prefix: str = "model.") -> tuple[dict[str, Tensor], dict[str, list[tuple[str, Any]]]]:
    """Read a distributed checkpoint by torch's own metadata and ``torch.load``, item by item.

    Returns:
        The tensors by name below ``prefix``, and per name the file and box of each item. Every element is there
        exactly once.
    """
    metadata: Metadata = dcp.FileSystemReader(folder).read_metadata()
    assert metadata.storage_data is not None
    found: dict[str, Tensor] = {}
    keys: dict[str, str] = {}
    items: dict[str, list[tuple[str, Any]]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        width = entry.properties.dtype.itemsize
        whole = torch.zeros((*entry.size, width), dtype=torch.uint8)
        times = torch.zeros(tuple(entry.size), dtype=torch.uint8)
        name = key.removeprefix(prefix)
        keys[name] = key
        for index, info in metadata.storage_data.items():
            if index.fqn != key:
                continue
            with open(folder / info.relative_path, "rb") as file:
                file.seek(info.offset)
                piece = torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
            chunk = next(chunk for chunk in entry.chunks if chunk.offsets == index.offset)
            assert (piece.dtype, piece.shape) == (entry.properties.dtype, chunk.sizes)
            place = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place] = piece.reshape(-1).view(torch.uint8).reshape(*piece.shape, width)
            times[place] += 1
            items.setdefault(name, []).append((info.relative_path, (tuple(chunk.offsets), tuple(chunk.sizes))))
        assert bool((times == 1).all()), f"{key}: elements are missing, or there twice"
        assert len(items[name]) == len(entry.chunks)
        found[name] = whole.reshape(-1).view(entry.properties.dtype).reshape(entry.size)
    easy = {name: torch.empty_like(tensor) for name, tensor in found.items() if tensor.dtype in _EASY}
    if easy:
        dcp.load({keys[name]: tensor for name, tensor in easy.items()}, checkpoint_id=folder, no_dist=True)
        for name, tensor in easy.items():
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), found[name].reshape(-1).view(torch.uint8)), name
    return found, items


def read_object(folder: Path, key: str) -> Any:
    """Return a value that is no tensor, as ``torch.load`` reads it."""
    metadata: Metadata = dcp.FileSystemReader(folder).read_metadata()
    assert metadata.storage_data is not None
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == key)
    with open(folder / info.relative_path, "rb") as file:
        file.seek(info.offset)
        return torch.load(io.BytesIO(file.read(info.length)), weights_only=True)


def local_indices(shape: Sequence[int], cut: Cut) -> list[set[int]]:
    """Return which elements of a tensor each rank holds, cut by ``torch.chunk`` over one mesh dimension after another.

    The last mesh dimension cuts first: FSDP2 shards what tensor parallelism left.
    """
    axes = cut.axes if shape else (None,) * len(cut.mesh)
    numbers = torch.arange(math.prod(shape)).reshape(tuple(shape))
    held = []
    for place in itertools.product(*map(range, cut.mesh)):
        local = numbers
        for axis in reversed(range(len(cut.mesh))):
            dim = axes[axis]
            if dim is not None and local.shape[dim]:
                pieces = local.chunk(cut.mesh[axis], dim)
                local = pieces[place[axis]] if place[axis] < len(pieces) else local.narrow(dim, 0, 0)
        held.append(set(local.reshape(-1).tolist()))
    return held


def judge_cut(items: Mapping[str, Sequence[tuple[str, Any]]], tensors: Mapping[str, Tensor], cut: Cut) -> None:
    """Assert that each item is the whole local shard of a rank, and lies in the file of a rank that holds it."""
    for name, found in items.items():
        tensor = tensors[name]
        numbers = torch.arange(tensor.numel()).reshape(tensor.shape)
        held = local_indices(tuple(tensor.shape), cut)
        for file, (offsets, lengths) in found:
            rank = int(file.removeprefix("__").removesuffix("_0.distcp"))
            box = numbers[tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))]
            assert set(box.reshape(-1).tolist()) == held[rank], (name, file, offsets, lengths)
        assert len(found) == max(1, len({frozenset(one) for one in held if one})), "replicas are stored once"
