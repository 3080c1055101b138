"""Decide what a checkpoint's tensors mean for a live model: what goes where, what is missing, what does not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from fsdp_ckpt.catalog import DTYPES, ObjectEntry, Part, Shape, TensorEntry
from fsdp_ckpt.errors import FlatParameters, StateMismatch, UsageError
from fsdp_ckpt.names import clean_fqn, glob_filter, is_flat_param, strip_wrappers
from fsdp_ckpt.train.live import LiveTensor, Piece, dtype_of
from fsdp_ckpt.train.modules import LiveModel

__all__ = ["Fit", "ModelPlan", "Resize", "plan_model"]

Resize = Literal["grow", "truncate"] | None
"""What may differ in a shape: nothing, a larger live tensor (``grow``), or a smaller one as well (``truncate``)."""

_FLOATING = ("float", "float8")
_SHOWN = 12


@dataclass(kw_only=True)
class Fit:
    """How names, shapes and dtypes of a checkpoint and a live state compare.

    Attributes:
        missing: Names that the checkpoint lacks.
        unexpected: Names that only the checkpoint has.
        mismatched: Saved and live shape, by name, where they differ and may not.
        resized: Saved and live shape, by name, where they differ and may.
        cast: Saved and live dtype, by name, where elements are converted.
        wrong_kind: Saved and live dtype, by name, where converting would lose what the values mean.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    resized: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    cast: dict[str, str] = field(default_factory=dict)
    wrong_kind: dict[str, str] = field(default_factory=dict)

    def compare(self, entry: TensorEntry, name: str, shape: Shape, dtype_name: str, resize: Resize) -> bool:
        """Take a pair of tensors into account; tell whether the saved one can be loaded into the live one."""
        if entry.shape != shape:
            smaller = len(entry.shape) == len(shape) and all(
                have <= want for have, want in zip(entry.shape, shape, strict=True)
            )
            may = resize is not None and len(entry.shape) == len(shape) and (smaller or resize == "truncate")
            (self.resized if may else self.mismatched)[name] = (entry.shape, shape)
            if not may:
                return False
        live = DTYPES[dtype_name]
        if entry.dtype != live:
            text = f"{entry.dtype} -> {live}"
            if entry.dtype.kind not in _FLOATING or live.kind not in _FLOATING or 2 in (entry.dtype.pack, live.pack):
                self.wrong_kind[name] = text
                return False
            self.cast[name] = text
        return True

    def raise_for(self, what: str, *, strict: bool) -> None:
        """Raise when something does not fit.

        Args:
            what: ``the model``, ``the optimizer`` …
            strict: Whether missing and unexpected names count.

        Raises:
            StateMismatch: With all names, and global shapes.
        """
        rows = []
        if strict and self.missing:
            rows.append(f"missing in the checkpoint: {_join(self.missing)}")
        if strict and self.unexpected:
            rows.append(f"only in the checkpoint: {_join(self.unexpected)}")
        if self.mismatched:
            shapes = [
                f"{name} is {_shape(saved)} in the checkpoint, {_shape(live)} here"
                for name, (saved, live) in self.mismatched.items()
            ]
            rows.append(f"other global shapes: {_join(shapes)}")
        if self.wrong_kind:
            rows.append(f"other kinds of dtype: {_join([f'{name}: {text}' for name, text in self.wrong_kind.items()])}")
        if not rows:
            return
        hint = None
        if strict and (self.missing or self.unexpected) and not self.mismatched and not self.wrong_kind:
            hint = "pass strict=False to load what fits, and look at the report for the rest"
        elif self.mismatched and not self.wrong_kind:
            hint = self._resize_hint()
        raise StateMismatch(
            f"the checkpoint does not fit {what}: {'; '.join(rows)}; nothing was changed",
            missing=self.missing if strict else (),
            unexpected=self.unexpected if strict else (),
            mismatched=[*self.mismatched, *self.wrong_kind],
            hint=hint,
        )

    def _resize_hint(self) -> str:
        pairs = self.mismatched.values()
        if any(len(saved) != len(live) for saved, live in pairs):
            names = ", ".join(repr(name) for name in list(self.mismatched)[:_SHOWN])
            return f"leave them as they are: exclude=[{names}]"
        if all(a <= b for saved, live in pairs for a, b in zip(saved, live, strict=True)):
            return 'rows that are new here can stay as they are: pass resize="grow"'
        return 'to drop what does not fit here, pass resize="truncate"'


def _join(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def _shape(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


@dataclass(kw_only=True)
class ModelPlan:
    """What will be loaded into a model.

    Attributes:
        fills: Saved tensors, and the pieces of this rank that they go into.
        extra: Saved values for ``set_extra_state``, by name; a dictionary in a full state dict has several entries.
        fit: How the two compare.
        renamed: Live name by saved name, where wrappers were stripped.
        dtypes: Saved dtype of each parameter, by live name.
        left: Live names that a filter left alone.
        rivals: Pairs of saved tensors for one live tensor (tied weights that were saved twice); the first is loaded.
    """

    fills: list[tuple[TensorEntry, Sequence[Piece]]] = field(default_factory=list)
    extra: dict[str, list[ObjectEntry]] = field(default_factory=dict)
    fit: Fit = field(default_factory=Fit)
    renamed: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    rivals: list[tuple[TensorEntry, TensorEntry]] = field(default_factory=list)


def plan_model(
    live: LiveModel,
    part: Part,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    resize: Resize = None,
) -> ModelPlan:
    """Match a model with a part of a checkpoint.

    Args:
        live: The model.
        part: The saved model.
        include: Globs over live names; empty for all.
        exclude: Globs over live names that are left alone.
        resize: What may differ in shapes.

    Raises:
        FlatParameters: The part consists of FSDP1's flat parameters, and the model is not wrapped alike.
    """
    if part.flat is not None:
        if include or exclude or resize is not None:
            raise UsageError(
                f"`{part.name}` holds flat parameters, of which names cannot be chosen and shapes cannot change",
                hint="load it without include, exclude and resize, and save SHARDED_STATE_DICT",
            )
        return _plan_flat(live, part)
    plan = ModelPlan()
    keep = glob_filter(include, exclude)
    names = live.names()
    saved = _match_names(part, names, plan)
    objects: dict[str, list[ObjectEntry]] = {}
    for entry in part.objects.values():
        objects.setdefault(_extra_name(entry), []).append(entry)
    for name, tensor in live.tensors.items():
        if keep.match(name) is None:
            plan.left.append(name)
            continue
        stored = [saved[other] for other in (name, *tensor.aliases) if other in saved]
        if not stored:
            plan.fit.missing.append(name)
            continue
        found = stored[0]
        plan.rivals += [(found, other) for other in stored[1:]]
        plan.dtypes[name] = found.dtype.name
        if plan.fit.compare(found, name, tensor.shape, dtype_of(tensor.dtype, name).name, resize):
            plan.fills.append((found, tensor.pieces))
    for name in live.extra:
        if keep.match(name) is None:
            plan.left.append(name)
        elif name in objects:
            plan.extra[name] = objects[name]
        else:
            plan.fit.missing.append(name)
    if not include and not exclude:
        plan.fit.unexpected += [
            entry.name for key, entry in saved.items() if key not in names and key not in live.elsewhere
        ]
        plan.fit.unexpected += [name for name in objects if name not in live.extra and name not in live.elsewhere]
    return plan


def _extra_name(entry: ObjectEntry) -> str:
    """Return the name of extra state: a full state dict is stored flattened, down into the values."""
    head = str(entry.path[0]) if entry.path else entry.name
    is_extra = head.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX
    return strip_wrappers(head if is_extra else entry.name)


def _match_names(part: Part, names: Mapping[str, str], plan: ModelPlan) -> dict[str, TensorEntry]:
    """Return saved tensors by live name; those that have none by their own, cleaned of wrappers."""
    found: dict[str, TensorEntry] = {}
    for entry in part.tensors.values():
        candidates = (entry.name, strip_wrappers(entry.name), clean_fqn(entry.name), f"module.{entry.name}")
        name = next((candidate for candidate in candidates if candidate in names), candidates[2])
        if name != entry.name and name in names:
            plan.renamed[entry.name] = name
        if name not in found or entry.name == name:
            found[name] = entry
    return found


def _plan_flat(live: LiveModel, part: Part) -> ModelPlan:
    """Match FSDP1's flat parameters with those of a model that is wrapped in the same way."""
    if not live.units or not any(is_flat_param(entry.name) for entry in part.tensors.values()):
        raise FlatParameters(
            f"`{part.name}`: {part.flat}",
            hint="load it into the model that wrote it, wrapped by FSDP1 in the same way, then save SHARDED_STATE_DICT",
        )
    plan = ModelPlan()
    saved = {re.sub(r"^module\.", "", strip_wrappers(entry.name)): entry for entry in part.tensors.values()}
    managed: set[str] = set()
    for unit in live.units:
        tensor = unit.flat_tensor()
        managed |= {name for named in unit.tensors() for name in (named.name, *named.aliases)}
        entry = saved.pop(tensor.name, None)
        if entry is None:
            plan.fit.missing.append(tensor.name)
        elif min(entry.shape[0], tensor.shape[0]) < unit.used_elements or len(entry.shape) != 1:
            plan.fit.mismatched[tensor.name] = (entry.shape, tensor.shape)
        elif plan.fit.compare(
            replace(entry, shape=tensor.shape),
            tensor.name,
            tensor.shape,
            dtype_of(tensor.dtype, tensor.name).name,
            None,
        ):
            plan.fills.append((entry, tensor.pieces))
    for name in managed:
        saved.pop(name, None)  # with use_orig_params torch adds each rank's slices of what the flat parameters hold
    for name, other in live.tensors.items():
        if name not in managed:
            _fit_plain(plan, saved.pop(name, None), other)
    plan.fit.unexpected += list(saved)
    return plan


def _fit_plain(plan: ModelPlan, entry: TensorEntry | None, tensor: LiveTensor) -> None:
    if entry is None:
        plan.fit.missing.append(tensor.name)
    elif plan.fit.compare(entry, tensor.name, tensor.shape, dtype_of(tensor.dtype, tensor.name).name, None):
        plan.fills.append((entry, tensor.pieces))
