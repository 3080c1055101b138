"""Compare a checkpoint with a configuration: of the model (``config.json``), or of the job (Accelerate's YAML)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.catalog import Checkpoint, Part, Problem, Role, Shape, TensorEntry
from fsdp_ckpt.config.launch import LaunchConfig
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.names import clean_fqn
from fsdp_ckpt.ops.validation.against_model import prefix_problem
from fsdp_ckpt.ops.validation.expected import HEAD, ExpectedModel, expect_model
from fsdp_ckpt.ops.validation.resume import check_resume
from fsdp_ckpt.ops.validation.wording import capped, counted, few, finding, shape_text

__all__ = ["check_launch", "check_model_config"]

_STACK = re.compile(
    r"(?P<stack>(?:[A-Za-z_]\w*\.)*?(?:layers|h|blocks|block|layer))\.(?P<number>\d{1,6})\.(?P<rest>.+)"
)
_PARTS_OF_ACCELERATE = re.compile(r"pytorch_model(_fsdp)?(_\d+)?")
_BASES = {"layers": "model.", "h": "transformer."}
"""What the base model of those whose layers are known is called within the whole model."""
_OF_EXPERTS = re.compile(r"expert|moe|router|\.gate\.", re.IGNORECASE)
_KEPT = "nothing can be compared with a checkpoint"


def check_model_config(part: Part, config: Mapping[str, Any], name: str) -> Iterator[Problem]:
    """Yield what of a model does not fit its ``config.json``. What that leaves open is not judged.

    Args:
        part: The saved model.
        config: What the file says.
        name: The file, for messages.

    Raises:
        UsageError: It tells nothing about tensors.
    """
    expected = expect_model(config)
    if expected is None or not expected.tells_something:
        raise UsageError(
            f"`{name}` tells neither names nor shapes of tensors: {_KEPT}",
            hint="compare with a checkpoint of the model: --against model.safetensors",
        )
    tensors = {clean_fqn(entry.name): entry for entry in part.tensors.values()}
    prefix = _strange_prefix(tensors, expected)
    if prefix:
        ours = [key for key in tensors if key.startswith(prefix)]
        yield prefix_problem(f"-{prefix}", tensors[ours[0]].key, len(ours), len(tensors), name)
        tensors = {key.removeprefix(prefix): entry for key, entry in tensors.items()}
    layers = _Layers.of(tensors, expected)
    yield from _unknown_layers(tensors, expected, config, name)
    yield from capped(_missing(tensors, layers, expected, name))
    yield from _surplus(layers, expected, name)
    yield from capped(_shapes(tensors, expected, name))


def _strange_prefix(tensors: Mapping[str, TensorEntry], expected: ExpectedModel) -> str:
    """Return what stands before the names of the whole model, where that is known and stands before most of them."""
    base = _Layers.of(tensors, expected).base
    usual = _BASES.get(expected.stack or "")
    heads = [key for key in tensors if key.endswith(f".{HEAD}")]
    prefix = ""
    if HEAD not in tensors and heads and (usual is not None or not expected.is_tied):
        prefix = heads[0].removesuffix(HEAD)
    elif usual is not None and base not in ("", usual):
        prefix = base.removesuffix(usual)
    is_common = sum(key.startswith(prefix) for key in tensors) > len(tensors) / 2
    return prefix if is_common else ""


def _unknown_layers(
    tensors: Mapping[str, TensorEntry], expected: ExpectedModel, config: Mapping[str, Any], name: str
) -> Iterator[Problem]:
    kind = str(config.get("model_type", ""))[:40] or "such a model"
    if expected.num_experts > 1 and not any(_OF_EXPERTS.search(key) for key in tensors):
        message = f"there are no experts in it; by {name} each layer of {kind} has {expected.num_experts}"
        yield finding("missing-key", next(iter(tensors), ""), message)
    if expected.stack is None:
        message = f"of {kind} {name} tells the number of layers and the shape of embedding and head only"
        yield finding("compared-in-part", "", message)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
    """The stack of layers in a checkpoint.

    Attributes:
        stack: What they stand under (``model.layers``).
        names: Names within each layer, by its number.
    """

    stack: str
    names: Mapping[int, frozenset[str]]

    @classmethod
    def of(cls, tensors: Mapping[str, TensorEntry], expected: ExpectedModel) -> _Layers:
        """Find the stack with most tensors in it, among those of the expected name where that is known."""
        matches = [match for name in tensors if (match := _STACK.fullmatch(name)) is not None]
        if expected.stack is not None:
            matches = [match for match in matches if match["stack"].rpartition(".")[2] == expected.stack]
        most = Counter(match["stack"] for match in matches).most_common(1)
        stack = most[0][0] if most else expected.stack or ""
        names: dict[int, set[str]] = {}
        for match in matches:
            if match["stack"] == stack:
                names.setdefault(int(match["number"]), set()).add(match["rest"])
        return cls(stack=stack, names={number: frozenset(some) for number, some in names.items()})

    @property
    def base(self) -> str:
        """What the base model stands under (``model.``)."""
        head, dot, _ = self.stack.rpartition(".")
        return head + dot


def _missing(
    tensors: Mapping[str, TensorEntry], layers: _Layers, expected: ExpectedModel, name: str
) -> Iterator[Problem]:
    for key, shape in expected.outside.items():
        full = layers.base + key
        if full not in tensors:
            yield finding("missing-key", full, f"is not there{_of_shape(shape)}, by {name}")
    if HEAD not in tensors and not expected.is_tied:
        yield finding("missing-key", HEAD, f"is not there{_of_shape(expected.optional.get(HEAD))}, by {name}")
    if expected.num_layers is None or (expected.stack is None and not layers.names):
        return
    for number in range(expected.num_layers):
        have = layers.names.get(number)
        where = f"{layers.stack}.{number}"
        if have is None:
            yield finding("missing-key", where, f"layer {number} of {expected.num_layers} is not there, by {name}")
            continue
        for key, shape in expected.layer.items():
            if key not in have:
                yield finding("missing-key", f"{where}.{key}", f"is not there{_of_shape(shape)}, by {name}")


def _of_shape(shape: Shape | None) -> str:
    return "" if shape is None else f", of the shape {shape_text(shape)}"


def _surplus(layers: _Layers, expected: ExpectedModel, name: str) -> Iterator[Problem]:
    """Layers beyond the last one; other models may have some for themselves (multi-token prediction)."""
    count = expected.num_layers
    if count is not None and expected.stack is not None:
        more = [f"{layers.stack}.{number}" for number in sorted(layers.names) if number >= count]
        if more:
            message = f"{counted(len(more), 'layer')} more than the {count} of {name}: {few(more)}"
            yield finding("unexpected-key", more[0], message)


def _shapes(tensors: Mapping[str, TensorEntry], expected: ExpectedModel, name: str) -> Iterator[Problem]:
    for key, entry in tensors.items():
        wanted = expected.shape_of(key)
        if wanted is not None and entry.shape != wanted:
            message = f"has the shape {shape_text(entry.shape)}; by {name} it is {shape_text(wanted)}"
            yield finding("shape-differs", entry.key, message)


def check_launch(checkpoint: Checkpoint, config: LaunchConfig, name: str) -> Iterator[Problem]:
    """Yield what does not fit the job that a configuration describes.

    Args:
        checkpoint: The checkpoint.
        config: What the file says.
        name: The file, for messages.
    """
    models = [part for part in checkpoint.parts if part.role is Role.MODEL]
    if config.fsdp is not None:
        for part in models:
            yield from _state_dict_type(part, config, name)
    yield from check_resume(checkpoint, config.num_processes)


def _state_dict_type(part: Part, config: LaunchConfig, name: str) -> Iterator[Problem]:
    assert config.fsdp is not None
    if part.flat is not None and config.fsdp.fsdp_version != 1:
        message = f"`{part.name}` holds FSDP1's flat parameters; {name} asks for FSDP2, which has none"
        yield finding("other-state-dict-type", part.name, message)
        return
    saved, wanted = _type_of(part), config.fsdp.state_dict_type
    if saved is None or saved == wanted:
        return
    message = f"`{part.name}` is {_DESCRIBED.get(saved, f'a {saved}')}; {name} says fsdp_state_dict_type: {wanted}"
    yield finding("other-state-dict-type", part.name, message)


_DESCRIBED = {
    "rank-files": "one file per rank (use_dcp=False), which Accelerate loads only when it is asked to",
}


def _type_of(part: Part) -> str | None:
    """Return how Accelerate would call a part, None for what Accelerate did not lay out."""
    if _PARTS_OF_ACCELERATE.fullmatch(part.name) is None:
        return None
    match part.dialect:
        case "dcp":
            return "SHARDED_STATE_DICT"
        case "torch-file":
            return "FULL_STATE_DICT"
        case "rank-files":
            return "LOCAL_STATE_DICT" if part.flat is not None else "rank-files"
        case _:
            return None
