"""Compare an adapter with the base model that it is made for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fsdp_ckpt.catalog import Part, Problem, TensorEntry
from fsdp_ckpt.names import clean_fqn
from fsdp_ckpt.ops.validation.wording import capped, counted, few, finding, shape_text

__all__ = ["compare_adapter"]

_PEFT = "base_model.model."
_TUNED = re.compile(r"(?P<module>.+?)\.(?:lora|ia3|lokr|hada|oft|boft|vera)_.*")
_LORA = re.compile(r"(?P<module>.+?)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.\w+)*")
_CONV1D = re.compile(r"(?:^|\.)c_(?:attn|proj|fc)$")
"""Modules of GPT-2 whose matrices are (in, out)."""


def compare_adapter(adapter: Part, base: Part, name: str) -> Iterator[Problem]:
    """Yield what of an adapter does not fit a base model: LoRA's matrices by their length, other tensors by shape.

    Args:
        adapter: The adapter, as PEFT names its tensors.
        base: The model.
        name: What to call the model.
    """
    weights = {clean_fqn(entry.name): entry for entry in base.tensors.values()}
    pairs = [(entry, _target(entry, weights)) for entry in adapter.tensors.values()]
    matched = [(entry, target) for entry, target in pairs if target is not None]
    strange = [entry.key for entry, target in pairs if target is None and "." in entry.name]
    message = f"{len(matched)} of {counted(len(pairs), 'tensor')} belong to a weight of {name}"
    yield finding("adapter", adapter.name, message)
    if strange:
        message = f"{counted(len(strange), 'tensor')} of modules that {name} does not have: {few(strange)}"
        yield finding("unexpected-key", strange[0], message)
    yield from capped(_shapes(matched, name))


def _target(entry: TensorEntry, weights: Mapping[str, TensorEntry]) -> TensorEntry | None:
    """Return the weight that a tensor of an adapter changes, or takes the place of."""
    name = clean_fqn(entry.name)
    name = name.partition(_PEFT)[2] if _PEFT in name else name
    match = _TUNED.fullmatch(name)
    wanted = f"{match['module']}.weight" if match is not None else name
    # The base model may have been saved with or without its head around it.
    for known in (wanted, wanted.removeprefix("model."), f"model.{wanted}"):
        if known in weights:
            return weights[known]
    return None


def _shapes(pairs: list[tuple[TensorEntry, TensorEntry]], name: str) -> Iterator[Problem]:
    for entry, weight in pairs:
        match = _LORA.fullmatch(clean_fqn(entry.name))
        if match is None:
            fits = entry.shape == weight.shape or _TUNED.fullmatch(entry.name) is not None
        elif len(entry.shape) != 2 or len(weight.shape) != 2 or weight.dtype.kind != "float":
            continue  # convolutions, experts, or quantized weights
        else:
            # A is (rank, in), B (out, rank). A weight is (out, in), an embedding and GPT-2's Conv1D (in, out).
            is_turned = match["embedding"] is not None or _CONV1D.search(match["module"]) is not None
            out, into = reversed(weight.shape) if is_turned else weight.shape
            fits = entry.shape[1] == into if match["side"] == "A" else entry.shape[0] == out
        if not fits:
            message = f"has the shape {shape_text(entry.shape)}; `{weight.name}` in {name} {shape_text(weight.shape)}"
            yield finding("shape-differs", entry.key, message)
