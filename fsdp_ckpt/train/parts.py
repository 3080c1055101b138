"""Models and optimizers as parts of a checkpoint, in the three ways that Accelerate lays them out.

============== ============================ ============================ ==============================
part           SHARDED_STATE_DICT           FULL_STATE_DICT              LOCAL_STATE_DICT (FSDP1)
============== ============================ ============================ ==============================
model ``i``    ``pytorch_model_fsdp_i/``    ``pytorch_model_fsdp.bin``   ``pytorch_model_fsdp_rankR.bin``
optimizer      ``optimizer_j/``             ``optimizer.bin``            ``optimizer_j/``
============== ============================ ============================ ==============================

(For ``i`` and ``j`` above 0 the files are called ``pytorch_model_fsdp_1.bin`` and so on.)
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from fsdp_ckpt.errors import Incompatible
from fsdp_ckpt.layouts.roles import KeyPath
from fsdp_ckpt.train.files import FileFacts, HashingFile, write_file
from fsdp_ckpt.train.full import write_full
from fsdp_ckpt.train.live import LiveTensor, dtensor_pieces, plain, takes_turn
from fsdp_ckpt.train.modules import LiveModel
from fsdp_ckpt.train.objects import encode
from fsdp_ckpt.train.optimizers import Slots, collect_optimizer
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.shards import MetadataCache, ShardWriter, assemble

__all__ = [
    "PartState", "encode_local", "encode_values", "model_part", "optimizer_part", "part_of_mapping", "unite_groups",
    "write_part",
]  # fmt: skip

_metadata_cache = MetadataCache()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """A model or optimizer that is to be written.

    Attributes:
        name: ``pytorch_model_fsdp_0``, ``optimizer_0``.
        head: Key that everything stands under in a sharded part: ``model``, ``optimizer``.
        style: How it is written.
        tensors: By place in the state dict, without the head.
        values: Everything else.
        model: The model, for LOCAL_STATE_DICT.
        groups: For an optimizer, the names in each group.
        objects: Of a part that is sharded, ``values`` as they will be stored; see ``encode_values``.
        local: Content of the rank's file of LOCAL_STATE_DICT, where it is known already.
    """

    name: str
    head: str
    style: str
    tensors: Mapping[KeyPath, LiveTensor] = field(default_factory=dict)
    values: Mapping[KeyPath, Any] = field(default_factory=dict)
    model: LiveModel | None = None
    groups: Sequence[Sequence[str]] = ()
    objects: Mapping[KeyPath, bytes] = field(default_factory=dict)
    local: bytes | None = None

    @property
    def is_folder(self) -> bool:
        """Whether it becomes a folder of shards; optimizers have no local form."""
        return self.style == "SHARDED_STATE_DICT" or (self.style == "LOCAL_STATE_DICT" and self.head == "optimizer")

    @property
    def full_file(self) -> str:
        """Name of the file of FULL_STATE_DICT; number 0 is left out."""
        return f"{self.name.removesuffix('_0')}.bin"


def model_part(number: int, live: LiveModel, style: str) -> PartState:
    """Return a model as a part.

    Raises:
        Incompatible: LOCAL_STATE_DICT of something that FSDP1 does not wrap.
    """
    if style == "LOCAL_STATE_DICT" and live.kind != "FSDP1":
        raise Incompatible(
            f"LOCAL_STATE_DICT is a form of FSDP1; this model is {live.kind}", hint="use SHARDED_STATE_DICT"
        )
    return PartState(
        name=f"pytorch_model_fsdp_{number}",
        head="model",
        style=style,
        tensors={(name,): tensor for name, tensor in live.tensors.items()},
        values={(name,): value for name, (_, value) in live.extra.items()},
        model=live,
    )


def optimizer_part(
    number: int, optimizer: torch.optim.Optimizer, slots: Slots, style: str, *, is_first: bool
) -> PartState:
    """Return an optimizer as a part.

    Raises:
        As ``optimizers.collect_optimizer``.
    """
    live = collect_optimizer(optimizer, slots, is_first=is_first)
    return PartState(
        name=f"optimizer_{number}",
        head="optimizer",
        style=style,
        tensors=live.tensors,
        values=live.values,
        groups=live.groups,
    )


def unite_groups(part: PartState, ranks: Ranks, doing: str) -> PartState:
    """Return an optimizer's part with the parameters of all ranks in its groups (pipelines). A collective.

    Raises:
        UsageError: The ranks' optimizers have different numbers of groups.
    """
    gathered = ranks.gather_all(part.groups, doing)
    ranks.demand_same(len(part.groups), "the number of groups of an optimizer", doing)
    values = dict(part.values)
    for number, groups in enumerate(zip(*gathered, strict=True)):
        place: KeyPath = ("param_groups", number, "params")
        if place in values:
            values[place] = list(dict.fromkeys(name for names in groups for name in names))
    return replace(part, values=values)


def part_of_mapping(part: PartState, state: Mapping[str, Any], ranks: Ranks) -> PartState:
    """Return a part with the state that a hook gave for it."""
    tensors: dict[KeyPath, LiveTensor] = {}
    values: dict[KeyPath, Any] = {}
    for place, value in _leaves(state, ()):
        name = ".".join(map(str, place))
        if isinstance(value, DTensor):
            pieces, copy, copies = dtensor_pieces(value, name)
            turn = takes_turn(name, copy, copies)
            tensors[place] = LiveTensor(
                name=name, shape=tuple(value.shape), dtype=value.dtype, pieces=pieces, writes=turn
            )
        elif isinstance(value, Tensor):
            tensors[place] = plain(name, value, ranks)
        else:
            values[place] = value
    style = "SHARDED_STATE_DICT" if part.style == "LOCAL_STATE_DICT" else part.style
    return replace(part, style=style, tensors=tensors, values=values)


def _leaves(value: Any, place: KeyPath) -> list[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping) and value:
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*place, key))]
    if isinstance(value, list) and any(isinstance(item, dict | Tensor) for item in value):
        return [leaf for index, item in enumerate(value) for leaf in _leaves(item, (*place, index))]
    return [(place, value)]


def encode_values(part: PartState) -> PartState:
    """Return a part that is sharded with its values as bytes, so that changing the live ones no longer matters.

    Raises:
        Incompatible: A value that could not be loaded again.
    """
    if not part.is_folder:
        return part
    objects = {path: encode(value, ".".join(map(str, path))) for path, value in part.values.items()}
    return replace(part, values={}, objects=objects)


def encode_local(part: PartState) -> PartState:
    """Return a model of LOCAL_STATE_DICT with the content of this rank's file, in memory."""
    if part.model is None or part.style != "LOCAL_STATE_DICT":
        return part
    buffer = io.BytesIO()
    torch.save(_local_state(part.model), buffer)
    return replace(part, local=buffer.getvalue(), tensors={}, model=None)


def write_part(
    part: PartState, place: Path, ranks: Ranks, *, save_id: str, durable: bool, doing: str
) -> tuple[dict[str, FileFacts], dict[str, bytes]]:
    """Write a part, but for its ``.metadata``. A collective.

    Returns:
        On the first rank, size and CRC-32 (hexadecimal) of its files by path, and what is still to be written by
        path; nothing on others.
    """
    if part.style == "FULL_STATE_DICT":
        found = write_full(place / part.full_file, part.tensors, part.values, ranks, durable=durable, doing=doing)
        return ({} if found is None else {part.full_file: (found[0], f"{found[1]:08x}")}), {}
    if part.style == "LOCAL_STATE_DICT" and part.head == "model":
        return _write_local(part, place, ranks, durable=durable, doing=doing), {}
    return _write_sharded(part, place, ranks, save_id=save_id, durable=durable, doing=doing)


def _write_sharded(
    part: PartState, place: Path, ranks: Ranks, *, save_id: str, durable: bool, doing: str
) -> tuple[dict[str, FileFacts], dict[str, bytes]]:
    writer = ShardWriter(place / part.name, ranks.rank, save_id=save_id, durable=durable)
    with ranks.together(doing):
        try:
            writer.expect(part.tensors.values(), part.objects.values())
            for path, tensor in part.tensors.items():
                writer.add_tensor((part.head, *path), tensor)
            for path, data in part.objects.items():
                writer.add_object((part.head, *path), data)
            share = writer.close()
        finally:
            writer.abort()
    summaries = ranks.gather_first(share.summary(), doing)
    metadata = _metadata_cache.get(summaries) if summaries is not None else None
    if ranks.from_first(lambda: metadata is None, doing):
        shares = ranks.gather_first(share, doing)
        with ranks.together(doing):
            if shares is not None and summaries is not None:
                metadata, follows = assemble(shares)
                if follows:
                    _metadata_cache.put(summaries, metadata)
    if summaries is None or metadata is None:
        return {}, {}
    files = {f"{part.name}/{one.file}": (one.size, f"{one.crc32:08x}") for one in summaries if one.file is not None}
    return files, {f"{part.name}/.metadata": metadata}


def _write_local(part: PartState, place: Path, ranks: Ranks, *, durable: bool, doing: str) -> dict[str, FileFacts]:
    """Write FSDP1's flat parameters as torch hands them out, one file per rank, as Accelerate does."""
    name = f"{part.name.removesuffix('_0')}_rank{ranks.rank}.bin"
    with ranks.together(doing):
        if part.local is not None:
            found = write_file(place / name, part.local, durable=durable)
        else:
            assert part.model is not None
            found = _stream(_local_state(part.model), place / name, durable=durable)
    gathered = ranks.gather_first({name: found}, doing)
    return {} if gathered is None else {file: entry for files in gathered for file, entry in files.items()}


def _local_state(model: LiveModel) -> Mapping[str, Any]:
    module: Any = model.module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ShardedTensor is what this form consists of
        with FullyShardedDataParallel.state_dict_type(module, StateDictType.LOCAL_STATE_DICT):
            state: Mapping[str, Any] = module.state_dict()
    return state


def _stream(state: Mapping[str, Any], path: Path, *, durable: bool) -> FileFacts:
    out: Any = HashingFile(path)
    try:
        torch.save(state, out)
        found: FileFacts = out.finish(durable=durable)
    finally:
        out.close()
    return found
