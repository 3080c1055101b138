"""Check names and shapes: wrappers that leaked into names, and tensors that are one rank's view of what they seem."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from fsdp_ckpt.catalog import Checkpoint, Part, Problem, Role, Severity, TensorEntry
from fsdp_ckpt.names import clean_fqn, is_flat_param, strip_wrappers
from fsdp_ckpt.ops.validation.expected import ExpectedModel, expected_beside
from fsdp_ckpt.ops.validation.wording import capped, counted, few, finding, shape_text

__all__ = ["check_names", "is_adapter"]

_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PEFT = "base_model.model."
_TUNED = re.compile(r"(?:^|\.)(?:lora_|ia3_|lokr_|hada_|oft_|boft_|vera_)")
_ADAPTER_NAME = re.compile(r"(?:^|\.)lora_(?:embedding_)?[AB]\.(?!(?:weight|bias)$)(\w+)(?:\.(?:weight|bias))?$")
"""LoRA's matrices as they are called in a live model: ``lora_A.default.weight``."""
_WRAPPER = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|_fpw_module)(?=\.)")
_MATRIX = re.compile(
    r"(?:^|\.)(?:embed_tokens|tok_embeddings|word_embeddings|position_embeddings|wte|wpe|lm_head|c_attn|c_fc"
    r"|query_key_value|dense_h_to_4h|dense_4h_to_h|gate_up_proj|[a-z0-9]+_proj|lora_[AB](?:\.\w+)?)\.weight"
)
"""Names that only matrices have, as models of transformers are written."""


def check_names(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yield what the names and shapes of a checkpoint's tensors give away. Nothing but its catalog is needed.

    Example:
        >>> from fsdp_ckpt.layouts.registry import read_checkpoint
        >>> for problem in check_names(read_checkpoint("checkpoint-100")):  # doctest: +SKIP
        ...     print(problem.where, problem.message)
    """
    beside = expected_beside(checkpoint)
    for part in checkpoint.parts:
        if part.flat is not None:
            yield from _flat_parameters(part)
        elif part.role is Role.MODEL:
            yield from _adapter_names(part) if is_adapter(part) else _wrapped_names(part)
            yield from capped(_empty_tensors(part, beside))
            yield from capped(_other_shapes(part, beside))
            yield from _empty_buffers(part, beside)


def is_adapter(part: Part) -> bool:
    """Tell whether a part is an adapter as PEFT saves it."""
    return any(file.rpartition("/")[2] in _ADAPTER_FILES for file in part.files)


def _flat_parameters(part: Part) -> Iterator[Problem]:
    flat = [entry for entry in part.tensors.values() if is_flat_param(entry.name)]
    where = flat[0].key if flat else part.name
    reason = str(part.flat)
    if flat:
        reason += f"; {counted(len(flat), 'flat parameter')} of {sum(entry.numel for entry in flat)} elements"
    # An optimizer's slices load where they come from; the weights beside it are whole.
    severity = Severity.NOTE if part.role is Role.OPTIMIZER else None
    yield finding("flat-parameters", where, reason, severity=severity)
    if part.dialect == "dcp":
        yield from _local_slices(part, flat)


def _local_slices(part: Part, flat: list[TensorEntry]) -> Iterator[Problem]:
    """LOCAL_STATE_DICT with use_orig_params: each rank had its own slice under the same name, and one was kept."""
    units = [strip_wrappers(entry.name).rpartition(".")[0] for entry in flat]
    slices = [
        entry
        for entry in part.tensors.values()
        if _is_parameter(entry.name) and any(_is_below(strip_wrappers(entry.name), unit) for unit in units)
    ]
    certain = [entry for entry in slices if not entry.numel or _MATRIX.search(entry.name)]
    if not slices or any(len(entry.shape) > 1 for entry in slices):
        return
    if certain or any(entry.name.endswith(".weight") and _has_bias(entry, slices) for entry in slices):
        names = [entry.key for entry in slices]
        message = f"{counted(len(slices), 'tensor')} beside the flat parameters are one rank's slices: {few(names)}"
        yield finding("local-slices", names[0], message)


def _has_bias(entry: TensorEntry, others: list[TensorEntry]) -> bool:
    """Whether a weight is longer than its bias, which no vector of a norm is."""
    bias = entry.name.removesuffix("weight") + "bias"
    return any(other.name == bias and other.shape != entry.shape for other in others)


def _is_below(name: str, unit: str) -> bool:
    return not unit or name.startswith(f"{unit}.")


def _is_parameter(name: str) -> bool:
    return name.rpartition(".")[2] in ("weight", "bias")


def _wrapped_names(part: Part) -> Iterator[Problem]:
    renamed = [entry for entry in part.tensors.values() if clean_fqn(entry.name) != entry.name]
    if renamed:
        count = f"{len(renamed)} of {counted(len(part.tensors), 'name')}"
        verb = "has" if len(renamed) == 1 else "have"
        message = f"{count} {verb} the prefix of a wrapper ({_wrappers(renamed)}), first `{renamed[0].name}`"
        yield finding("wrapper-prefix", renamed[0].key, message)


def _wrappers(entries: list[TensorEntry]) -> str:
    found: Counter[str] = Counter()
    for entry in entries:
        found.update(set(_WRAPPER.findall(entry.name)))
        found["module"] += strip_wrappers(entry.name).startswith("module.")
    return ", ".join(f"`{name}.` {number}" for name, number in found.most_common() if number)


def _adapter_names(part: Part) -> Iterator[Problem]:
    names = [entry.name for entry in part.tensors.values()]
    tuned = [name for name in names if _PEFT in name or _TUNED.search(name)]
    lost = [name for name in tuned if not name.startswith(_PEFT)]
    if lost:
        front = lost[0].partition(_PEFT)[0] if _PEFT in lost[0] else ""
        instead = f" but with `{front}`" if front else ""
        yield _unmatched(names, lost, f"do not begin with `{_PEFT}`{instead}")
    wrapped = [name for name in tuned if name.startswith(_PEFT) and strip_wrappers(name) != name]
    if wrapped:
        wrappers = dict.fromkeys(found for name in wrapped for found in _WRAPPER.findall(name))
        yield _unmatched(names, wrapped, f"have a wrapper in them ({', '.join(f'`{name}.`' for name in wrappers)})")
    named = {name: match for name in names if (match := _ADAPTER_NAME.search(name)) is not None}
    if named:
        inside = next(iter(named.values()))[1]
        yield _unmatched(names, list(named), f"have the adapter's name in them (`.{inside}`), which PEFT leaves out")


def _unmatched(names: list[str], some: list[str], why: str) -> Problem:
    return finding("adapter-prefix", some[0], f"{len(some)} of {counted(len(names), 'name')} {why}: {few(some)}")


def _empty_tensors(part: Part, beside: tuple[str, ExpectedModel] | None) -> Iterator[Problem]:
    for entry in part.tensors.values():
        if not entry.numel and (_is_parameter(entry.name) or _expected(entry, beside) is not None):
            message = f"has the shape {shape_text(entry.shape)}{_says(entry, beside)}"
            yield finding("empty-tensor", entry.key, message)


def _empty_buffers(part: Part, beside: tuple[str, ExpectedModel] | None) -> Iterator[Problem]:
    names = [
        entry.key
        for entry in part.tensors.values()
        if not entry.numel
        and not _is_parameter(entry.name)
        and _expected(entry, beside) is None
        and not entry.name.endswith("_extra_state")  # Transformer Engine's, empty without FP8
    ]
    if names:
        message = f"{counted(len(names), 'tensor')} without elements that may be meant so: {few(names)}"
        yield finding("empty-tensor", names[0], message, severity=Severity.NOTE)


def _other_shapes(part: Part, beside: tuple[str, ExpectedModel] | None) -> Iterator[Problem]:
    for entry in part.tensors.values():
        if not entry.numel or entry.dtype.kind != "float":
            continue
        wanted = _expected(entry, beside)
        is_matrix = len(wanted) > 1 if wanted is not None else _MATRIX.search(entry.name) is not None
        if len(entry.shape) == 1 and is_matrix:
            says = _says(entry, beside) or "; tensors of such a name are matrices"
            yield finding("flattened-tensor", entry.key, f"has the shape {shape_text(entry.shape)}{says}")
        elif wanted is not None and entry.shape != wanted:
            # Loaders of transformers refuse it. Where not all is known, the configuration may be of another make.
            message = f"has the shape {shape_text(entry.shape)}{_says(entry, beside)}"
            is_certain = beside is not None and beside[1].is_certain and _is_for_transformers(part)
            yield finding("shape-differs", entry.key, message, severity=None if is_certain else Severity.WARNING)


def _is_for_transformers(part: Part) -> bool:
    """Tell whether ``from_pretrained`` loads a part by the configuration beside it; load_state asks the model."""
    return part.dialect == "safetensors" or (part.dialect == "torch-file" and part.name == "pytorch_model")


def _expected(entry: TensorEntry, beside: tuple[str, ExpectedModel] | None) -> tuple[int, ...] | None:
    return None if beside is None else beside[1].shape_of(clean_fqn(entry.name))


def _says(entry: TensorEntry, beside: tuple[str, ExpectedModel] | None) -> str:
    wanted = _expected(entry, beside)
    return "" if beside is None or wanted is None else f"; by {beside[0]} it is {shape_text(wanted)}"
