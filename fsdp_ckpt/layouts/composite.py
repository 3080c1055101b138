"""Folders that hold several parts side by side: Accelerate's ``save_state``, the Trainer's ``checkpoint-N``, verl.

The names are those of ``accelerate/utils/constants.py`` (also the older ``pytorch_model_N``) and of
``transformers/trainer.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from fsdp_ckpt.catalog import Checkpoint, ObjectEntry, Part, Problem, Role, Severity
from fsdp_ckpt.errors import CorruptCheckpoint
from fsdp_ckpt.layouts.dcp import looks_like_dcp, read_dcp
from fsdp_ckpt.layouts.faults import fault_of, tolerate
from fsdp_ckpt.layouts.hf import is_rank_shard, read_safetensors
from fsdp_ckpt.layouts.manifest import MANIFEST, check_files, ranks_elsewhere, read_manifest
from fsdp_ckpt.layouts.rank_files import group_rank_files, read_rank_files
from fsdp_ckpt.layouts.roles import role_of
from fsdp_ckpt.layouts.torch_file import read_torch_file
from fsdp_ckpt.store.leftovers import unfinished_marks
from fsdp_ckpt.store.local import Folder

__all__ = ["SIDE_FILES", "looks_composite", "read_composite", "step_of"]

_MODEL_FOLDER = re.compile(r"pytorch_model(_fsdp)?_\d+")
_OPTIMIZER_FOLDER = re.compile(r"optimizer_\d+")
_FULL_MODEL = re.compile(r"pytorch_model(_fsdp)?(_\d+)?\.bin")
_HF_BIN_SHARD = re.compile(r"pytorch_model-\d{5}-of-\d{5}\.bin")
_FULL_OPTIMIZER = re.compile(r"optimizer(_\d+)?\.(bin|pt)")
_SMALL = {
    Role.SCHEDULER: re.compile(r"scheduler(_\d+)?\.(bin|pt)"),
    Role.RNG: re.compile(r"random_states_\d+\.pkl|rng_state(_\d+)?\.pth"),
    Role.DATALOADER: re.compile(r"sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin|dl_states_\d+\.pkl"),
    Role.OTHER: re.compile(r"scaler\.pt|custom_checkpoint_\d+\.pkl|meta\.pt|training_args\.bin|recipe_state\.pt"),
}
_STEP = re.compile(
    r"(?:.*[^a-z])?(?:step|checkpoint|global_step|iter|ba|epoch)[-_=]?0*(\d+)(?:_ckp)?(?:\.\w+)?", re.IGNORECASE
)
_ROLES_OF_RL = frozenset({"actor", "critic", "ref", "rm"})

SIDE_FILES = re.compile(
    r"(adapter_|generation_|preprocessor_|processor_|image_processor_|video_preprocessor_|feature_extractor_)?config\.json"
    r"|tokenizer.*\.(json|model)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|.*\.(model|tiktoken|jinja)|chat_template\.json|(modeling|configuration|tokenization|processing)_\w+\.py"
)
"""Files that a model folder needs beside its weights."""


def looks_composite(folder: Folder) -> bool:
    """Tell whether a folder holds parts side by side."""
    return (
        any(_MODEL_FOLDER.fullmatch(name) or _OPTIMIZER_FOLDER.fullmatch(name) for name in folder.folders)
        or any(_FULL_MODEL.fullmatch(name) or _HF_BIN_SHARD.fullmatch(name) for name in folder.files)
        or any(_FULL_OPTIMIZER.fullmatch(name) for name in folder.files)
        or any(name.endswith(".safetensors") for name in folder.files)
        or bool(group_rank_files(folder))
        or "trainer_state.json" in folder.files
        or MANIFEST in folder.files
    )


def read_composite(folder: Folder, *, tolerant: bool = False) -> Checkpoint:
    """Read all parts of a folder.

    Args:
        folder: The folder.
        tolerant: Describe parts of the model that cannot be read, too, instead of raising; for those who look for
            faults.

    Raises:
        UnsafePickle: A pickle of model or optimizer weights refers to an unknown global.
        MalformedFile: A file of the model is damaged.
    """
    parts = [*_model_parts(folder, tolerant=tolerant), *_optimizer_parts(folder), *_small_parts(folder)]
    trainer = _trainer_state(folder)
    layout, title = _identify(folder, parts)
    facts, problems = [], []
    manifest = None
    try:
        manifest = read_manifest(folder)
    except CorruptCheckpoint as error:
        if not tolerant:
            raise
        problems = [fault_of(error, folder.prefix + MANIFEST)]
    if manifest is not None:
        writer = f"fsdp-ckpt {manifest.versions.get('fsdp_ckpt', '')}".strip()
        parts = [replace(part, writer=writer) if part.dialect == "dcp" else part for part in parts]
        problems += [*ranks_elsewhere(folder, manifest), *check_files(folder, manifest)]
        facts.append(("saved at", manifest.created))
        facts += [(name, f"{value}") for name, value in manifest.values.items()]
    elif not problems and unfinished_marks(folder.files):
        message = "not there: the save to this place did not end, or the checkpoint is being removed"
        where = folder.prefix + MANIFEST
        problems = [Problem(severity=Severity.ERROR, code="missing-file", where=where, message=message)]
    if isinstance(trainer.get("epoch"), int | float):
        facts.append(("epoch", f"{trainer['epoch']:g}"))
    step = trainer.get("global_step")
    rng_files = [file for part in parts if part.role is Role.RNG for file in part.files]
    sizes = [part.world_size for part in parts if part.world_size]
    order = list(Role)
    return Checkpoint(
        root=folder.store.root,
        other_roots=folder.store.roots[1:],
        layout=layout,
        title=title,
        parts=sorted(parts, key=lambda part: order.index(part.role)),
        step=_first(step, manifest.step if manifest else None, step_of(folder), *_steps_around(folder, parts)),
        world_size=manifest.world_size if manifest else max([*sizes, len(rng_files)]) or None,
        facts=facts,
        side_files=[
            folder.prefix + name for name in folder.files if SIDE_FILES.fullmatch(name) or name == "trainer_state.json"
        ],
        problems=[*problems, *_cross_checks(parts)],
    )


def _first(*steps: object) -> int | None:
    return next((step for step in steps if isinstance(step, int)), None)


def step_of(folder: Folder) -> int | None:
    """Return the training step that a folder's name tells, None when it tells none."""
    match = _STEP.fullmatch(folder.path.resolve().name)
    return int(match[1]) if match else None


def _steps_around(folder: Folder, parts: list[Part]) -> Iterator[int]:
    """Yield steps that the folder's own name does not tell: Composer's files have it, verl's folder above ``actor``."""
    names = [part.name for part in parts if part.dialect == "rank-files"]
    if folder.path.resolve().name in _ROLES_OF_RL:
        names.append(folder.path.resolve().parent.name)
    yield from (int(match[1]) for name in names if (match := _STEP.fullmatch(name)))


def _model_parts(folder: Folder, *, tolerant: bool) -> Iterator[Part]:
    for name, role, files, read in _readers(folder):
        if tolerant or role is not Role.MODEL:
            yield from tolerate(read, folder, name, role, files)
        else:
            yield from read()


_Reader = tuple[str, Role, Mapping[str, int], Callable[[], list[Part]]]
"""Name, role and files of parts, and how to read them."""


def _readers(folder: Folder) -> Iterator[_Reader]:
    """Yield how each of the models, and what ranks left beside them, is read."""
    model = Role.MODEL
    for name in sorted(folder.folders):
        if _MODEL_FOLDER.fullmatch(name):
            sub = folder.sub(name)
            yield name, model, _placed(sub, sub.files), partial(_read_named, sub, name, model)
    for group in group_rank_files(folder):
        role = role_of(group.stem) or (Role.OTHER if group.stem.startswith("extra") else model)
        read = partial(read_rank_files, folder, group)
        yield group.stem, role, _placed(folder, group.files.values()), read
    for file in folder.files:
        if _FULL_MODEL.fullmatch(file):
            name = file.removesuffix(".bin")
            read = partial(read_torch_file, folder.store, folder.prefix + file, name=name, role=model)
            yield name, model, _placed(folder, [file]), read
    bins = [name for name in folder.files if _HF_BIN_SHARD.fullmatch(name)]
    if bins:
        yield "pytorch_model", model, _placed(folder, bins), lambda: [_merge_bins(folder, bins)]
    sharded = folder.sub("sharded") if "sharded" in folder.folders else None
    if sharded is not None and any(is_rank_shard(name) for name in sharded.files):
        # Beside it lie the files that torch consolidated from it, in which 0-d tensors are zero (torch <= 2.15).
        names = [name for name in sharded.files if is_rank_shard(name)]
        yield "sharded", model, _placed(sharded, names), partial(read_safetensors, sharded, names, name="sharded")
    for stem, names in _safetensors_groups(folder):
        yield stem, model, _placed(folder, names), partial(read_safetensors, folder, names, name=stem)


def _placed(folder: Folder, names: Iterable[str]) -> dict[str, int]:
    return {folder.prefix + name: folder.files[name] for name in names}


def _read_named(folder: Folder, name: str, role: Role) -> list[Part]:
    return list(_named(read_dcp(folder, name=name, role=role), name))


def _safetensors_groups(folder: Folder) -> list[tuple[str, list[str]]]:
    names = [name for name in folder.files if name.endswith(".safetensors")]
    by_stem: dict[str, list[str]] = {}
    for name in names:
        stem = re.sub(r"(-\d{5}-of-\d{5})?\.safetensors", "", name)
        by_stem.setdefault("model" if is_rank_shard(name) else stem, []).append(name)
    return sorted(by_stem.items(), key=lambda item: (item[0] != "model", item[0]))


def _merge_bins(folder: Folder, names: list[str]) -> Part:
    parts = [part for name in names for part in read_torch_file(folder.store, folder.prefix + name, role=Role.MODEL)]
    tensors = {}
    for part in parts:
        for key, entry in part.tensors.items():
            if key in tensors:
                raise CorruptCheckpoint(f"`{key}` stands in two of the {len(names)} files of pytorch_model.bin")
            tensors[key] = entry
    total = int(names[0][-9:-4])
    problems = [problem for part in parts for problem in part.problems]
    problems += [
        Problem(
            severity=Severity.ERROR,
            code="missing-file",
            where=folder.prefix + name,
            message="one of a numbered set, but not there",
        )
        for name in (f"pytorch_model-{n:05}-of-{total:05}.bin" for n in range(1, total + 1))
        if name not in folder.files
    ]
    files = {file: size for part in parts for file, size in part.files.items()}
    return replace(parts[0], name="pytorch_model", tensors=tensors, files=files, problems=problems)


def _optimizer_parts(folder: Folder) -> Iterator[Part]:
    role = Role.OPTIMIZER
    for name in sorted(folder.folders):
        if _OPTIMIZER_FOLDER.fullmatch(name):
            sub = folder.sub(name)
            if looks_like_dcp(sub) or not sub.files:
                read = partial(_read_named, sub, name, role)
                yield from tolerate(read, sub, name, role, _placed(sub, sub.files))
    for name in folder.files:
        if _FULL_OPTIMIZER.fullmatch(name):
            stem = name.rpartition(".")[0]
            read = partial(read_torch_file, folder.store, folder.prefix + name, name=stem, role=role)
            yield from tolerate(read, folder, stem, role, _placed(folder, [name]))


def _named(parts: list[Part], name: str) -> Iterator[Part]:
    for number, part in enumerate(parts):
        yield part if number == 0 else replace(part, name=f"{name}/{part.name}")


def _small_parts(folder: Folder) -> Iterator[Part]:
    """List schedulers, random states and the like; their values are read on demand."""
    for role, pattern in _SMALL.items():
        for name in folder.files:
            if pattern.fullmatch(name):
                file, size = folder.prefix + name, folder.files[name]
                entry = ObjectEntry(key=name, name=name, file=file, start=0, stop=size)
                yield Part(
                    name=name.rpartition(".")[0],
                    role=role,
                    dialect="torch-file",
                    folder=folder.prefix.rstrip("/"),
                    files={file: size},
                    objects={name: entry},
                )


def _trainer_state(folder: Folder) -> dict[str, object]:
    if "trainer_state.json" not in folder.files:
        return {}
    try:
        state = json.loads(folder.store.read(folder.prefix + "trainer_state.json"))
    except (ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def _identify(folder: Folder, parts: list[Part]) -> tuple[str, str]:
    if "trainer_state.json" in folder.files:
        return "trainer", "Trainer checkpoint"
    if any(part.dialect == "rank-files" for part in parts):
        if any(key.startswith("state.model.") for part in parts for key in part.tensors):
            return "composer", "Composer checkpoint, one file per rank"
        verl = any("_world_size_" in file for part in parts for file in part.files)
        return "rank-files", "one file per rank (verl and kin)" if verl else "one file per rank"
    if any(name.startswith(("pytorch_model_", "optimizer_")) for name in folder.folders) or any(
        name.startswith("pytorch_model_fsdp") for name in folder.files
    ):
        return "accelerate", "Accelerate save_state folder"
    if any(file.endswith(".safetensors") for part in parts for file in part.files):
        return "hf-safetensors", "safetensors model folder"
    return "torch-files", "folder of torch.save files"


def _cross_checks(parts: list[Part]) -> Iterator[Problem]:
    sizes = {part.name: part.world_size for part in parts if part.dialect in ("dcp", "rank-files") and part.world_size}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        yield Problem(
            severity=Severity.NOTE,
            code="world-sizes-differ",
            where="",
            message=f"parts were written by different numbers of ranks ({listed})",
        )
