"""Tensors in a ``torch.save`` pickle: which storage, from which element on, with which shape and strides.

Also the two kinds of sharded tensor that per-rank files hold: DTensor (FSDP2, and FSDP1 with a device mesh) and
ShardedTensor (FSDP1). Follows ``torch/_utils.py``, ``torch/_tensor.py`` and
``torch/distributed/_shard/sharded_tensor``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.catalog import DTYPES, MAX_DIMS, DType, Shape
from fsdp_ckpt.codec.known import PLAIN, records
from fsdp_ckpt.codec.pickles import Constructor, Global, Machine, Record

__all__ = [
    "STORAGE_NAMES",
    "TORCH",
    "DTensorRef",
    "LocalShard",
    "ShardedTensorRef",
    "StorageRef",
    "TensorRef",
    "storage_from_pid",
]


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage that a pickle refers to by persistent id.

    Attributes:
        key: Name of its record (``data/<key>`` in a zip archive).
        dtype: Element type of a typed storage; None for an untyped one, which counts bytes.
        size: Elements, or bytes for an untyped storage.
    """

    key: str
    dtype: DType | None
    size: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that a pickle describes: a view of a storage.

    Attributes:
        storage: Its storage.
        dtype: Element type.
        offset: First element, counted from the storage's beginning.
        shape: Elements per dimension.
        strides: Elements between neighbours, per dimension.
        conj: The stored values are conjugates.
        neg: The stored values are negatives.
    """

    storage: StorageRef
    dtype: DType
    offset: int
    shape: Shape
    strides: Shape
    conj: bool = False
    neg: bool = False


@dataclass(frozen=True, slots=True)
class DTensorRef:
    """One rank's share of a DTensor.

    Attributes:
        local: This rank's tensor.
        shape: Shape of the whole.
        mesh_shape: The device mesh.
        coordinate: This rank's place in the mesh.
        placements: Per mesh dimension ``("shard", dim)``, ``("strided", dim, split_factor)``, ``("replicate",)``
            or ``("partial",)``.
    """

    local: TensorRef
    shape: Shape
    mesh_shape: Shape
    coordinate: Shape | None
    placements: tuple[tuple[str | int, ...], ...]


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A box of a ShardedTensor that lies in this file."""

    tensor: TensorRef
    offsets: Shape
    lengths: Shape


@dataclass(frozen=True, slots=True)
class ShardedTensorRef:
    """One rank's share of a ShardedTensor: shape and boxes of the whole, and the shards in this file.

    ``rank`` is the one that saved it, among all; torch loads it on no other.
    """

    shape: Shape
    dtype: DType
    boxes: tuple[tuple[Shape, Shape], ...]
    shards: tuple[LocalShard, ...]
    rank: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: DType | None


STORAGE_NAMES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
"""dtype by the name of torch's typed storage class, without ``Storage``."""


def storage_from_pid(pid: Any) -> StorageRef:
    """Return the storage of a persistent id ``("storage", type, key, location, size, …)``.

    Raises:
        ValueError: The id is not of this form.
    """
    if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], _StorageType):
        raise ValueError("a persistent id that is no storage")
    _, kind, key, _, size, *view = pid
    if type(key) is not str or type(size) is not int or size < 0 or any(item is not None for item in view):
        raise ValueError("a storage without a name or with an impossible size")
    return StorageRef(key, kind.dtype, size)


def _shape(machine: Machine, value: Any) -> Shape:
    if (
        type(value) is not tuple
        or len(value) > MAX_DIMS
        or any(type(n) is not int or not 0 <= n < 2**63 for n in value)
    ):
        raise machine.malformed(f"{type(value).__name__} where a shape is expected, or one with impossible sizes")
    return value


def _tensor(machine: Machine, args: tuple[Any, ...], dtype: DType | None, extra: int) -> TensorRef:
    if len(args) < 4 or not isinstance(args[0], StorageRef):
        raise machine.malformed("a tensor without storage")
    storage, offset, size, stride = args[:4]
    dtype = dtype or storage.dtype
    shape, strides = _shape(machine, size), _shape(machine, stride)
    if dtype is None or type(offset) is not int or offset < 0 or len(shape) != len(strides):
        raise machine.malformed("a tensor without dtype, or with impossible strides")
    flags = args[extra] if len(args) > extra and isinstance(args[extra], dict) else {}
    return TensorRef(storage, dtype, offset, shape, strides, flags.get("conj") is True, flags.get("neg") is True)


def _tensor_v3(machine: Machine, args: tuple[Any, ...]) -> TensorRef:
    if len(args) < 7 or not isinstance(args[6], DType):
        raise machine.malformed("a tensor without dtype")
    return _tensor(machine, args, args[6], 7)


def _first_tensor(machine: Machine, args: tuple[Any, ...]) -> Any:
    # Parameters and buffers wrap a tensor (or a sharded one) as their first argument.
    if not args:
        raise machine.malformed("a parameter without data")
    return args[0]


def _from_type(machine: Machine, args: tuple[Any, ...]) -> Any:
    # torch/_tensor.py: function, type, arguments and state
    if len(args) != 4:
        raise machine.malformed("_rebuild_from_type_v2 with unexpected arguments")
    function, kind, inner, state = args
    value = machine.reduce(function, inner)
    name = kind.name if type(kind) is Constructor else ""
    if name.endswith(".DTensor") and isinstance(value, Record):
        return _dtensor(machine, value, state)
    if name.endswith(".ShardedTensor"):
        return _sharded_tensor(machine, state)
    return value


def _dtensor(machine: Machine, wrapper: Record, state: Any) -> DTensorRef:
    # The state is what DTensor.__tensor_flatten__ left in __dict__: {"_local_tensor": …, "_spec": DTensorSpec}.
    fields = state[1] if type(state) is tuple and len(state) == 2 else state
    if not isinstance(fields, dict):
        raise machine.malformed("a DTensor without state")
    local, spec = fields.get("_local_tensor"), fields.get("_spec")
    if not isinstance(local, TensorRef) or not isinstance(spec, Record):
        raise machine.malformed("a DTensor without local tensor or spec")
    mesh, meta = spec.get("mesh"), spec.get("tensor_meta")
    shape = meta.get("shape") if isinstance(meta, Record) else None
    if shape is None and isinstance(meta, Record) and meta.args:
        shape = meta.args[0]
    if shape is None and len(wrapper.args) > 2:
        shape = wrapper.args[2]
    mesh_shape = _mesh_shape(machine, mesh)
    coordinate = mesh.get("_coordinate_on_dim")
    return DTensorRef(
        local=local,
        shape=_shape(machine, shape),
        mesh_shape=mesh_shape,
        coordinate=_shape(machine, tuple(coordinate)) if isinstance(coordinate, list | tuple) else None,
        placements=tuple(_placement(machine, placement) for placement in spec.get("placements") or ()),
    )


def _mesh_shape(machine: Machine, mesh: Any) -> Shape:
    # Older versions keep the mesh as a tensor, 2.9 and newer a layout (torch/distributed/_mesh_layout.py).
    if not isinstance(mesh, Record):
        raise machine.malformed("a DTensor without mesh")
    for name in ("mesh", "_mesh"):
        if isinstance(mesh.get(name), TensorRef):
            return mesh.get(name).shape  # type: ignore[no-any-return]
    layout = mesh.get("_layout")
    axes = layout.get("axes") if isinstance(layout, Record) else None
    if not isinstance(axes, list | tuple) or not all(isinstance(axis, Record) for axis in axes):
        raise machine.malformed("a device mesh without shape")
    return tuple(math.prod(_shape(machine, axis.get("shape"))) for axis in axes)


def _placement(machine: Machine, placement: Any) -> tuple[str | int, ...]:
    if isinstance(placement, Record):
        kind = placement.cls.rpartition(".")[2]
        dim = placement.get("dim", placement.args[0] if placement.args else None)
        if kind == "Replicate":
            return ("replicate",)
        if kind == "Shard" and type(dim) is int:
            return ("shard", dim)
        factor = placement.get("split_factor", placement.args[1] if len(placement.args) > 1 else None)
        if kind == "_StridedShard" and type(dim) is int and type(factor) is int:
            return ("strided", dim, factor)
        if kind in {"Partial", "_Partial"}:
            return ("partial",)
    raise machine.malformed("a placement of an unknown kind")


def _sharded_tensor(machine: Machine, state: Any) -> ShardedTensorRef:
    # ShardedTensor.__getstate__: (local shards, metadata, process group state, sharding spec, init_rrefs)
    if type(state) is not tuple or len(state) < 2 or not isinstance(state[0], list):
        raise machine.malformed("a ShardedTensor without shards")
    metadata = state[1]
    if not isinstance(metadata, Record):
        raise machine.malformed("a ShardedTensor without metadata")
    properties = metadata.get("tensor_properties")
    dtype = properties.state[0] if isinstance(properties, Record) and type(properties.state) is tuple else None
    boxes = tuple(_box(machine, box) for box in metadata.get("shards_metadata") or ())
    shards = []
    for shard in state[0]:
        tensor = shard.get("tensor") if isinstance(shard, Record) else None
        if not isinstance(tensor, TensorRef):
            raise machine.malformed("a shard without tensor")
        offsets, lengths = _box(machine, shard.get("metadata"))
        shards.append(LocalShard(tensor, offsets, lengths))
        dtype = dtype or tensor.dtype
    if not isinstance(dtype, DType):
        raise machine.malformed("a ShardedTensor without dtype")
    group = state[2] if len(state) > 2 else None
    rank = group.get("global_rank") if isinstance(group, Record) else None
    shape = _shape(machine, metadata.get("size"))
    return ShardedTensorRef(shape, dtype, boxes, tuple(shards), rank if type(rank) is int else None)


def _box(machine: Machine, box: Any) -> tuple[Shape, Shape]:
    if not isinstance(box, Record):
        raise machine.malformed("a shard without metadata")
    offsets, lengths = box.get("shard_offsets"), box.get("shard_sizes")
    if not isinstance(offsets, list | tuple) or not isinstance(lengths, list | tuple):
        raise machine.malformed("a shard without offsets")
    return _shape(machine, tuple(offsets)), _shape(machine, tuple(lengths))


def _table() -> dict[str, Global]:
    table: dict[str, Global] = dict(PLAIN)
    table |= {f"torch.{name}Storage": _StorageType(DTYPES[dtype]) for name, dtype in STORAGE_NAMES.items()}
    table["torch.storage.UntypedStorage"] = table["torch.UntypedStorage"] = _StorageType(None)
    table |= {
        f"torch._utils.{name}": Constructor(f"torch._utils.{name}", call)
        for name, call in {
            "_rebuild_tensor_v2": lambda m, args: _tensor(m, args, None, 6),
            "_rebuild_tensor_v3": _tensor_v3,
            "_rebuild_parameter": _first_tensor,
            "_rebuild_parameter_with_state": _first_tensor,
        }.items()
    }
    table["torch.nn.parameter.Buffer"] = Constructor("torch.nn.parameter.Buffer", _first_tensor)
    table["torch.nn.parameter.Parameter"] = Constructor("torch.nn.parameter.Parameter", _first_tensor)
    table["torch._tensor._rebuild_from_type_v2"] = Constructor("torch._tensor._rebuild_from_type_v2", _from_type)
    table |= records("torch._utils", "_rebuild_wrapper_subclass") | records("torch", "Tensor")
    for module in ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._tensor.api"):
        table |= records(module, "DTensor")
    for module in (
        "torch.distributed.tensor._dtensor_spec",
        "torch.distributed._tensor.placement_types",
        "torch.distributed.tensor.placement_types",
    ):
        table |= records(
            module, "DTensorSpec", "TensorMeta", "Shard", "Replicate", "_StridedShard", "Partial", "_Partial"
        )
        table |= records(module, "ShardOrderEntry")
    table |= records("torch.fx.passes.shape_prop", "TensorMetadata")
    table |= records("torch.distributed._tensor.device_mesh", "DeviceMesh")
    table |= records("torch.distributed.device_mesh", "DeviceMesh")
    table |= records("torch.distributed._mesh_layout", "_MeshLayout", "_FlatLayout")
    sharded = "torch.distributed._shard.sharded_tensor"
    table |= records(f"{sharded}.api", "ShardedTensor") | records(f"{sharded}.shard", "Shard")
    table |= records(f"{sharded}.metadata", "ShardedTensorMetadata", "TensorProperties", "MEM_FORMAT_ENCODING")
    spec = "torch.distributed._shard"
    table |= records(f"{spec}.metadata", "ShardMetadata") | records("torch.distributed.remote_device", "_remote_device")
    table |= records(f"{spec}.sharding_spec.api", "EnumerableShardingSpec")
    table |= records(f"{spec}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec")
    table |= records("torch.distributed.distributed_c10d", "ProcessGroupState", "ProcessGroup")
    table |= records("torch.distributed._shard.sharded_tensor.api.ShardedTensor", "ProcessGroupState")
    return table


TORCH: Mapping[str, Global] = _table()
"""``PLAIN`` and what tensors need."""
