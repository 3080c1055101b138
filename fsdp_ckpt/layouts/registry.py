"""From a path to a checkpoint: look, decide which layout it is, read it.

A path may be a file, one part, a checkpoint with several parts, or a run folder with checkpoints in it; in the last
case the newest complete one is taken, by step. Several paths are the folders of nodes that saved to disks of their own.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fsdp_ckpt.catalog import Checkpoint, Part, Role
from fsdp_ckpt.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    UnknownLayout,
    UnsafePickle,
    UsageError,
)
from fsdp_ckpt.layouts.composite import SIDE_FILES, looks_composite, read_composite, step_of
from fsdp_ckpt.layouts.dcp import looks_like_dcp, read_dcp
from fsdp_ckpt.layouts.deepspeed_files import find_deepspeed, looks_like_deepspeed
from fsdp_ckpt.layouts.faults import tolerate, unreadable_part
from fsdp_ckpt.layouts.frameworks import framework_of, lost_rank_shards, read_beside
from fsdp_ckpt.layouts.hf import read_safetensors
from fsdp_ckpt.layouts.nodes import demand_equal_copies, demand_one_save
from fsdp_ckpt.layouts.torch_file import read_torch_file
from fsdp_ckpt.store.leftovers import leftovers
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.remote.places import place_of

__all__ = ["PathLike", "checkpoints_inside", "given_paths", "list_checkpoints", "members_of_run", "read_checkpoint"]

PathLike = str | os.PathLike[str]

_LOOKED_AT = 16
_INNER = ("sharded", "actor", "model", "weights", "model_and_optim", "checkpoint", "pytorch_model_fsdp_0", "dcp", "hf")
"""Sub-folders that frameworks put the weights in, looked at when a folder itself holds none."""


def given_paths(path: PathLike | Sequence[PathLike]) -> tuple[str, ...]:
    """Return the paths that a caller gave, one or several, as texts.

    Raises:
        UsageError: There is none.
    """
    paths = (path,) if isinstance(path, str | os.PathLike) else tuple(path)
    if not paths:
        raise UsageError("no checkpoint was given", hint="give a path, or the folders of all nodes")
    return tuple(os.fspath(one) for one in paths)


def read_checkpoint(path: PathLike | Sequence[PathLike], *, tolerant: bool = False) -> Checkpoint:
    """Recognise and read whatever lies at a path. Only metadata and headers are read.

    Args:
        path: A file or folder; or the folders that the nodes of one job wrote, which are read as one.
        tolerant: Describe parts that cannot be read, too, instead of raising.

    Returns:
        The catalog. A damaged or incomplete checkpoint is returned with problems, as long as its metadata can be read.

    Raises:
        CheckpointNotFound: Nothing is there, or nothing that is a checkpoint.
        UnsafePickle: A pickle asks for code.
        MalformedFile: Metadata or headers are damaged.
        Incompatible: Several folders that are not of one save.
        UsageError: A URL of an unknown scheme; several paths that are no folders.
        Unreachable: A URL behind which nothing is, or that cannot be listed.
    """
    texts = given_paths(path)
    places = list({os.path.realpath(local): local for local in map(_existing, texts)}.values())
    if len(places) > 1:
        return _read_nodes(places, tolerant=tolerant)
    if places[0].is_dir():
        return _read_folder(Folder(LocalStore(places[0])), texts[0], tolerant=tolerant)
    return _read_file(Folder(LocalStore(places[0].parent)), places[0].name, texts[0], tolerant=tolerant)


def _existing(text: str) -> Path:
    local = place_of(text)
    if local.is_symlink() and not local.exists():
        target = os.readlink(local)
        raise CheckpointNotFound(f"`{text}` is a link to `{target}`, which does not exist", hint=_similar(local))
    if not local.exists():
        if any(path.suffix == ".old" for path in leftovers(local)):
            raise CheckpointNotFound(
                f"`{text}` does not exist: a run that was to replace it had moved it away, and died",
                hint=f"fsdp-ckpt repair {shlex.quote(text)}    (puts it back)",
            )
        raise CheckpointNotFound(f"`{text}` does not exist", hint=_similar(local))
    return local


def _read_nodes(places: Sequence[Path], *, tolerant: bool) -> Checkpoint:
    for place in places:
        if not place.is_dir():
            raise UsageError(
                f"`{place}` is a file: several sources are the folders of several nodes",
                hint=f"fsdp-ckpt inspect {shlex.quote(str(place.parent))}    (the folder, once)",
            )
        if not any(place.iterdir()):
            others = shlex.join(str(other) for other in places if other is not place)
            raise CheckpointNotFound(f"`{place}` is empty", hint=f"fsdp-ckpt inspect {others}    (leaves it out)")
    return _read_folder(Folder(LocalStore(places)), "` + `".join(map(str, places)), tolerant=tolerant)


def _similar(path: Path) -> str | None:
    parent = path.parent
    while not parent.is_dir():
        parent = parent.parent
    names = (
        sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))[:8]
        if parent.is_dir()
        else []
    )
    return f"`{parent}` holds: {', '.join(names)}" if names else None


def _read_file(folder: Folder, name: str, text: str, *, tolerant: bool) -> Checkpoint:
    store = folder.store
    if name.endswith((".distcp", ".metadata", ".metadata.tmp", ".index.json")):
        found = _read_folder(folder, str(folder.path), tolerant=tolerant)
        return replace(found, chosen=found.chosen or text)
    if name not in folder.files:
        raise UnknownLayout(f"`{text}` is not a regular file")
    files = {name: folder.files[name]}
    if name.endswith(".safetensors"):
        stem = name.removesuffix(".safetensors")
        parts = _read(partial(read_safetensors, folder, [name], name=stem), folder, stem, files, tolerant=tolerant)
        return Checkpoint(
            root=store.root,
            layout="safetensors",
            title="safetensors file",
            parts=parts,
            side_files=_side_files(folder),
            other_roots=store.roots[1:],
        )
    try:
        parts = read_torch_file(store, name, name=None)
    except UnknownLayout:
        raise UnknownLayout(
            f"`{text}` is neither a safetensors file nor one that torch.save wrote",
            hint="pass a checkpoint folder, or a .safetensors, .bin, .pt or .pth file",
        ) from None
    except CorruptCheckpoint as error:
        if not tolerant:
            raise
        parts = [unreadable_part(error, folder, name.rpartition(".")[0], Role.MODEL, files)]
    return Checkpoint(
        root=store.root,
        layout="torch-file",
        title="torch.save file",
        parts=parts,
        side_files=_side_files(folder),
        other_roots=store.roots[1:],
    )


def _read(
    read: Callable[[], list[Part]], folder: Folder, name: str, files: Mapping[str, int], *, tolerant: bool
) -> list[Part]:
    return list(tolerate(read, folder, name, Role.MODEL, files)) if tolerant else read()


def _read_folder(folder: Folder, text: str, *, tolerant: bool = False) -> Checkpoint:
    if _is_checkpoint(folder):
        demand_one_save(folder)
    if looks_like_dcp(folder):
        return _dcp_checkpoint(folder, tolerant=tolerant)
    tagged = find_deepspeed(folder)
    if tagged is not None:
        return _deepspeed_checkpoint(folder, tagged, text, tolerant=tolerant)
    if looks_composite(folder):
        found = read_composite(folder, tolerant=tolerant)
        if any(part.role is Role.MODEL for part in found.parts) or not _has_inner(folder):
            return _with_optimizer(folder, found)
    inner = [name for name in _INNER if name in folder.folders and _is_checkpoint(folder.sub(name))]
    if inner:
        beside = list(read_beside(folder, ()))
        if beside:
            return _with_beside(folder, inner[0], beside, tolerant=tolerant)
        below = Folder(folder.store.below(inner[0]))
        found = _read_folder(below, str(below.path), tolerant=tolerant)
        return replace(
            found,
            chosen=text,
            step=found.step if found.step is not None else step_of(folder),
            side_files=found.side_files,
        )
    lone = [name for name in folder.files if name.endswith((".pt", ".pth", ".bin", ".ckpt"))]
    if len(lone) == 1:
        demand_equal_copies(folder.store, lone[0])
        return replace(_read_file(folder, lone[0], text, tolerant=tolerant), chosen=text)
    return _newest(folder, text)


def _with_optimizer(folder: Folder, found: Checkpoint) -> Checkpoint:
    """Add optimizers in DCP folders beside the weights, as transformers' ``save_optimizer_distributed`` is used."""
    beside = [part for part in read_beside(folder, found.parts) if part.role is Role.OPTIMIZER]
    if not beside:
        return found
    order = list(Role)
    parts = sorted(lost_rank_shards([*found.parts, *beside]), key=lambda part: order.index(part.role))
    return replace(found, parts=parts)


def _with_beside(folder: Folder, inner: str, beside: list[Part], *, tolerant: bool) -> Checkpoint:
    """Read a checkpoint whose weights lie in a folder of their own, and what lies beside that."""
    sub = folder.sub(inner)
    found = _read_folder(sub, str(sub.path), tolerant=tolerant)
    order = list(Role)
    parts = sorted(lost_rank_shards([*found.parts, *beside]), key=lambda part: order.index(part.role))
    layout, title = framework_of(folder, parts) or (found.layout, found.title)
    return replace(
        found,
        layout=layout,
        title=title,
        parts=parts,
        step=step_of(folder),
        world_size=max((part.world_size for part in parts if part.world_size), default=None),
        side_files=[*found.side_files, *_side_files(folder)],
    )


def _dcp_checkpoint(folder: Folder, *, tolerant: bool) -> Checkpoint:
    name = folder.path.resolve().name
    single = name if name.startswith(("pytorch_model", "optimizer")) else None
    files = {folder.prefix + file: size for file, size in folder.files.items()}
    parts = _read(partial(read_dcp, folder, name=single), folder, single or "model", files, tolerant=tolerant)
    if looks_composite(folder):
        parts = [*parts, *read_composite(folder, tolerant=tolerant).parts]
    order = list(Role)
    parts = sorted(lost_rank_shards([*parts, *read_beside(folder, parts)]), key=lambda part: order.index(part.role))
    layout, title = framework_of(folder, parts) or ("dcp", "distributed checkpoint (DCP)")
    step = step_of(folder)
    return Checkpoint(
        root=folder.store.root,
        other_roots=folder.store.roots[1:],
        layout=layout,
        title=title,
        parts=parts,
        step=step
        if step is not None
        else (step_of(Folder(LocalStore(folder.path.resolve().parent))) if single else None),
        world_size=max((part.world_size for part in parts if part.world_size), default=None),
        side_files=_side_files(folder),
    )


def _deepspeed_checkpoint(folder: Folder, tagged: Folder, text: str, *, tolerant: bool) -> Checkpoint:
    """Read a DeepSpeed save, and what the Trainer or Accelerate put beside its folder."""
    from fsdp_ckpt.layouts.deepspeed import read_deepspeed  # six modules that no other layout needs

    if tagged.prefix == folder.prefix:
        return read_deepspeed(folder, tolerant=tolerant)
    beside = read_composite(folder, tolerant=tolerant)
    if not beside.parts and not beside.side_files:  # a run of DeepSpeed's own
        below = Folder(folder.store.below(tagged.prefix.rstrip("/")))
        return replace(read_deepspeed(below, tolerant=tolerant), chosen=text)
    found = read_deepspeed(tagged, tolerant=tolerant)
    order = list(Role)
    return replace(
        found,
        parts=sorted([*found.parts, *beside.parts], key=lambda part: order.index(part.role)),
        step=found.step if beside.step is None else beside.step,
        facts=[*found.facts, *beside.facts],
        side_files=beside.side_files,
        problems=[*found.problems, *beside.problems],
        chosen=text,
    )


def _side_files(folder: Folder) -> list[str]:
    return [folder.prefix + name for name in folder.files if SIDE_FILES.fullmatch(name)]


def _is_checkpoint(folder: Folder) -> bool:
    return looks_like_dcp(folder) or looks_like_deepspeed(folder) or looks_composite(folder)


def _has_inner(folder: Folder) -> bool:
    return any(name in folder.folders and _is_checkpoint(folder.sub(name)) for name in _INNER)


def _newest(folder: Folder, text: str) -> Checkpoint:
    """Take the newest complete checkpoint of a run folder."""
    candidates = sorted(_candidates(folder), key=lambda item: item[0], reverse=True)
    passed: list[str] = []
    for step, below in candidates:
        name = below.path.name
        try:
            found = _read_folder(Folder(folder.store.below(name)), str(below.path))
        except UnknownLayout:
            passed.append(f"{name} (nothing in it that is a checkpoint)")
            continue
        except CorruptCheckpoint as error:
            passed.append(f"{name} (damaged)" if not isinstance(error, UnsafePickle) else f"{name} (refused)")
            continue
        if found.is_complete and any(part.tensors for part in found.parts):
            facts = [*found.facts, *([("passed over", ", ".join(passed))] if passed else [])]
            return replace(found, chosen=text, step=found.step if found.step is not None else step, facts=facts)
        passed.append(f"{name} (incomplete)")
    if passed:
        first = passed[0].rpartition(" (")[0]
        there = [str(path / first) for path in folder.paths if (path / first).is_dir()]
        raise IncompleteCheckpoint(
            f"`{text}` holds no complete checkpoint: {', '.join(passed)}",
            hint=f"fsdp-ckpt validate {shlex.join(there)}",
        )
    dangling = [
        f"{link.name} (a link to `{os.readlink(link)}`, which does not exist)"
        for path in folder.paths
        for link in sorted(path.iterdir())
        if link.is_symlink() and not link.exists()
    ]
    names = ", ".join([*(f"{name}/" for name in sorted(folder.folders)), *folder.files, *dangling][:8]) or "nothing"
    hint = "pass the folder that holds .metadata, *.distcp, *.safetensors or *.bin files"
    inside = shlex.join(map(str, _inside(folder)))
    if inside:
        hint = f"fsdp-ckpt validate {inside}"
    raise UnknownLayout(f"`{text}` is not a checkpoint of a known layout; it holds: {names}", hint=hint)


def _inside(folder: Folder) -> list[Path]:
    return [folder.path / name for name in sorted(folder.folders)[:_LOOKED_AT] if _is_checkpoint(folder.sub(name))]


def checkpoints_inside(path: PathLike) -> list[Path]:
    """Return the folders in a folder that are checkpoints, whatever their names; of many folders, the first are seen.

    Raises:
        CheckpointNotFound: The path does not exist.
        Unreachable: A URL that cannot be listed.
    """
    place = _existing(os.fspath(path))
    return _inside(Folder(LocalStore(place))) if place.is_dir() else []


def list_checkpoints(path: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Return the folders of a run that are named like checkpoints, by falling step. Nothing in them is looked at.

    Example:
        >>> list_checkpoints("run")  # doctest: +SKIP
        [(1000, PosixPath('run/step-1000')), (900, PosixPath('run/step-900'))]
    """
    candidates = sorted(_candidates(Folder(LocalStore(Path(path)))), key=lambda item: not item[1].path.is_symlink())
    found = {below.path.resolve(): (step, below.path) for step, below in candidates}  # the folder rather than its link
    return sorted(found.values(), reverse=True)


def members_of_run(path: PathLike) -> list[Path]:
    """Return the checkpoints in a run's folder, newest first; none where the path is a checkpoint itself, or a file.

    Raises:
        CheckpointNotFound: The path does not exist.
        UsageError: It is not local.
    """
    place = _existing(os.fspath(path))
    if not place.is_dir():
        return []
    folder = Folder(LocalStore(place))
    return [] if _is_checkpoint(folder) or _has_inner(folder) else [below for _, below in list_checkpoints(place)]


def _candidates(folder: Folder) -> Iterator[tuple[int, Folder]]:
    for name in folder.folders:
        below = folder.sub(name)
        step = step_of(below)
        if step is not None and ".tmp" not in name and not name.startswith("."):
            yield step, below
