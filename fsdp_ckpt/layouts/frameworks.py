"""Whose checkpoint it is, and what training frameworks put into folders beside the weights.

Seen in what the libraries write (see fixtures/README.md)::

    model_and_optim/.metadata    train/rank0.pt                       .metadata.json      OLMo-core
    model/.metadata              optimizer/.metadata  extra_state/extra_state_rank_0.pt   ByteCheckpoint
    model/shard-…safetensors     optim/.metadata  rng/…  dataloader/…                     NeMo AutoModel
    model/.metadata              optim/.metadata          composer_metadata.json          Composer, newer save
    .metadata                    extra_state/extra_state_rank_0.pt                        VeOmni
    .metadata                    meta.pt                                                  Lightning, Fabric
    .metadata                    metadata.pth  loader_state_0.pth                         fms-fsdp
    .metadata                    metadata.json  common.pt                                 Megatron-core
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from fsdp_ckpt.catalog import ObjectEntry, Part, Problem, Role, Severity
from fsdp_ckpt.layouts.composite import looks_composite
from fsdp_ckpt.layouts.dcp import looks_like_dcp, read_dcp
from fsdp_ckpt.layouts.faults import tolerate
from fsdp_ckpt.store.local import Folder

__all__ = ["framework_of", "looks_nested", "lost_rank_shards", "read_beside"]

_WEIGHTS = ("model", "model_and_optim")
_FOLDERS = {
    "optim": Role.OPTIMIZER,
    "optimizer": Role.OPTIMIZER,
    "rng": Role.RNG,
    "dataloader": Role.DATALOADER,
    "loader": Role.DATALOADER,
    "extra_state": Role.OTHER,
    "train": Role.OTHER,
}
_FILES = {
    "loader_state": (Role.DATALOADER, re.compile(r"loader_state_\d+\.pth")),
    "meta": (Role.OTHER, re.compile(r"meta\.pt")),
    "metadata": (Role.OTHER, re.compile(r"metadata\.pth")),
    "common": (Role.OTHER, re.compile(r"common\.pt")),
    "recipe_state": (Role.OTHER, re.compile(r"recipe_state\.pt")),
    "resumption": (Role.OTHER, re.compile(r"resumption\.pkl")),
}
_TORCH_FILE = re.compile(r".*\.(pt|pth|bin|pkl)")


def looks_nested(folder: Folder) -> bool:
    """Tell whether weights lie in a folder of their own, and something of a known name beside it."""
    names = [name for name in _WEIGHTS if name in folder.folders]
    is_there = any(looks_like_dcp(sub) or looks_composite(sub) for sub in map(folder.sub, names))
    return is_there and next(_beside(folder), None) is not None


def read_beside(folder: Folder, known: Sequence[Part]) -> Iterator[Part]:
    """Read what lies beside the weights: optimizers in DCP folders of their own, and small files, as opaque values.

    Args:
        folder: The folder of the checkpoint.
        known: What was found in it already; its files are left out, its names not used again.

    Yields:
        The parts; a damaged one is described, as others do not need it.
    """
    files = {file for part in known for file in part.files}
    names = {part.name for part in known}
    for part in _beside(folder):
        if files.isdisjoint(part.files):
            yield replace(part, name=f"{part.name}_files") if part.name in names else part


def _beside(folder: Folder) -> Iterator[Part]:
    for name in sorted(folder.folders & _FOLDERS.keys()):
        sub, role = folder.sub(name), _FOLDERS[name]
        if looks_like_dcp(sub):
            files = {sub.prefix + file: size for file, size in sub.files.items()}
            yield from tolerate(partial(read_dcp, sub, name=name, role=role), sub, name, role, files)
        else:
            yield from _small(sub, name, role, _TORCH_FILE)
    for name, (role, pattern) in _FILES.items():
        yield from _small(folder, name, role, pattern)


def lost_rank_shards(parts: Sequence[Part]) -> list[Part]:
    """Return the parts, with a fault in models whose last rank's file is missing, by the ranks of the optimizer.

    Files of torch's Hugging Face writer say neither how many ranks there were nor how large the whole is: without
    the last file, all tensors are shorter, and nothing else shows it.
    """
    ranks = max((part.world_size or 0 for part in parts if part.role is Role.OPTIMIZER), default=0)
    return [_short_of(part, ranks) if part.dialect == "safetensors" else part for part in parts]


def _short_of(part: Part, ranks: int) -> Part:
    if part.world_size is None or part.world_size >= ranks:
        return part
    last = max(part.files)
    where = re.sub(r"shard-\d+(?=[^/]*$)", f"shard-{part.world_size + 1:05}", last)
    message = (
        f"files of {part.world_size} ranks are there, and an optimizer of {ranks}; missing tensors' ends do not show"
    )
    problem = Problem(severity=Severity.ERROR, code="missing-rank", where=where, message=message)
    return replace(part, problems=[problem, *part.problems])


def _small(folder: Folder, name: str, role: Role, pattern: re.Pattern[str]) -> Iterator[Part]:
    """List files of torch.save or pickle whose values are read on demand."""
    files = {folder.prefix + file: size for file, size in folder.files.items() if pattern.fullmatch(file)}
    if not files:
        return
    yield Part(
        name=name,
        role=role,
        dialect="torch-file",
        folder=folder.prefix.rstrip("/"),
        files=files,
        objects={
            file: ObjectEntry(key=file, name=file.rpartition("/")[2], file=file, start=0, stop=size)
            for file, size in files.items()
        },
    )


def framework_of(folder: Folder, parts: Sequence[Part]) -> tuple[str, str] | None:
    """Return which framework wrote a checkpoint, as a name and for people; None when it does not show.

    Args:
        folder: The folder of the checkpoint.
        parts: What was found in it.
    """
    writers = {part.writer for part in parts}
    names = {part.name for part in parts}
    keys = [key for part in parts for key in (*part.tensors, *part.objects)]
    heads = {key.partition(".")[0] for key in keys}
    checks: tuple[tuple[bool, str, str], ...] = (
        ("meta.pt" in folder.files, "lightning", "Lightning / Fabric checkpoint"),
        ("Megatron-core" in writers or _is_megatron(folder), "megatron", "Megatron-core distributed checkpoint"),
        ("ByteCheckpoint" in writers, "bytecheckpoint", "ByteCheckpoint checkpoint"),
        ({"train_state", "lr_scheduler"} <= names, "torchtitan", "torchtitan checkpoint"),
        (
            "composer_metadata.json" in folder.files
            or ("state" in heads <= {"state", "rng"} and any(key.startswith("state.model.") for key in keys)),
            "composer",
            "Composer checkpoint",
        ),
        ("model_and_optim" in folder.folders, "olmo-core", "OLMo-core checkpoint"),
        ({"seed", "epochs_run"} <= heads, "torchtune", "torchtune checkpoint"),
        ({"metadata.pth"} <= folder.files.keys() and "model_state" in names, "fms-fsdp", "fms-fsdp checkpoint"),
        (_is_automodel(folder), "nemo-automodel", "NeMo AutoModel checkpoint"),
        (".metadata" in folder.files and "extra_state" in folder.folders, "veomni", "VeOmni checkpoint"),
    )
    return next(((layout, title) for is_it, layout, title in checks if is_it), None)


def _is_megatron(folder: Folder) -> bool:
    return "common.pt" in folder.files and "metadata.json" in folder.files


def _is_automodel(folder: Folder) -> bool:
    if not {"model", "optim"} <= folder.folders:
        return False
    return any(name.endswith(".safetensors") for name in folder.sub("model").files)
