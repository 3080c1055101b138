"""Check what training goes on with: optimizer state against the model, random states, positions in the data.

How optimizers are laid out is told in ``train/optimizer_state.py``; here it is read without a live model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.catalog import Checkpoint, ObjectEntry, Part, Problem, Role, Severity, TensorEntry
from fsdp_ckpt.names import clean_fqn
from fsdp_ckpt.ops.validation.misplaced import check_absent_parts, check_misplaced_parts, is_optimizer
from fsdp_ckpt.ops.validation.names import is_adapter
from fsdp_ckpt.ops.validation.param_groups import read_group_values
from fsdp_ckpt.ops.validation.rank_state import check_rank_state
from fsdp_ckpt.ops.validation.trainer_state import check_trainer_state
from fsdp_ckpt.ops.validation.wording import capped, counted, few, finding, shape_text
from fsdp_ckpt.store.local import LocalStore

__all__ = ["check_training_state"]

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq")
"""Moments of torch's own optimizers: always of their parameter's shape."""

_KINDS_FIRST = (*_MOMENTS, "fp32_param", "step")
"""Megatron-core puts the kind before the parameter."""

_HEADS = ("state", "param_groups")


def check_training_state(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yield what is wrong with optimizers, random states and positions. Of data only small objects are read."""
    store = LocalStore(checkpoint.roots)
    yield from check_absent_parts(checkpoint)
    yield from check_misplaced_parts(checkpoint)
    # PEFT takes the adapter's name out of names when it saves one.
    models = [
        part for part in checkpoint.parts if part.role is Role.MODEL and not is_adapter(part) and not is_optimizer(part)
    ]
    known = {clean_fqn(entry.name): entry for part in models if part.flat is None for entry in part.tensors.values()}
    has_names = bool(known) and all(part.flat is None for part in models)
    for part in checkpoint.parts:
        if part.role is Role.OPTIMIZER and part.dialect != "unreadable" and (part.tensors or part.objects):
            saved = _read(part, known, store)
            yield from _absent_state(part, saved)
            if saved.is_numbered:
                count = counted(len(saved.state), "parameter")
                yield finding("numbered-optimizer", part.name, f"holds state of {count} by number, not by name")
            elif has_names and part.flat is None:
                yield from _strangers(part, saved, known)
                yield from capped(_moments(saved, known))
    yield from check_rank_state(checkpoint)
    yield from check_trainer_state(checkpoint)


@dataclass(kw_only=True)
class _Saved:
    """An optimizer's state.

    Attributes:
        state: Entries by parameter, without wrappers, and kind.
        params: Parameters that the groups list.
        options: Options of the first group that has a value for them.
        has_groups: Whether there are groups.
        is_numbered: Whether parameters have numbers instead of names.
    """

    state: dict[str, dict[str, TensorEntry | ObjectEntry]] = field(default_factory=dict)
    params: dict[str, None] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    has_groups: bool = False

    @property
    def is_numbered(self) -> bool:
        return bool(self.state) and all(name.isdecimal() for name in self.state)


def _read(part: Part, known: Mapping[str, TensorEntry], store: LocalStore) -> _Saved:
    saved = _Saved()
    entries: list[TensorEntry | ObjectEntry] = [*part.tensors.values(), *part.objects.values()]
    for entry in entries:
        head, name, kind = _split(entry, known)
        if head == "state" and kind:
            saved.state.setdefault(name, {})[kind] = entry
        elif head == "param_groups":
            saved.has_groups = True
            if name and not name.isdecimal():
                saved.params[name] = None
                saved.options.setdefault(kind, None)
    for group in read_group_values(part, store):
        saved.has_groups = True
        listed = group.pop("params", ())
        saved.params |= dict.fromkeys(clean_fqn(name) for name in listed if isinstance(name, str))
        saved.options = {**group, **{key: value for key, value in saved.options.items() if value is not None}}
    return saved


def _split(entry: TensorEntry | ObjectEntry, known: Mapping[str, TensorEntry]) -> tuple[str, str, str]:
    """Return ``state`` or ``param_groups``, the parameter (or group), and the kind of state (or option)."""
    path = tuple(map(str, entry.path)) or (entry.name,)
    start = next((at for at, step in enumerate(path) if step.partition(".")[0] in _HEADS), 0)  # Composer, Lightning
    path = path[start:]
    if len(path) >= 3 and path[1] not in _KINDS_FIRST:
        return path[0], clean_fqn(path[1]), path[2]
    head, _, rest = ".".join(path).partition(".")
    pieces = rest.split(".")
    if pieces[0] in _KINDS_FIRST:
        return head, clean_fqn(".".join(pieces[1:])), pieces[0]
    for cut in range(len(pieces) - 1, 0, -1):
        name = clean_fqn(".".join(pieces[:cut]))
        if name in known:
            return head, name, ".".join(pieces[cut:])
    return head, clean_fqn(".".join(pieces[:-1])), pieces[-1]


def _absent_state(part: Part, saved: _Saved) -> Iterator[Problem]:
    if saved.state:
        without = [name for name in saved.params if name not in saved.state]
        if without and not saved.is_numbered:
            count = f"{len(without)} of {counted(len(saved.params), 'parameter')}"
            message = f"{count} of the optimizer {'has' if len(without) == 1 else 'have'} no state: {few(without)}"
            yield finding("parameter-without-state", part.name, message)
        return
    if not saved.has_groups:  # an optimizer of another make
        return
    momentum = saved.options.get("momentum")
    is_plain = "momentum" in saved.options and momentum is not None and not momentum
    message = "has groups and options, but no state of any parameter"
    if is_plain:
        message = "has no state, as SGD without momentum needs none"
    severity = Severity.NOTE if is_plain else None
    yield finding("optimizer-without-state", part.name, message, severity=severity)


def _strangers(part: Part, saved: _Saved, known: Mapping[str, TensorEntry]) -> Iterator[Problem]:
    strange = [name for name in saved.state if name not in known]
    if strange:
        count = f"{len(strange)} of {counted(len(saved.state), 'parameter')} with state"
        message = f"{count} {'is' if len(strange) == 1 else 'are'} not in the model: {few(strange)}"
        yield finding("state-without-parameter", part.name, message)


def _moments(saved: _Saved, known: Mapping[str, TensorEntry]) -> Iterator[Problem]:
    for name, kinds in saved.state.items():
        parameter = known.get(name)
        if parameter is None or "projector" in kinds:  # GaLore keeps moments of a projection
            continue
        for kind in _MOMENTS:
            entry = kinds.get(kind)
            if isinstance(entry, TensorEntry) and entry.dtype.kind == "float" and entry.shape != parameter.shape:
                message = f"has the shape {shape_text(entry.shape)}; `{name}` has {shape_text(parameter.shape)}"
                yield finding("moment-shape", entry.key, message)
