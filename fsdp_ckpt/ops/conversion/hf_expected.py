"""The tensors that a model has by its ``config.json``: from transformers where it is installed, else from our rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.ops.conversion.meta_model import MetaModel, meta_shapes
from fsdp_ckpt.ops.validation.expected import HEAD, ExpectedModel, expect_model

__all__ = ["ExpectedTensors", "expected_tensors"]

_BASES = {"layers": "model.", "h": "transformer."}
"""What the base model stands under within the whole one."""

_MOST_LAYERS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensors:
    """What a model consists of.

    Attributes:
        judge: Who says so, for messages.
        required: Shape by name; None where it is not known.
        optional: Likewise for tensors that may be missing.
        tied: Names that are the same tensor as another one, with the name in ``required``.
    """

    judge: str
    required: Mapping[str, Shape | None]
    optional: Mapping[str, Shape | None] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        """Whether the model knows a name."""
        return name in self.required or name in self.optional or name in self.tied

    def shape_of(self, name: str) -> Shape | None:
        """Return the shape of a tensor, None where it is not known."""
        name = self.tied.get(name, name)
        return self.required[name] if name in self.required else self.optional.get(name)


def expected_tensors(file: Path, config: Mapping[str, Any]) -> tuple[ExpectedTensors | None, str | None]:
    """Return what a model has, and why not all of it is known.

    Args:
        file: ``config.json``.
        config: What it says.

    Returns:
        The tensors; None where nothing is certain, with the reason.
    """
    if "quantization_config" in config:
        return None, "config.json has a quantization_config: how such a model names its tensors is not known"
    reason = "transformers is not installed"
    try:
        model = meta_shapes(file)
    except UsageError as error:
        model, reason = None, error.message
    if model is not None:
        return _of_transformers(model), None
    expected = expect_model(config)
    found = _of_rules(expected, config) if expected is not None else None
    return found, None if found is not None else reason


def _of_transformers(model: MetaModel) -> ExpectedTensors:
    return ExpectedTensors(
        judge=model.class_name, required=model.parameters, optional=model.buffers, tied=model.tied
    )  # fmt: skip


def _of_rules(expected: ExpectedModel, config: Mapping[str, Any]) -> ExpectedTensors | None:
    names = config.get("architectures")
    class_name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "CausalLM"
    has_head = class_name.endswith(("CausalLM", "LMHeadModel"))
    stack, count = expected.stack, expected.num_layers
    if stack not in _BASES or not (has_head or class_name.endswith("Model")) or not expected.layer:
        return None
    if count is None or count > _MOST_LAYERS:
        return None
    base = _BASES[stack] if has_head else ""
    required = {base + name: shape for name, shape in expected.outside.items()}
    optional: dict[str, Shape | None] = {}
    for number in range(count):
        where = f"{base}{stack}.{number}."
        required |= {where + name: shape for name, shape in expected.layer.items()}
        optional |= {where + name: shape for name, shape in expected.optional.items() if name != HEAD}
    if has_head:
        (optional if expected.is_tied else required)[HEAD] = expected.optional.get(HEAD)
    return ExpectedTensors(judge="config.json", required=required, optional=optional)
