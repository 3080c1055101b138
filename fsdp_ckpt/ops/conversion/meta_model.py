"""The names and shapes that transformers gives to the tensors of a model, from its ``config.json``.

The model is built on torch's meta device: no weights are made, and no code of the model's own is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.errors import CheckpointNotFound, UsageError
from fsdp_ckpt.store.remote.mirrors import materialise

__all__ = ["MetaModel", "meta_shapes"]

_LIMIT_BYTES = 4 << 20
_MOST = 1 << 14
"""Layers and experts that a model may have: each is built, and a configuration may be anybody's."""

_COUNTS = re.compile(r"n_layers?|num_.*(?:layers|blocks|experts)|n_routed_experts|depths?")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaModel:
    """A model without weights.

    Attributes:
        class_name: The class in transformers (``LlamaForCausalLM``).
        parameters: Shape by name, in the order of ``named_parameters()``: a shared one once, by its first name.
        buffers: Likewise those that a state dict has.
        tied: Further names of shared parameters, with the name that stands in ``parameters``.
    """

    class_name: str
    parameters: Mapping[str, Shape]
    buffers: Mapping[str, Shape]
    tied: Mapping[str, str]


def meta_shapes(config: Path) -> MetaModel | None:
    """Build the model of a configuration on the meta device.

    Args:
        config: ``config.json``, or the folder that it is in. The class is the one that ``architectures`` names; where
            it names none, the causal language model of its ``model_type``.

    Returns:
        The model; None where transformers is not installed.

    Raises:
        CheckpointNotFound: There is no such file.
        UsageError: It is no configuration of a model that transformers knows.
    """
    file = config / "config.json" if config.is_dir() else config
    values = _read(file)
    _refuse_vast(file, values)
    try:
        import torch
        import transformers
    except ImportError:
        return None
    try:
        # Without an answer for remote code transformers asks for one on the terminal.
        loaded = transformers.AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
        kind = _class_of(file, values, transformers)
        with torch.device("meta"):
            if kind is None:
                model: Any = transformers.AutoModelForCausalLM.from_config(loaded, trust_remote_code=False)
            else:
                model = kind(loaded)
        model.tie_weights()
    except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError,
            TypeError, ValueError) as error:  # fmt: skip
        if isinstance(error, UsageError):
            raise
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise UsageError(f"transformers makes no model of `{file}`: {reason}") from error
    return _describe(model)


def _read(file: Path) -> Mapping[str, Any]:
    try:
        with materialise(file).open("rb") as opened:
            data = opened.read(_LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointNotFound(f"`{file}` does not exist") from None
    except OSError as error:
        raise UsageError(f"`{file}` cannot be read: {error.strerror}") from None
    try:
        values = json.loads(data) if len(data) <= _LIMIT_BYTES else None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"`{file}` is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"`{file}` is no configuration of a model")
    return values


def _refuse_vast(file: Path, values: Mapping[str, Any]) -> None:
    waiting: list[Mapping[str, Any]] = [values]
    while waiting:
        for name, value in waiting.pop().items():
            if isinstance(value, dict):
                waiting.append(value)
            elif type(value) is int and value > _MOST and _COUNTS.fullmatch(name):
                raise UsageError(f"`{file}` says {name}: {value}; a model of more than {_MOST} is not built")


def _class_of(file: Path, values: Mapping[str, Any], transformers: Any) -> Any:
    names = values.get("architectures")
    if not names:
        return None
    name = names[0] if isinstance(names, list) and isinstance(names[0], str) else ""
    kind = getattr(transformers, name, None) if re.fullmatch(r"[A-Za-z]\w{0,200}", name) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        shown = str(names)[:80]
        raise UsageError(f"`{file}` is of {shown}, which transformers {transformers.__version__} does not have")
    return kind


def _describe(model: Any) -> MetaModel:
    parameters: dict[str, Shape] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        kept = first.setdefault(id(parameter), name)
        if kept == name:
            parameters[name] = tuple(parameter.shape)
        else:
            tied[name] = kept
    saved = model.state_dict()
    buffers = {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name in saved}
    return MetaModel(class_name=type(model).__name__, parameters=parameters, buffers=buffers, tied=tied)
