"""Take a model out of a training job: as a state dict on one rank, or as a Hugging Face folder straight from shards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ckpt.catalog import TensorEntry
from fsdp_ckpt.codec.safetensors import plan_header
from fsdp_ckpt.plan.merge import split_files
from fsdp_ckpt.plan.output import OutputFile, OutputTensor
from fsdp_ckpt.store.publish import Staging, resolve_destination
from fsdp_ckpt.store.syscalls import write_all
from fsdp_ckpt.train.destination import check_replaceable_model, local_path
from fsdp_ckpt.train.files import open_new
from fsdp_ckpt.train.full import write_tensor
from fsdp_ckpt.train.gather import Described, describe, gather_tensors
from fsdp_ckpt.train.live import dtype_of
from fsdp_ckpt.train.modules import collect_model, refuse_meta
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.subjects import refuse_state_dict
from fsdp_ckpt.units import parse_size

__all__ = ["ModelReport", "get_state_dict", "save_model"]

_PATTERN = "model{suffix}.safetensors"


def get_state_dict(model: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Return the whole model on the first rank's CPU, and an empty dictionary on the others.

    A collective: every rank has to call it. Beyond the result, the first rank holds one tensor at a time; the other
    ranks hold nothing. Names carry no wrappers; tied weights share memory under all of their names.

    Args:
        model: Wrapped by FSDP1, FSDP2, DDP, tensor-parallel, or plain.
        process_group: The ranks that hold the model; None for all.

    Returns:
        Tensors by fully qualified name, detached, in the dtype that the shards have; and the modules' extra state.

    Raises:
        RankFailed: A rank failed or died.

    Example:
        >>> state = get_state_dict(model)  # doctest: +SKIP
        >>> if rank == 0:  # doctest: +SKIP
        ...     torch.save(state, "model.pt")
    """
    ranks = Ranks(process_group)
    doing = "get_state_dict"
    result: dict[str, Any] = {}
    with ranks.together(doing):
        refuse_state_dict(model)
        live = collect_model(model, ranks)
        refuse_meta(live, "load or initialize it first")

    def keep(entry: Described, tensor: Tensor) -> None:
        result[entry.name] = tensor
        for alias in entry.aliases:
            result[alias] = tensor

    failed = gather_tensors(describe(live.tensors, ranks, doing), live.tensors, ranks, keep)
    ranks.agree(failed, doing)
    if ranks.is_first:
        result |= {name: value for name, (_, value) in live.extra.items()}
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """What ``save_model`` wrote.

    Attributes:
        destination: The folder.
        files: Bytes of each file of weights, by name.
        num_tensors: Tensors written.
        tied: Name kept by name not written.
        side_files: Further files (config.json).
    """

    destination: str
    files: Mapping[str, int]
    num_tensors: int
    tied: Mapping[str, str] = field(default_factory=dict)
    side_files: tuple[str, ...] = ()


def save_model(
    model: nn.Module,
    out: str | os.PathLike[str],
    *,
    max_shard_size: str | int = "50GB",
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> ModelReport:
    """Write a model as a Hugging Face folder: ``model.safetensors``, or numbered files and an index.

    A collective: every rank has to call it. Files are shared out between the ranks; a rank receives the tensors of its
    files one at a time, and never holds more than one of them. The folder appears complete or not at all. The
    ``config`` and ``generation_config`` of a transformers model are written beside the weights. A tied weight is
    written once, as safetensors cannot share memory and loaders tie it again.

    Args:
        model: Wrapped by FSDP1, FSDP2, DDP, tensor-parallel, or plain.
        out: The folder to make, on a file system that all ranks see.
        max_shard_size: Largest file, ``"5GB"`` (10^9) or ``"5GiB"`` (2^30), or bytes.
        overwrite: Replace a model folder, in one step. Any other folder with content is never replaced.
        process_group: The ranks that hold the model; None for all.

    Returns:
        What was written, on every rank.

    Raises:
        DestinationExists: ``out`` has content and ``overwrite`` is off, or holds something that is no part of a model.
        RankFailed: A rank failed; nothing is left at ``out``.
    """
    ranks = Ranks(process_group)
    ranks.refuse_strangers()
    doing = f"saving the model to {out}"
    with ranks.together(doing):
        target = local_path(out)
        refuse_state_dict(model)
        live = collect_model(model, ranks)
        refuse_meta(live, "load or initialize it first")
        limit = parse_size(max_shard_size)
    ranks.demand_same((str(target), limit), "the folder or max_shard_size", doing)
    described = describe(live.tensors, ranks, doing)
    staging: list[Staging] = []

    def begin() -> str:
        destination = resolve_destination(target)
        check_replaceable_model(destination, overwrite=overwrite)
        staging.append(Staging(destination, os.urandom(8).hex(), overwrite=overwrite))
        return str(staging[0].path)

    try:
        place = Path(ranks.from_first(begin, doing))
        job = _ModelJob(described, place, limit, ranks)
        with ranks.together(doing):
            job.open()
        try:
            failed = gather_tensors(described, live.tensors, ranks, job.add, target=job.home)
            with ranks.together(doing):
                if failed is not None:
                    raise failed
                job.close()
        finally:
            job.abort()
        side = ranks.from_first(lambda: _publish(staging, job, model), doing)
    except BaseException:
        for one in staging:
            one.discard()
        raise
    return ModelReport(
        destination=str(resolve_destination(target)),
        files={file.name: job.sizes[file.name] for file in job.files},
        num_tensors=len(described),
        tied={alias: entry.name for entry in described for alias in entry.aliases},
        side_files=tuple(side),
    )


class _ModelJob:
    """The files of ``save_model``: which rank writes which, and where each tensor goes."""

    def __init__(self, described: list[Described], place: Path, limit: int, ranks: Ranks) -> None:
        self._place = place
        self._ranks = ranks
        outputs = []
        for entry in described:
            dtype = dtype_of(entry.dtype, entry.name)
            source = TensorEntry(key=entry.name, name=entry.name, dtype=dtype, shape=entry.shape, chunks=())
            outputs.append(OutputTensor(name=entry.name, dtype=dtype, source=source))
        self.files: list[OutputFile] = split_files(outputs, max_shard_bytes=limit, pattern=_PATTERN)
        self._file_of = {tensor.name: number for number, file in enumerate(self.files) for tensor in file.tensors}
        self.sizes: dict[str, int] = {}
        self._heads: list[bytes] = []
        self._ranges: dict[str, tuple[int, int]] = {}
        for file in self.files:
            rows = [(tensor.name, tensor.dtype, tensor.source.shape) for tensor in file.tensors]
            head, ranges = plan_header(rows, {"format": "pt"})
            self._heads.append(head)
            self._ranges |= ranges
            self.sizes[file.name] = max((stop for _, stop in ranges.values()), default=len(head))
        self._open: dict[int, int] = {}

    def home(self, entry: Described) -> int:
        """Return the rank that writes a tensor."""
        return self._file_of[entry.name] % self._ranks.size

    def open(self) -> None:
        """Create this rank's files."""
        for number, file in enumerate(self.files):
            if number % self._ranks.size == self._ranks.rank:
                self._open[number] = open_new(self._place / file.name)
                write_all(self._open[number], self._heads[number], 0)

    def add(self, entry: Described, tensor: Tensor) -> None:
        """Write a tensor into its file."""
        write_tensor(self._open[self._file_of[entry.name]], self._ranges[entry.name][0], tensor, entry.name)

    def close(self) -> None:
        """Make this rank's files durable."""
        for fd in self._open.values():
            os.fsync(fd)

    def abort(self) -> None:
        """Close what is open."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def index(self) -> bytes:
        """Return the index of several files, as transformers writes it."""
        weight_map = {tensor.name: file.name for file in self.files for tensor in file.tensors}
        total = sum(file.num_bytes for file in self.files)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _publish(staging: list[Staging], job: _ModelJob, model: nn.Module) -> list[str]:
    side: dict[str, bytes] = {}
    module: Any = model
    while hasattr(module, "module") and isinstance(module.module, nn.Module):
        module = module.module
    for attribute, name in (("config", "config.json"), ("generation_config", "generation_config.json")):
        to_json: Any = getattr(getattr(module, attribute, None), "to_json_string", None)
        if callable(to_json):
            side[name] = str(to_json()).encode()
    for name, data in side.items():
        staging[0].add_file(name, data, durable=True)
    if len(job.files) > 1:
        staging[0].add_file(_PATTERN.format(suffix="") + ".index.json", job.index(), durable=True)
    staging[0].publish()
    return sorted(side)
