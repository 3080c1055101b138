"""Find a model in the optimizer's place, and the other way round; and checkpoints that lack one of the two.

Names of files and folders say what a part is for. Here its content is asked.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_ckpt.catalog import Checkpoint, Part, Problem, Role, Severity, TensorEntry
from fsdp_ckpt.names import clean_fqn
from fsdp_ckpt.ops.validation.wording import finding

__all__ = ["check_absent_parts", "check_misplaced_parts", "is_optimizer", "no_model", "no_optimizer"]

_KINDS = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
"""What torch's own optimizers keep of a parameter."""

_NEARLY_ALL = 0.9
_LONE_PARTS = ("dcp", "torch-file", "safetensors")
"""Layouts of what may be the optimizer's own folder or file: nobody asked for the model."""


def check_misplaced_parts(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yield parts that hold what their names do not say. Nothing but the catalog is needed."""
    models = [part for part in checkpoint.parts if part.role is Role.MODEL and part.dialect != "unreadable"]
    for part in models:
        if is_optimizer(part):
            message = "it holds an optimizer's state, not the weights of a model"
            yield finding("misplaced-file", _place(part), message)
    names = {_name(entry) for part in models if not is_optimizer(part) for entry in part.tensors.values()}
    names |= {name for part in checkpoint.parts for name in _with_state(part)}
    for part in checkpoint.parts:
        if part.role is Role.OPTIMIZER and part.tensors and not _has_state(part) and _is_model(part, names):
            message = f"it has tensors, `{next(iter(part.tensors))}` first, but neither state nor param_groups"
            yield finding("misplaced-file", _place(part), message)


def is_optimizer(part: Part) -> bool:
    """Tell whether a part that is called a model holds what only optimizers have, and nearly nothing else."""
    if not part.tensors:
        return any(entry.name.startswith("param_groups.") for entry in part.objects.values())
    return len(_with_state(part)) >= _NEARLY_ALL * len(part.tensors)


def check_absent_parts(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yield what a checkpoint of a training lacks: an error for the model, a note for the optimizer.

    Those who mean to resume are told more by ``check_resume``.
    """
    roles = {part.role for part in checkpoint.parts}
    if checkpoint.layout in _LONE_PARTS:
        return
    if Role.OPTIMIZER in roles and Role.MODEL not in roles:
        yield no_model()
    if Role.MODEL in roles and Role.OPTIMIZER not in roles and checkpoint.layout == "accelerate":
        yield no_optimizer(Severity.NOTE)


def no_model() -> Problem:
    """Return that there is no model."""
    return finding("no-model", "", "there are no model weights in it")


def no_optimizer(severity: Severity | None = None) -> Problem:
    """Return that there is no optimizer."""
    return finding("no-optimizer", "", "there is no optimizer in it", severity=severity)


def _with_state(part: Part) -> list[str]:
    """Return the parameter of each tensor that is state of one, of a kind that is known."""
    found = []
    for entry in part.tensors.values():
        head, _, rest = entry.name.partition(".")
        name, _, kind = rest.rpartition(".")
        if head == "state" and name and kind in _KINDS:
            found.append(clean_fqn(name))
    return found


def _has_state(part: Part) -> bool:
    """Tell whether there is anything in it that optimizers have, nested or flattened."""
    return any("param_groups." in key or ".state." in f".{key}" for key in (*part.tensors, *part.objects))


def _is_model(part: Part, names: set[str]) -> bool:
    """Tell whether the tensors have the names of the model's parameters, or stand where torch puts a model."""
    if all(key.startswith("model.") for key in part.tensors):
        return True
    if not names:  # one file alone, which is no optimizer of torch's
        return part.dialect == "torch-file"
    return any(_name(entry) in names for entry in part.tensors.values())


def _name(entry: TensorEntry) -> str:
    return clean_fqn(entry.name)


def _place(part: Part) -> str:
    return part.name if part.dialect == "dcp" else next(iter(part.files), part.name)
