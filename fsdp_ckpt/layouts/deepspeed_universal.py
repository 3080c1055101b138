"""Universal checkpoints, as ``ds_to_universal.py`` makes them: one folder per parameter, whatever the ranks were.

``zero/NAME/fp32.pt`` holds ``{"param": tensor}``, or from ZeRO-3 a flat tensor whose shape is in the model file;
``exp_avg.pt`` and the like are of the same form, ``step.pt`` is a number. ``zero/optimizer_state.pt`` has the groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fsdp_ckpt.catalog import DTYPES, ObjectEntry, Part, Problem, Role, Severity, Shape, TensorEntry
from fsdp_ckpt.codec.tensors import TensorRef
from fsdp_ckpt.codec.torchzip import Archive
from fsdp_ckpt.errors import Incompatible, MalformedFile
from fsdp_ckpt.layouts.deepspeed_files import DeepSpeedFiles
from fsdp_ckpt.layouts.deepspeed_flat import Segment
from fsdp_ckpt.layouts.deepspeed_model import Pieces, model_tensors
from fsdp_ckpt.layouts.deepspeed_optimizer import group_entries, scalar_entry
from fsdp_ckpt.layouts.deepspeed_state import ModuleState, Stored
from fsdp_ckpt.layouts.faults import coverage_problems
from fsdp_ckpt.layouts.torch_file import load_torch_file
from fsdp_ckpt.store.local import Folder

__all__ = ["read_universal"]

_GROUPS = "optimizer_state.pt"


def read_universal(files: DeepSpeedFiles, modules: Mapping[int, ModuleState]) -> list[Part]:
    """Read the parameters' folders.

    Args:
        files: What was found.
        modules: The model files, by rank.

    Raises:
        MalformedFile: A file is damaged, or of another shape than the model file says.
        Incompatible: It was made of a save in which DeepSpeed's converter takes parameters for each other.
    """
    first = modules[0]
    if first.is_shuffled and files.whole and first.world_size != 1:
        # The converter goes by the ranks' addresses, which are of the order without round_robin_gradients.
        raise Incompatible(
            f"{first.file}: the save was made with round_robin_gradients, and then DeepSpeed's ds_to_universal.py "
            "(as of 0.19.8) takes parameters for each other",
            hint="read the save that it was made from",
        )
    zero = files.folder.sub("zero")
    if first.shapes is None:
        raise MalformedFile(f"{first.file}: `param_shapes` is missing: nothing tells which parameters there are")
    shapes = {name: shape for group in first.shapes for name, shape in group.items()}
    weights: dict[str, TensorEntry] = {}
    state: dict[str, TensorEntry] = {}
    values: dict[str, ObjectEntry] = {}
    problems: list[Problem] = []
    sizes: dict[bool, dict[str, int]] = {True: files.sizes, False: {}}
    for name, shape in shapes.items():
        if name not in zero.folders or "/" in name:
            problems.append(_missing(f"{zero.prefix}{name}/fp32.pt"))
            weights[name] = _nothing(name, shape)
            continue
        folder = zero.sub(name)
        for file in folder.files:
            if not file.endswith(".pt"):
                continue
            field = file.removesuffix(".pt")
            is_weight = field == "fp32"
            sizes[is_weight][folder.prefix + file] = folder.files[file]
            path = ("state", name, field)
            entry = _read(folder, file, name if is_weight else ".".join(path), None if field == "step" else shape)
            if isinstance(entry, ObjectEntry):
                values[entry.key] = replace(entry, path=path)
            elif is_weight:
                weights[name] = entry
            else:
                state[entry.key] = replace(entry, path=path)
        if name not in weights:
            problems.append(_missing(f"{folder.prefix}fp32.pt"))
            weights[name] = _nothing(name, shape)
    is_cut = files.whole is None
    tensors, more = model_tensors(weights, modules, first.world_size or len(modules), is_cut=is_cut)
    part = Part(
        name="model",
        role=Role.MODEL,
        dialect="deepspeed",
        folder=files.folder.prefix.rstrip("/"),
        files=sizes[True],
        tensors=tensors,
        world_size=first.world_size,
        problems=[*problems, *more, *coverage_problems(tensors.values())],
    )
    parts = [part]
    if _GROUPS in zero.files:
        sizes[False][zero.prefix + _GROUPS] = zero.files[_GROUPS]
        options, held = _read_groups(zero, first)
        state, values = options | state, values | held
    if state or values:
        parts.append(
            replace(
                part,
                name="optimizer",
                role=Role.OPTIMIZER,
                files=sizes[False],
                tensors=state,
                objects=values,
                problems=[*_gaps(zero, state), *coverage_problems(state.values())],
            )
        )
    return parts


def _read(folder: Folder, file: str, key: str, shape: Shape | None) -> TensorEntry | ObjectEntry:
    """Read one value of a parameter; ``shape`` is that of the parameter, None for a value that has its own."""
    name = folder.prefix + file
    archive, value = load_torch_file(folder.store, name)
    if isinstance(value, dict):
        value = value.get("param")
    if not isinstance(value, TensorRef):
        if shape is None and isinstance(value, int | float):
            size = folder.files[file]
            return ObjectEntry(key=key, name=key, file=name, start=0, stop=size, value=value, decoded=True)
        raise MalformedFile(f"{name}: it holds no tensor")
    stored = Stored(archive, name, value)
    if shape is None or value.shape == shape:
        chunk = stored.chunk()
        return TensorEntry(key=key, name=key, dtype=value.dtype, shape=value.shape, chunks=(chunk,))
    numel = math.prod(shape)
    if value.shape != (numel,) or (numel > 1 and value.strides != (1,)):
        raise MalformedFile(f"{name}: a tensor of shape {value.shape}, the model file says {shape}")
    run = Segment(rank=0, group=0, start=0, first=0, numel=numel)
    entry = Pieces().entry(key, shape, [run], lambda _: stored)
    assert entry is not None
    return entry


def _read_groups(zero: Folder, first: ModuleState) -> tuple[dict[str, TensorEntry], dict[str, ObjectEntry]]:
    """Read the options of the groups, each of which has one flat vector, or in ZeRO-3 several."""
    assert first.shapes is not None
    file = zero.prefix + _GROUPS
    archive, value = load_torch_file(zero.store, file)
    groups = value.get("param_groups") if isinstance(value, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise MalformedFile(f"{file}: `param_groups` is missing")
    members, listed = [], []
    for group in groups:
        vectors = group.get("params")
        if not isinstance(vectors, list) or any(type(n) is not int for n in vectors):
            raise MalformedFile(f"{file}: a parameter group without `params`")
        listed += vectors
        if any(not 0 <= number < len(first.shapes) for number in vectors):
            raise MalformedFile(f"{file}: a parameter group of a vector that is not there")
        members.append([name for number in vectors for name in first.shapes[number]])
    if sorted(listed) != list(range(len(first.shapes))):
        raise MalformedFile(f"{file}: the parameter groups do not list each flat vector once")
    options: list[dict[str, Any]] = [{str(k): v for k, v in group.items() if k != "params"} for group in groups]
    tensors = [item for group in options for item in group.values() if isinstance(item, TensorRef)]
    stored = [Stored(archive, file, tensor) for tensor in tensors[:1]]
    entries, values = group_entries(options, members, file, zero.files[_GROUPS], stored)
    return _steps(value, archive, file, first) | entries, values


def _steps(value: Any, archive: Archive, file: str, first: ModuleState) -> dict[str, TensorEntry]:
    """Return the steps that ZeRO-3 counts per vector: there they have no files of their own."""
    assert first.shapes is not None
    inner = value.get("optimizer_state_dict")
    state = inner.get("state") if isinstance(inner, dict) else None
    found: dict[str, TensorEntry] = {}
    for number, names in enumerate(first.shapes):
        vector = state.get(number) if isinstance(state, dict) else None
        step = vector.get("step") if isinstance(vector, dict) else None
        if isinstance(step, TensorRef):
            for name in names:
                found |= scalar_entry(("state", name, "step"), Stored(archive, file, step))
    return found


def _gaps(zero: Folder, state: Mapping[str, TensorEntry]) -> Iterator[Problem]:
    """Find parameters that have some moments and lack others; one that was never trained has none."""
    kinds: dict[str, dict[str, None]] = {}
    for entry in state.values():
        if entry.path[0] == "state" and entry.path[2] != "step":
            kinds.setdefault(str(entry.path[1]), {})[str(entry.path[2])] = None
    every = {kind: None for found in kinds.values() for kind in found}
    for name, found in kinds.items():
        for kind in every.keys() - found.keys():
            message = f"`{name}` has {' and '.join(found)}, and no {kind}"
            yield Problem(
                severity=Severity.ERROR, code="missing-file", where=f"{zero.prefix}{name}/{kind}.pt", message=message
            )


def _missing(file: str) -> Problem:
    message = "the model file lists this parameter, but its weights are not there"
    return Problem(severity=Severity.ERROR, code="missing-file", where=file, message=message)


def _nothing(name: str, shape: Shape) -> TensorEntry:
    return TensorEntry(key=name, name=name, dtype=DTYPES["float32"], shape=shape, chunks=())
