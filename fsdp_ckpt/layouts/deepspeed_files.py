"""Which files of a folder are DeepSpeed's, and which rank wrote each.

Names as ``deepspeed/runtime/engine.py`` chooses them; the folder is named by the tag of the save::

    mp_rank_00_model_states.pt                        the module, up to ZeRO-2
    zero_pp_rank_R_mp_rank_00_model_states.pt         ZeRO-3: one per rank
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt  one per rank: its partition of weights and moments
    zero/NAME/fp32.pt exp_avg.pt …                    universal: one folder per parameter

The folder above holds ``latest`` (``latest_universal``), which names a tag.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fsdp_ckpt.errors import CheckpointNotFound, Incompatible, IncompleteCheckpoint, MalformedFile
from fsdp_ckpt.layouts.composite import looks_composite, step_of
from fsdp_ckpt.store.local import Folder

__all__ = ["DeepSpeedFiles", "find_deepspeed", "list_deepspeed_files", "looks_like_deepspeed"]

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d{1,7})_)?mp_rank_(?P<mp>\d{1,7}(?:_\d{1,7})?)_model_states\.pt")
_OPTIM = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,7})_mp_rank_(?P<mp>\d{1,7}(?:_\d{1,7})?)_optim_states\.pt"
)
_LAYER = re.compile(r"layer_\d+-.*model_states\.pt")
_EXPERT = re.compile(r"(?:layer_-?\d+_)?expert_\d+_.*model_states\.pt|expp_rank_\d+_.*optim_states\.pt")
_POINTERS = ("latest", "latest_universal")
_POINTER_BYTES = 4096
_LOOKED_AT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedFiles:
    """The files of one save.

    Attributes:
        folder: Where they are.
        whole: The file with the module of all ranks, up to ZeRO-2; None for ZeRO-3.
        models: The files with a rank's share of the module, by rank; empty up to ZeRO-2.
        optims: The files with a rank's partitions, by rank.
        is_universal: Whether each parameter has a folder below ``zero``.
    """

    folder: Folder
    whole: str | None
    models: Mapping[int, str]
    optims: Mapping[int, str]
    is_universal: bool

    def path(self, name: str) -> str:
        """Return a file's name relative to the store's root."""
        return self.folder.prefix + name

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes in bytes by name relative to the store's root; those of a universal checkpoint's parameters are not."""
        names = [*([self.whole] if self.whole else []), *self.models.values(), *self.optims.values()]
        return {self.path(name): self.folder.files[name] for name in names}


def looks_like_deepspeed(folder: Folder) -> bool:
    """Tell whether a folder is one that a tag names."""
    return any(map(_is_deepspeed, folder.files))


def _is_deepspeed(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in (_MODEL, _OPTIM, _LAYER, _EXPERT))


def find_deepspeed(folder: Folder) -> Folder | None:
    """Return the folder of a save: this one, the one below that ``latest`` names, or the only one; None if none is.

    Raises:
        IncompleteCheckpoint: ``latest`` names one that is not there, beside others.
    """
    if looks_like_deepspeed(folder):
        return folder
    tags = dict(_tags(folder))
    for tag in tags.values():
        if tag in folder.folders and looks_like_deepspeed(folder.sub(tag)):
            return folder.sub(tag)
    names = sorted(name for name in folder.folders if not name.startswith("."))
    below = [name for name in names[:_LOOKED_AT] if _holds_save(folder.sub(name))]
    for pointer, tag in tags.items() if below else ():
        raise IncompleteCheckpoint(
            f"{folder.prefix}{pointer} names `{tag}`, which is not there; {', '.join(below)} is",
            hint=f"fsdp-ckpt inspect {shlex.quote(str(folder.path / below[-1]))}",
        )
    if len(below) != 1 or len(names) > _LOOKED_AT or looks_composite(folder):
        return None
    steps = [name for name in names if step_of(folder.sub(name)) is not None]
    return folder.sub(below[0]) if steps in ([], below) else None  # else it is the folder of a run


def _holds_save(folder: Folder) -> bool:
    try:
        return looks_like_deepspeed(folder)
    except CheckpointNotFound:  # it may not be read
        return False


def _tags(folder: Folder) -> Iterator[tuple[str, str]]:
    """Yield what the pointers say, as far as it may be a folder's name."""
    for pointer in _POINTERS:
        if pointer in folder.files and folder.files[pointer] <= _POINTER_BYTES:
            try:
                tag = folder.store.read(folder.prefix + pointer, limit_bytes=_POINTER_BYTES).decode().strip()
            except (UnicodeDecodeError, MalformedFile):
                continue
            if tag and "/" not in tag and "\0" not in tag and tag not in {".", ".."}:
                yield pointer, tag


def list_deepspeed_files(folder: Folder) -> DeepSpeedFiles:
    """Sort the files of a save by what they are and by rank.

    Raises:
        Incompatible: It has model-parallel ranks, pipeline stages or experts, whose tensors are cut another way.
        MalformedFile: Two files would be of one rank.
    """
    found: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
    whole = None
    for name in folder.files:
        if _LAYER.fullmatch(name):
            raise _refusal(folder, name, "of a pipeline stage")
        if _EXPERT.fullmatch(name):
            raise _refusal(folder, name, "of experts, which not all ranks share")
        kind = "optim" if name.endswith("_optim_states.pt") else "model"
        match = (_OPTIM if kind == "optim" else _MODEL).fullmatch(name)
        if match is None:
            continue
        if match["mp"].strip("0"):
            raise _refusal(folder, name, "of a model-parallel rank, which holds slices of matrices")
        if match["rank"] is None:
            whole = name
        elif found[kind].setdefault(int(match["rank"]), name) != name:
            both = " and ".join((found[kind][int(match["rank"])], name))
            raise MalformedFile(f"{folder.prefix or '.'}: {both} are both of rank {int(match['rank'])}")
    if whole is not None and found["model"]:
        first = next(iter(found["model"].values()))
        raise MalformedFile(f"{folder.prefix}{whole} is of ZeRO-2 or lower, {first} of ZeRO-3: two saves in one folder")
    return DeepSpeedFiles(
        folder=folder,
        whole=whole,
        models=dict(sorted(found["model"].items())),
        optims=dict(sorted(found["optim"].items())),
        is_universal="zero" in folder.folders and not found["optim"],
    )


def _refusal(folder: Folder, name: str, what: str) -> Incompatible:
    return Incompatible(
        f"{folder.prefix}{name} is {what}: how DeepSpeed cuts those is not read",
        hint="load it in the job that wrote it, and save the model from there (save_16bit_model)",
    )
