"""What DeepSpeed's files say, checked and by name: the module's, and one rank's partition.

Keys are those of ``deepspeed/checkpoint/constants.py``; which of them there are depends on the stage and the version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.catalog import MAX_DIMS, Chunk, Shape
from fsdp_ckpt.codec.pickles import Constructor, Record
from fsdp_ckpt.codec.tensors import TensorRef
from fsdp_ckpt.codec.torchzip import Archive, locate
from fsdp_ckpt.errors import Incompatible, MalformedFile
from fsdp_ckpt.layouts.torch_file import load_torch_file
from fsdp_ckpt.store.local import LocalStore

__all__ = ["ModuleState", "RankState", "Stored", "read_module_state", "read_rank_state"]

_MAX_WORLD = 1 << 20
_STAGES = {"optimizer_states": 1, "gradients": 2, "weights": 3}
_MODULE_KEYS = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "ds_config", "ds_version",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor and the file that holds it."""

    archive: Archive
    file: str
    tensor: TensorRef

    def chunk(self) -> Chunk:
        """Return where the whole of it lies."""
        return locate(self.archive, self.tensor, self.file, (0,) * len(self.tensor.shape), self.tensor.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleState:
    """A ``*_model_states.pt`` file.

    Attributes:
        file: Its name, relative to the store's root.
        size: Its size in bytes.
        module: The module's state dict; in ZeRO-3 parameters are empty.
        buffers: Names of buffers.
        shapes: Shapes of trained parameters by name, for each flat vector; None where ZeRO was off.
        frozen_shapes: Shapes of parameters that are not trained.
        frozen: Those parameters, or in ZeRO-3 this rank's part of them.
        shared: For further names of a parameter, the name that it is stored under.
        optimizer: The optimizer's state, where ZeRO was off.
        scheduler: The learning rate scheduler's state; None without one.
        others: What else was saved: counters, and the caller's own.
        steps: Steps of the run, where it says so.
        world_size: Data-parallel ranks of the run, where it says so.
        stage: The ZeRO stage of the configuration, where it says so.
        is_shuffled: Whether ``round_robin_gradients`` was on, which puts vectors in another order than the groups'.
        version: DeepSpeed's version.
        archive: The file's records.
    """

    file: str
    size: int
    module: Mapping[str, Stored]
    buffers: frozenset[str]
    shapes: Sequence[Mapping[str, Shape]] | None
    frozen_shapes: Mapping[str, Shape]
    frozen: Mapping[str, Stored]
    shared: Mapping[str, str]
    optimizer: Mapping[str, Any] | None
    scheduler: Any
    others: Mapping[str, Any]
    steps: int | None
    world_size: int | None
    stage: int | None
    is_shuffled: bool
    version: str | None
    archive: Archive


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """A ``*_optim_states.pt`` file.

    Attributes:
        file: Its name, relative to the store's root.
        size: Its size in bytes.
        stage: The ZeRO stage; None where the file does not say (``BF16_Optimizer``).
        world_size: Ranks that the vectors were cut for.
        weights: This rank's part of each flat vector of weights.
        moments: For each vector, what the optimizer keeps about it: tensors, and values of other kinds.
        groups: Options of the parameter groups, without ``params``; empty in elastic checkpoints, which have none.
        vectors: The vectors of each parameter group.
        paddings: For each vector, elements after each of its parameters that belong to nobody; None in most versions.
        addresses: For each vector, first element and elements of the parameters in this rank's part; None in ZeRO-3,
            in old versions, and with ``round_robin_gradients``, with which DeepSpeed (0.19.8) writes wrong ones.
    """

    file: str
    size: int
    stage: int | None
    world_size: int
    weights: Sequence[Stored]
    moments: Sequence[Mapping[str, Stored | Any]]
    groups: Sequence[Mapping[str, Any]]
    vectors: Sequence[Sequence[int]]
    paddings: Sequence[Sequence[int]] | None
    addresses: Sequence[Mapping[str, tuple[int, int]]] | None


def read_module_state(store: LocalStore, file: str) -> ModuleState:
    """Read a ``*_model_states.pt`` file.

    Raises:
        As ``torch_file.open_torch_file``; Incompatible where the module's tensors are cut over model-parallel ranks.
    """
    archive, value = load_torch_file(store, file)
    root = _dict(value, file, "the file")
    if "buffer_names" not in root or not isinstance(root.get("module"), dict):
        raise MalformedFile(f"{file}: `module` and `buffer_names` are missing: not a model file of DeepSpeed's")
    for name in ("ds_autoep_layers", "autoep_layers"):
        if root.get(name):
            raise Incompatible(f"{file}: `{name}` is set: how DeepSpeed cuts experts is not read")
    if _count(root.get("mp_world_size")) not in (None, 1):
        raise Incompatible(
            f"{file} is of one of {root['mp_world_size']} model-parallel ranks: how DeepSpeed cuts those is not read",
            hint="load it in the job that wrote it, and save the model from there (save_16bit_model)",
        )
    shapes = root.get("param_shapes")
    zero = _zero_config(root)
    version = root.get("ds_version")
    return ModuleState(
        file=file,
        size=archive.stop,
        module=_tensors(root["module"], archive, file, "module"),
        buffers=frozenset(name for name in _list(root["buffer_names"]) if isinstance(name, str)),
        shapes=None if shapes is None else [_shapes(group, file) for group in _list(shapes)],
        frozen_shapes=_shapes(root.get("frozen_param_shapes"), file),
        frozen=_tensors(root.get("frozen_param_fragments"), archive, file, "frozen_param_fragments"),
        shared=_shared(root.get("shared_params"), file),
        optimizer=root["optimizer"] if isinstance(root.get("optimizer"), dict) else None,
        scheduler=root.get("lr_scheduler"),
        others={str(key): item for key, item in root.items() if key not in _MODULE_KEYS and item is not None},
        steps=_count(root.get("global_steps")),
        world_size=_count(root.get("dp_world_size")),
        stage=_count(zero.get("stage")),
        is_shuffled=bool(zero.get("round_robin_gradients")),
        version=version if isinstance(version, str) else None,
        archive=archive,
    )


def read_rank_state(store: LocalStore, file: str) -> RankState:
    """Read a ``*_optim_states.pt`` file.

    Raises:
        As ``torch_file.open_torch_file``; Incompatible where groups are cut for different numbers of ranks, or by a
        version of DeepSpeed that cuts in another way.
    """
    archive, value = load_torch_file(store, file)
    root = _dict(value, file, "the file")
    state = _dict(root.get("optimizer_state_dict"), file, "`optimizer_state_dict`")
    if state.get("ds_zero_partition_groups"):
        raise Incompatible(f"{file}: experts have partitions of their own: how DeepSpeed cuts those is not read")
    stage = _stage(state.get("zero_stage"), file)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    if not isinstance(state.get(key), list):
        raise Incompatible(
            f"{file}: `{key}` is missing: a DeepSpeed too old, or an optimizer that keeps its weights in another way",
            hint="load it in the job that wrote it, and save it there with a newer DeepSpeed",
        )
    counts = {_count(count) for count in _list(state.get("partition_count"))}
    world_size = counts.pop() if len(counts) == 1 else None
    if counts:
        raise Incompatible(f"{file}: groups are cut for different numbers of ranks, as experts are; that is not read")
    if world_size is None or not 0 < world_size < _MAX_WORLD:
        raise MalformedFile(f"{file}: `partition_count` is missing or absurd")
    weights = [_flat(item, archive, file, f"{key}[{number}]") for number, item in enumerate(state[key])]
    base = state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    moments, groups, vectors = _base(base, archive, file, len(weights))
    return RankState(
        file=file,
        size=archive.stop,
        stage=stage,
        world_size=world_size,
        weights=weights,
        moments=moments,
        groups=groups,
        vectors=vectors,
        paddings=_paddings(state.get("param_alignment_paddings"), file),
        addresses=None
        if stage == 3 or _zero_config(root).get("round_robin_gradients")
        else _addresses(state.get("param_slice_mappings"), file),
    )


def _zero_config(root: Mapping[Any, Any]) -> Mapping[Any, Any]:
    config = root.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return zero if isinstance(zero, dict) else {}


def _base(
    base: Any, archive: Archive, file: str, num_vectors: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[list[int]]]:
    """Return the moments of each vector, the options of each group, and the vectors of each group."""
    if base is None:  # cut out, to save space
        return [{} for _ in range(num_vectors)], [], [[number] for number in range(num_vectors)]
    if isinstance(base, list):  # elastic: one entry per vector, and no options
        if len(base) != num_vectors:
            raise MalformedFile(f"{file}: moments of {len(base)} vectors, {num_vectors} are expected")
        return [_moments(item, archive, file) for item in base], [], [[number] for number in range(num_vectors)]
    root = _dict(base, file, "the optimizer's state")
    state = _dict(root.get("state"), file, "`state`")
    listed = [_dict(group, file, "a parameter group") for group in _list(root.get("param_groups"))]
    vectors = [[number for number in _list(group.get("params")) if type(number) is int] for group in listed]
    if sorted(number for group in vectors for number in group) != list(range(num_vectors)):
        raise MalformedFile(f"{file}: the parameter groups do not list each of the {num_vectors} vectors once")
    groups = [{str(key): item for key, item in group.items() if key != "params"} for group in listed]
    return [_moments(state.get(number, {}), archive, file) for number in range(num_vectors)], groups, vectors


def _moments(value: Any, archive: Archive, file: str) -> dict[str, Any]:
    return {
        str(key): Stored(archive, file, item) if isinstance(item, TensorRef) else item
        for key, item in _dict(value, file, "a vector's state").items()
    }


def _flat(value: Any, archive: Archive, file: str, what: str) -> Stored:
    if not isinstance(value, TensorRef) or len(value.shape) != 1 or (value.shape[0] > 1 and value.strides != (1,)):
        raise MalformedFile(f"{file}: {what} is no flat tensor")
    return Stored(archive, file, value)


def _tensors(value: Any, archive: Archive, file: str, what: str) -> dict[str, Stored]:
    found = {}
    for name, item in _dict(value or {}, file, f"`{what}`").items():
        if isinstance(item, TensorRef):
            found[_name(name, file)] = Stored(archive, file, item)
    return found


def _shapes(value: Any, file: str) -> dict[str, Shape]:
    return {_name(name, file): _shape(shape, file) for name, shape in _dict(value or {}, file, "shapes").items()}


def _shape(value: Any, file: str) -> Shape:
    shape = tuple(value) if isinstance(value, list | tuple) else None
    if shape is None or len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
        raise MalformedFile(f"{file}: a shape that is none")
    if math.prod(shape) >= 2**63:
        raise MalformedFile(f"{file}: a shape of {math.prod(shape)} elements")
    return shape


def _shared(value: Any, file: str) -> dict[str, str]:
    return {_name(name, file): _name(other, file) for name, other in _dict(value or {}, file, "shared_params").items()}


def _paddings(value: Any, file: str) -> list[list[int]] | None:
    if value is None:
        return None
    found = [_list(group) for group in _list(value)]
    if any(type(n) is not int or not 0 <= n < 2**31 for group in found for n in group):
        raise MalformedFile(f"{file}: `param_alignment_paddings` are no numbers")
    return found


def _addresses(value: Any, file: str) -> list[dict[str, tuple[int, int]]] | None:
    if not isinstance(value, list):
        return None
    return [
        {_name(name, file): _address(item, file) for name, item in _dict(group, file, "addresses").items()}
        for group in value
    ]


def _address(value: Any, file: str) -> tuple[int, int]:
    start = _count(value.get("start")) if isinstance(value, Record) else None
    numel = _count(value.get("numel")) if isinstance(value, Record) else None
    if start is None or numel is None:
        raise MalformedFile(f"{file}: an address that is none")
    return start, numel


def _stage(value: Any, file: str) -> int | None:
    if isinstance(value, Constructor):  # ZeroStageEnum.gradients, as early Python 3.11 pickles it
        value = _STAGES.get(value.name.rpartition(".")[2])
    elif isinstance(value, Record):  # ZeroStageEnum(2)
        value = value.args[0] if len(value.args) == 1 else None
    elif value is None:
        return None
    if type(value) is not int or not 1 <= value <= 3:
        raise MalformedFile(f"{file}: an unknown ZeRO stage")
    return value


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _dict(value: Any, file: str, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise MalformedFile(f"{file}: {what} is {type(value).__name__}, not a dictionary")
    return value


def _name(value: Any, file: str) -> str:
    if not isinstance(value, str):
        raise MalformedFile(f"{file}: a parameter whose name is no text")
    return value
