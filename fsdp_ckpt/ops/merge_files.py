"""Lay out the files of a merge byte by byte, in the format asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from fsdp_ckpt.codec.safetensors import plan_header
from fsdp_ckpt.codec.torchzip_writer import ArchiveTensor, lay_out_archive, seal_archive
from fsdp_ckpt.ops.tensor_tasks import tasks_of
from fsdp_ckpt.plan.output import OutputFile
from fsdp_ckpt.run.engine import OutputSpec, Task

__all__ = ["PATTERNS", "index_json", "lay_out_bin", "lay_out_safetensors"]

PATTERNS = {"safetensors": "model{suffix}.safetensors", "bin": "pytorch_model{suffix}.bin"}
"""File names by format, as transformers expects them."""


def lay_out_safetensors(file: OutputFile, *, otherwise: str = "--format bin") -> OutputSpec:
    """Return the spec of a safetensors file.

    Args:
        file: What is in it.
        otherwise: The option that makes a file which has all dtypes, for messages.

    Raises:
        Incompatible: A dtype that safetensors does not have.
    """
    rows = [(tensor.name, tensor.dtype, tensor.shape) for tensor in file.tensors]
    head, ranges = plan_header(rows, {"format": "pt"}, otherwise=otherwise)
    return OutputSpec(
        name=file.name,
        size=max((stop for _, stop in ranges.values()), default=len(head)),
        head=head,
        ranges=ranges,
        tasks=lambda: _tasks(file, ranges),
    )


def lay_out_bin(file: OutputFile, tied: Mapping[str, str]) -> OutputSpec:
    """Return the spec of a torch.save file; tied tensors share a storage and keep both names."""
    storages = {tensor.name: storage for storage, tensor in enumerate(file.tensors)}
    rows = [ArchiveTensor(name=t.name, dtype=t.dtype, shape=t.shape, storage=storages[t.name]) for t in file.tensors]
    by_name = {row.name: row for row in rows}
    rows += [
        ArchiveTensor(name=name, dtype=by_name[kept].dtype, shape=by_name[kept].shape, storage=storages[kept])
        for name, kept in tied.items()
        if kept in by_name
    ]
    layout = lay_out_archive(rows, prefix=file.name.removesuffix(".bin"))
    names = {storage: name for name, storage in storages.items()}
    ranges = {names[storage]: span for storage, span in layout.storages.items()}

    def seal(crcs: Mapping[str, int]) -> Sequence[tuple[int, bytes]]:
        return seal_archive(layout, {storage: crcs[name] for storage, name in names.items()})

    return OutputSpec(
        name=file.name,
        size=layout.size,
        head=b"",
        ranges=ranges,
        tasks=lambda: _tasks(file, ranges),
        seal=seal,
    )


def _tasks(file: OutputFile, ranges: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Task]]:
    for tensor in sorted(file.tensors, key=lambda tensor: ranges[tensor.name]):
        for task in tasks_of(tensor, None, position=ranges[tensor.name][0]):
            yield tensor.name, task


def index_json(files: Sequence[OutputFile], tied: Mapping[str, str], *, keep_tied: bool) -> bytes:
    """Return the index of several files, as transformers writes it; ``keep_tied`` lists tied names, too."""
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    if keep_tied:
        weight_map |= {name: weight_map[kept] for name, kept in tied.items()}
    total = sum(file.num_bytes for file in files)
    parameters = sum(tensor.numel for file in files for tensor in file.tensors)
    index = {
        "metadata": {"total_parameters": parameters, "total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
