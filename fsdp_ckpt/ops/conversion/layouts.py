"""Lay out what is written, byte by byte, for each target of ``--to``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdp_ckpt.catalog import Role
from fsdp_ckpt.codec.torchzip_writer import ArchiveTensor, seal_archive
from fsdp_ckpt.codec.value_writer import lay_out_state
from fsdp_ckpt.errors import NotEnoughSpace
from fsdp_ckpt.layouts.optimizer_paths import PARAM_GROUPS, STATE
from fsdp_ckpt.ops.conversion.dcp_files import DcpObject, DcpState, lay_out_dcp
from fsdp_ckpt.ops.conversion.nesting import nest
from fsdp_ckpt.ops.conversion.objects import MAX_VALUE_BYTES, archive_of, value_of
from fsdp_ckpt.ops.merge_files import PATTERNS, index_json, lay_out_bin, lay_out_safetensors
from fsdp_ckpt.ops.tensor_tasks import tasks_of
from fsdp_ckpt.ops.write_out import SmallFile
from fsdp_ckpt.plan.merge import split_files
from fsdp_ckpt.plan.output import OutputPart, OutputTensor
from fsdp_ckpt.plan.reshard import Sharding
from fsdp_ckpt.run.engine import OutputSpec, Task
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.units import format_size

__all__ = ["Laid", "dcp_folder", "full_state", "weight_files"]


@dataclass(kw_only=True)
class Laid:
    """Files of a result, as far as they are laid out.

    Attributes:
        specs: The large ones.
        files: The small ones, by name, in the order in which they are written: last of all.
        held_bytes: What values that are no tensors take in memory until they are written.
    """

    specs: list[OutputSpec] = field(default_factory=list)
    files: dict[str, SmallFile] = field(default_factory=dict)
    held_bytes: int = 0


def weight_files(
    laid: Laid, tensors: Sequence[OutputTensor], *, style: str, pattern: str | None = None, max_shard_bytes: int,
    tied: Mapping[str, str],
) -> None:  # fmt: skip
    """Add a model's weights as one or several files, and their index.

    Args:
        laid: Where they are added.
        tensors: The model.
        style: ``safetensors`` or ``bin``.
        pattern: Their name with ``{suffix}``; None for the usual one.
        max_shard_bytes: Limit for the tensors of one file.
        tied: Name that is kept by name that is not written.

    Raises:
        Incompatible: A dtype that safetensors does not have.
    """
    pattern = pattern or PATTERNS[style]
    files = split_files(tensors, max_shard_bytes=max_shard_bytes, pattern=pattern)
    for file in files:
        is_bin = style == "bin"
        laid.specs.append(lay_out_bin(file, tied) if is_bin else lay_out_safetensors(file, otherwise="--to torch"))
    if len(files) > 1:
        index = pattern.format(suffix="") + ".index.json"
        laid.files[index] = index_json(files, tied, keep_tied=style == "bin")


def full_state(laid: Laid, part: OutputPart, store: LocalStore, *, name: str) -> None:
    """Add a nested state dict as one ``torch.save`` file.

    Args:
        laid: Where it is added.
        part: The optimizer.
        store: Where the sources of its values are.
        name: The file's name.

    Raises:
        Incompatible: It holds a value that is never written.
    """
    leaves = {
        tensor.path: ArchiveTensor(
            name=".".join(map(str, tensor.path)), dtype=tensor.dtype, shape=tensor.shape, storage=number
        )
        for number, tensor in enumerate(part.tensors)
    }
    values = {entry.path: value_of(entry, store) for entry in part.objects}
    state = nest({**leaves, **values}, where=part.name)
    is_flattened = any(len(path) == 1 for path in (*leaves, *values))
    if part.role is Role.OPTIMIZER and not is_flattened:  # torch's loader asks for both, also before the first step
        state = {STATE: {}, PARAM_GROUPS: [], **state}
    layout = lay_out_state(state, prefix=name.rpartition(".")[0], what=f"`{part.name}`")
    tensors = part.tensors

    def tasks() -> Iterator[tuple[str, Task]]:
        for number, tensor in enumerate(tensors):
            for task in tasks_of(tensor, None, position=layout.storages[number][0]):
                yield str(number), task

    def seal(crcs: Mapping[str, int]) -> Sequence[tuple[int, bytes]]:
        return seal_archive(layout, {int(number): crc for number, crc in crcs.items()})

    laid.specs.append(
        OutputSpec(
            name=name,
            size=layout.size,
            head=b"",
            ranges={str(number): span for number, span in layout.storages.items()},
            tasks=tasks,
            seal=seal,
        )
    )


def dcp_folder(
    laid: Laid, parts: Sequence[tuple[tuple[str, ...], OutputPart]], sharding: Sharding, store: LocalStore, *,
    folder: str, save_id: str | None = None,
) -> None:  # fmt: skip
    """Add parts as one distributed checkpoint.

    Args:
        laid: Where it is added.
        parts: Each with its place in the state dict: ``("model",)``.
        sharding: Places the tensors.
        store: Where the sources of its values are.
        folder: Folder within the result; ``""`` for its top.
        save_id: What the first bytes of each file say, where a manifest says the same.

    Raises:
        Incompatible: A value that is never written, or a placement that does not fit.
        NameCollision: Two values would get one key.
        NotEnoughSpace: The values that are no tensors are too large to be held in memory together.
    """
    tensors: list[OutputTensor] = []
    objects: list[DcpObject] = []
    placed_as: dict[str, str] = {}
    for head, part in parts:
        for tensor in part.tensors:
            path = (*head, *(tensor.path or (tensor.name,)))
            tensors.append(replace(tensor, path=path))
            if part.role is Role.OPTIMIZER and len(tensor.path) > 2 and tensor.path[0] == STATE:
                placed_as[".".join(map(str, path))] = str(tensor.path[1])
        for entry in part.objects:
            data = archive_of(entry, store)
            laid.held_bytes += len(data)
            if laid.held_bytes > MAX_VALUE_BYTES:
                raise NotEnoughSpace(
                    f"values that are no tensors take more than {format_size(MAX_VALUE_BYTES)} with those of "
                    f"`{part.name}`, more than is held in memory",
                    hint="take one part at a time: --part model, --part optimizer",
                )
            objects.append(DcpObject(path=(*head, *entry.path), data=data))
    files = lay_out_dcp(
        DcpState(tensors=tensors, objects=objects, placed_as=placed_as), sharding, folder=folder, save_id=save_id
    )
    laid.specs += files.specs
    laid.files[f"{folder}/.metadata" if folder else ".metadata"] = files.metadata
