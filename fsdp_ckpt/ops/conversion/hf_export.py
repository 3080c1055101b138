"""Make a folder that ``from_pretrained`` opens: names, config, side files; checked before anything is written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdp_ckpt.catalog import DType, Shape
from fsdp_ckpt.errors import Incompatible, UsageError
from fsdp_ckpt.ops.conversion.hf_conversions import LoadedNames, loaded_names
from fsdp_ckpt.ops.conversion.hf_expected import ExpectedTensors, expected_tensors
from fsdp_ckpt.ops.conversion.hf_names import Prefixes, find_prefixes, missing_from
from fsdp_ckpt.ops.side_files import SideFiles
from fsdp_ckpt.ops.validation.wording import counted, few, shape_text
from fsdp_ckpt.plan.merge import find_tie_candidates
from fsdp_ckpt.plan.output import OutputTensor
from fsdp_ckpt.store.remote.mirrors import materialise

__all__ = ["HfExport", "prepare_export"]

_SHOWN = 8
_DTYPE_KEYS = ("dtype", "torch_dtype")
_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|embed_out|output|output_layer|output_projection|decoder)\.weight")
"""The names under which the output head may be left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfExport:
    """What to write.

    Attributes:
        tensors: Under the names that the model's class expects.
        files: What stands beside the weights, by name: config.json, and files to copy, which may be large.
        notes: What was changed, and what could not be compared.
        warnings: What the user should know.
    """

    tensors: Sequence[OutputTensor]
    files: Mapping[str, bytes | Path]
    notes: Sequence[str] = field(default=())
    warnings: Sequence[str] = field(default=())


def prepare_export(
    tensors: Sequence[OutputTensor],
    side: SideFiles,
    *,
    dtype: DType | None = None,
    tied: Mapping[str, str] | None = None,
) -> HfExport:
    """Bring a model into the form that transformers loads, and compare it with its configuration.

    Args:
        tensors: All tensors of the model, without those that ``tied`` leaves out.
        side: Side files with a config.json, see ``hf_side.export_side_files``.
        dtype: What float tensors are converted to; None for no conversion.
        tied: Name of the tensor that is kept, by name that is not written because it is the same (``ops.ties``).

    Raises:
        Incompatible: Tensors that the model needs are missing, or have other shapes; several models are in it.
        UsageError: There is no config.json.
    """
    if "config.json" not in side.files:
        raise UsageError(
            "a folder for transformers needs a config.json", hint="--config-from DIR, or --config-from owner/name"
        )
    notes: list[str] = []
    warnings: list[str] = []
    expected, reason = expected_tensors(side.files["config.json"], side.config)
    if expected is None:
        notes.append(f"names and shapes were not compared with config.json: {reason}")
    else:
        sizes = {tensor.name: tensor.shape for tensor in tensors}
        heads = {name: sizes[kept] for name, kept in (tied or {}).items() if kept in sizes and _HEAD.fullmatch(name)}
        change = find_prefixes({**sizes, **heads}, expected)
        if change is not None:
            tensors, heads = _renamed(tensors, change, expected, notes), _all_renamed(heads, change, expected)
        warnings += _compare(tensors, heads, expected, side.config)
    if "tokenizer_config.json" in side.missing:
        warnings.append("no tokenizer was found beside the checkpoint: the folder has none")
    changes = _config_changes(tensors, side.config, dtype, tied or {}, notes)
    files: dict[str, bytes | Path] = {name: materialise(path) for name, path in side.files.items()}
    said = materialise(side.files["config.json"]).read_bytes()
    files["config.json"] = (json.dumps({**side.config, **changes}, indent=2) + "\n").encode() if changes else said
    return HfExport(tensors=tensors, files=files, notes=notes, warnings=warnings)


def _renamed(
    tensors: Sequence[OutputTensor], change: Prefixes, expected: ExpectedTensors, notes: list[str]
) -> Sequence[OutputTensor]:
    names = [change.apply(tensor.name, expected) for tensor in tensors]
    renamed = [
        tensor if tensor.name == name else replace(tensor, name=name, path=())
        for tensor, name in zip(tensors, names, strict=True)
    ]
    number = sum(a is not b for a, b in zip(tensors, renamed, strict=True))
    notes.append(f"{change}, as {expected.judge} calls them: {counted(number, 'tensor')}")
    return renamed


def _all_renamed(shapes: Mapping[str, Shape], change: Prefixes, expected: ExpectedTensors) -> dict[str, Shape]:
    return {change.apply(name, expected): shape for name, shape in shapes.items()}


def _compare(
    tensors: Sequence[OutputTensor],
    heads: Mapping[str, Shape],
    expected: ExpectedTensors,
    config: Mapping[str, Any],
) -> list[str]:
    """Return warnings.

    Raises:
        Incompatible: The model could not be loaded.
    """
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    strange = [name for name in shapes if name not in expected]
    loaded = loaded_names(strange, config) if strange else LoadedNames({}, is_certain=True)
    known = {other for other, name in loaded.names.items() if name in expected}
    strange = [name for name in strange if name not in known]
    there = {**shapes, **heads, **{loaded.names[name]: () for name in known}}
    faults = [f"`{name}` is missing{_expected(expected, name)}" for name in missing_from(there, expected)]
    other_shapes = [
        f"`{name}` has the shape {shape_text(shape)}{_expected(expected, name)}"
        for name, shape in shapes.items()
        if expected.shape_of(name) not in (None, shape)
    ]
    if (faults and loaded.is_certain) or other_shapes:
        faults += other_shapes
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise Incompatible(
            f"{counted(len(faults), 'tensor')} not as {expected.judge} needs by config.json: "
            f"{'; '.join(faults[:_SHOWN])}{more}",
            hint="give the configuration of this very model: --config-from DIR",
        )
    found = []
    if faults:
        found.append(f"not all names could be compared: transformers renames some as it loads them; {faults[0]}")
    if strange:
        found.append(f"{counted(len(strange), 'tensor')} that {expected.judge} does not load: {few(strange)}")
    return found


def _expected(expected: ExpectedTensors, name: str) -> str:
    shape = expected.shape_of(name)
    return "" if shape is None else f", {shape_text(shape)} expected"


def _config_changes(
    tensors: Sequence[OutputTensor],
    config: Mapping[str, Any],
    dtype: DType | None,
    tied: Mapping[str, str],
    notes: list[str],
) -> dict[str, Any]:
    """Return the values of config.json that have to be others."""
    changes: dict[str, Any] = {}
    said = [key for key in _DTYPE_KEYS if key in config]
    if dtype is not None:
        keys = said or ["dtype" if _is_new(config) else "torch_dtype"]
        changes |= {key: dtype.name for key in keys if config.get(key) != dtype.name}
        changes |= {
            part: {**value, **{key: dtype.name for key in _DTYPE_KEYS if key in value}}
            for part, value in config.items()
            if part.endswith("_config") and isinstance(value, dict) and any(key in value for key in _DTYPE_KEYS)
        }
        if changes:
            notes.append(f"config.json: {keys[0]} is {dtype.name}")
    else:
        kinds = {tensor.dtype.name for tensor in tensors if tensor.dtype.kind == "float"}
        name = config.get(said[0]) if said else None
        if isinstance(name, str) and kinds and name.removeprefix("torch.") not in kinds:
            notes.append(f"the tensors are {', '.join(sorted(kinds))}; by config.json they are loaded as {name[:40]}")
    if any(_HEAD.fullmatch(name) for name in tied) and config.get("tie_word_embeddings") is not True:
        changes["tie_word_embeddings"] = True
        notes.append("config.json: tie_word_embeddings is true")
    pair = find_tie_candidates(tensors)
    is_parted = pair is not None and (pair[0].addition is None) != (pair[1].addition is None)
    if is_parted and config.get("tie_word_embeddings") is not False:
        # An adapter was folded into one of them. Tied again while loading, the other would be lost.
        changes["tie_word_embeddings"] = False
        notes.append("config.json: tie_word_embeddings is false")
    return changes


def _is_new(config: Mapping[str, Any]) -> bool:
    """Whether the configuration is of a version that calls the element type ``dtype``: 4.56 and later."""
    words = str(config.get("transformers_version", "")).split(".")
    numbers = [int(word) for word in words[:2] if word.isdecimal()]
    return len(numbers) == 2 and (numbers[0], numbers[1]) >= (4, 56)
