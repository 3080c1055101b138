"""Decide what a load does with each part of a checkpoint, check it, and carry it out."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_ckpt.catalog import Chunk, Encoding, Part, Role, Shape, TensorEntry
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.plan.boxes import Box, intersect
from fsdp_ckpt.train.full import nest
from fsdp_ckpt.train.hooks import LoadEvent
from fsdp_ckpt.train.locate import Source, refuse_faults
from fsdp_ckpt.train.model_plan import ModelPlan, Resize, plan_model
from fsdp_ckpt.train.modules import LiveModel, refuse_meta
from fsdp_ckpt.train.optimizer_plan import OptimizerPlan, check_class, plan_optimizer
from fsdp_ckpt.train.optimizer_state import read_optimizer
from fsdp_ckpt.train.optimizers import find_slots
from fsdp_ckpt.train.pairing import pair_optimizers
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.reader import Reader
from fsdp_ckpt.train.replacement import check_replacement, load_replacement
from fsdp_ckpt.train.small_parts import (
    Positions,
    SmallPlan,
    plan_dataloaders,
    plan_objects,
    plan_random_state,
    plan_schedulers,
)
from fsdp_ckpt.train.subjects import Subjects, all_slots, models_of
from fsdp_ckpt.units import format_size

__all__ = ["LoadJob", "LoadOptions", "LoadReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What ``load_state`` did.

    Attributes:
        path: The checkpoint that was loaded; not the folder above it that may have been given.
        loaded: Parts of it that were.
        step: Training step, where recorded.
        values: What ``save_state`` was given as ``values``.
        saved_world_size: Ranks that saved it, where that can be told.
        world_size: Ranks that load.
        missing: Names that the checkpoint lacks (``strict=False``).
        unexpected: Names that only the checkpoint has (``strict=False``).
        cast: ``saved -> live`` dtype by name, where elements were converted.
        resized: Saved and live shape by name, where they differ.
        renamed: Live name by saved name, where wrappers were stripped.
        optimizer_fresh: Parameters that had no optimizer state in the checkpoint.
        optimizer_unused: Parameters whose saved optimizer state is for nobody here.
        unsaved_buffers: Buffers that are in no checkpoint, as they are not persistent.
        left: Parts of the checkpoint that were not asked for, and names that a filter left alone.
        rng: What happened to the random states.
        data: What happened to the data loaders.
        warnings: What the caller should know; also logged by the first rank.
        read_bytes: Bytes that this rank read into its tensors.
        verified_bytes: Bytes whose recorded checksum this rank compared.
        unverified_bytes: Bytes of records without a checksum.
        elapsed_s: Wall time in seconds.
    """

    path: str
    step: int | None
    values: Mapping[str, Any]
    saved_world_size: int | None
    world_size: int
    loaded: Sequence[str] = ()
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    cast: Mapping[str, str] = field(default_factory=dict)
    resized: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    optimizer_fresh: Sequence[str] = ()
    optimizer_unused: Sequence[str] = ()
    unsaved_buffers: Sequence[str] = ()
    left: Sequence[str] = ()
    rng: str | None = None
    data: str | None = None
    warnings: Sequence[str] = ()
    read_bytes: int = 0
    verified_bytes: int = 0
    unverified_bytes: int = 0
    elapsed_s: float = 0.0

    def __str__(self) -> str:
        """Say it in a sentence, and what is out of the ordinary."""
        step = "" if self.step is None else f" (step {self.step})"
        size = format_size(self.read_bytes)
        rows = [f"loaded {self.path}{step}: {', '.join(self.loaded) or 'nothing'}; {size} in {self.elapsed_s:.2f} s"]
        for what in ("missing", "unexpected", "optimizer_fresh", "optimizer_unused", "unsaved_buffers", "left"):
            names = getattr(self, what)
            if names:
                more = f" and {len(names) - 6} more" if len(names) > 6 else ""
                rows.append(f"  {what.replace('_', ' ')}: {', '.join(names[:6])}{more}")
        rows += [f"  converted: {name} {text}" for name, text in list(self.cast.items())[:6]]
        return "\n".join([*rows, *(f"  warning: {text}" for text in self.warnings)])


@dataclass(kw_only=True)
class LoadOptions:
    """Options of ``load_state``, see there."""

    strict: bool
    include: Sequence[str]
    exclude: Sequence[str]
    resize: Resize
    positions: Positions
    rng: bool
    verify: bool

    def __post_init__(self) -> None:
        """Refuse values that make no sense.

        Raises:
            UsageError: One does.
        """
        if self.resize not in (None, "grow", "truncate"):
            raise UsageError(f"resize={self.resize!r} is not possible", hint='choose None, "grow" or "truncate"')
        if self.positions not in ("exact", "fresh"):
            raise UsageError(f"positions={self.positions!r} is not possible", hint='choose "exact" or "fresh"')


class LoadJob:
    """Plans for everything that a call loads."""

    def __init__(
        self,
        source: Source,
        subjects: Subjects,
        live: Mapping[str, LiveModel],
        ranks: Ranks,
        *,
        reader: Reader,
        options: LoadOptions,
    ) -> None:
        self._source = source
        self._ranks = ranks
        self._reader = reader
        self._options = options
        self._live = live
        self._models: dict[str, ModelPlan] = {}
        self._skipped: set[str] = set()
        self._wanted: list[tuple[TensorEntry, Sequence[Box]]] = []
        self._warnings: list[str] = []
        self._optimizers: dict[str, OptimizerPlan] = {}
        self.used: dict[str, str] = {}
        self._refuse_idle_globs()
        refuse_faults(source, [])
        manifest = source.manifest
        wanted = {} if "*" in options.exclude else live  # models may be given for the names of their parameters alone
        model_parts = source.match(Role.MODEL, manifest.models if manifest else None, wanted, "model") if wanted else {}
        optimizer_parts: Mapping[str, Part] = {}
        if subjects.optimizers:
            numbers = pair_optimizers(subjects.optimizers, live, manifest)
            members = manifest.optimizers if manifest else None
            optimizer_parts = source.match(Role.OPTIMIZER, members, subjects.optimizers, "optimizer", numbers=numbers)
        refuse_faults(source, [*model_parts.values(), *optimizer_parts.values()])
        for name, part in model_parts.items():
            self._claim(part, name)
            refuse_meta(live[name], "call model.to_empty(device=...) before load_state")
            plan = self._models[name] = plan_model(
                live[name], part, include=options.include, exclude=options.exclude, resize=options.resize
            )
            self._warnings += [
                f"`{kept.name}` and `{other.name}` are tied here, but were saved with different values: those of "
                f"`{other.name}` are not loaded"
                for kept, other in plan.rivals
                if reader.differ(kept, other)
            ]
        for name, part in optimizer_parts.items():
            self._claim(part, name)
            self._optimizers[name] = self._plan_optimizer(subjects.optimizers[name], part)
        self._small = SmallPlan()
        self._plan_small(subjects)

    def _refuse_idle_globs(self) -> None:
        """A pattern that matches nothing is a slip, and would load nothing, or everything, without a word."""
        names = [name for live in self._live.values() for name in (*live.names(), *live.extra)]
        for what, globs in (("include", self._options.include), ("exclude", self._options.exclude)):
            for glob in globs:
                if glob != "*" and not any(fnmatch.fnmatchcase(name, glob) for name in names):
                    close = difflib.get_close_matches(glob, names, n=1, cutoff=0.3)
                    raise UsageError(
                        f"{what} `{glob}` matches no name in the model",
                        hint=f"a name that is close: {close[0]}" if close else None,
                    )

    def _claim(self, part: Part, name: str) -> None:
        other = self.used.setdefault(part.name, name)
        if other != name:
            raise UsageError(
                f"`{other}` and `{name}` would both be loaded from `{part.name}`",
                hint="name all of them as they were named when they were saved",
            )

    def _plan_optimizer(self, optimizer: torch.optim.Optimizer, part: Part) -> OptimizerPlan:
        models_of(optimizer, self._live)
        manifest = self._source.manifest
        kinds = [member.kind for member in manifest.optimizers if member.part == part.name] if manifest else []
        check_class(optimizer, kinds[0] if kinds else "")
        slots = all_slots(self._live)
        names = {other: name for live in self._live.values() for other, name in live.names().items()}
        rows = [slot for row in find_slots(optimizer, slots) for slot in row]
        order = [slot.names[0] for slot in rows] if all(len(slot.names) == 1 for slot in rows) else None
        saved = read_optimizer(part, names, order, self._reader.value, self._reader.read)
        dtypes = {name: dtype for plan in self._models.values() for name, dtype in plan.dtypes.items()}
        options = self._options
        elsewhere = {name for live in self._live.values() for name in live.elsewhere}
        return plan_optimizer(
            optimizer,
            slots,
            saved,
            dtypes=dtypes,
            strict=options.strict,
            resize=options.resize,
            elsewhere=elsewhere,
        )

    def _plan_small(self, subjects: Subjects) -> None:
        plan, source, reader = self._small, self._source, self._reader
        if subjects.schedulers:
            loaded = {id(optimizer) for optimizer in subjects.optimizers.values()}
            plan_schedulers(plan, source, subjects.schedulers, self._ranks, reader, loaded_optimizers=loaded)
        if subjects.objects or subjects.scaler is not None:
            plan_objects(plan, source, subjects.objects, subjects.scaler, reader)
        if subjects.dataloaders:
            plan_dataloaders(plan, source, subjects.dataloaders, self._ranks, reader, positions=self._options.positions)
        if self._options.rng:
            plan_random_state(plan, source, self._ranks, reader)
        self.used |= {name: name for name, _ in plan.actions}
        if self._options.rng and source.parts(Role.RNG):
            self.used["random_states"] = "random_states"  # on all ranks, also on those that get none

    def compare(self, event: LoadEvent) -> None:
        """Raise for everything that does not fit; nothing is changed yet."""
        options = self._options
        wanted: list[tuple[TensorEntry, Sequence[Box]]] = []
        for part, name in self.used.items():
            if part in event.skipped:
                continue
            if part in event.replaced:
                if name not in self._models or not self._is_model(part):
                    raise UsageError(f"`{part}` is no model: only models can be replaced when loading")
                check_replacement(self._live[name], event.replaced[part], f"model `{name}`", strict=options.strict)
            elif name in self._models and self._is_model(part):
                plan = self._models[name]
                plan.fit.raise_for("the model" if len(self._models) == 1 else f"model `{name}`", strict=options.strict)
                wanted += [(entry, [piece.box for piece in pieces]) for entry, pieces in plan.fills]
            elif name in self._optimizers and self._is_optimizer(part):
                optimizer_plan = self._optimizers[name]
                optimizer_plan.fit.raise_for("the optimizer", strict=options.strict)
                wanted += optimizer_plan.wanted()
        self._wanted = wanted

    def chunks(self) -> list[Chunk]:
        """Return the records that will be read, once everything has been compared."""
        return [
            chunk
            for entry, boxes in self._wanted
            for chunk in entry.chunks
            if any(intersect((chunk.offsets, chunk.lengths), box) is not None for box in boxes)
        ]

    def spans(self) -> list[tuple[str, int, int]]:
        """Return the ranges of files that will be read as a whole, once everything has been compared.

        Of a record without a checksum only those rows are read that are wanted, which may be few.
        """
        found = []
        for entry, boxes in self._wanted:
            for chunk in entry.chunks:
                whole = (chunk.offsets, chunk.lengths)
                shared = [inner for box in boxes if (inner := intersect(whole, box)) is not None]
                is_checked = self._options.verify and (chunk.crc32 is not None or chunk.encoding is not Encoding.RAW)
                if shared and (is_checked or whole in shared):
                    start, stop = (is_checked and chunk.crc_range) or (chunk.start, chunk.stop)
                    found.append((chunk.file, min(start, chunk.start), max(stop, chunk.stop)))
        return found

    def verify(self) -> None:
        """Raise for everything that is damaged; nothing is changed yet."""
        self._reader.check(self._wanted, verify=self._options.verify)

    def _is_model(self, part: str) -> bool:
        return any(known.name == part for known in self._source.parts(Role.MODEL))

    def _is_optimizer(self, part: str) -> bool:
        return any(known.name == part for known in self._source.parts(Role.OPTIMIZER))

    def _is_used(self, part: Part) -> bool:
        if part.role is Role.RNG:
            return self._options.rng
        return part.name in self.used or (part.role is Role.DATALOADER and "dl_states" in self.used)

    def apply(self, event: LoadEvent) -> None:
        """Load. Random states come last, as nothing may draw from them after that."""
        self._skipped = event.skipped
        for part, name in self.used.items():
            if part in event.skipped:
                continue
            if name in self._models and self._is_model(part):
                self._apply_model(name, event.replaced.get(part))
            elif name in self._optimizers and self._is_optimizer(part):
                self._optimizers[name].apply(self._reader)
        for part, action in self._small.actions:
            if part not in event.skipped:
                action()

    def _apply_model(self, name: str, replacement: Mapping[str, Any] | None) -> None:
        live, plan = self._live[name], self._models[name]
        live.before_write()
        if replacement is not None:
            load_replacement(live, replacement)
        else:
            self._reader.fill(plan.fills)
            for key, entries in plan.extra.items():
                flat = {entry.path[1:]: self._reader.value(entry) for entry in entries}
                live.extra[key][0].set_extra_state(flat[()] if set(flat) == {()} else nest(flat))
        live.after_write()

    def report(self, elapsed_s: float) -> LoadReport:
        """Return what was done."""
        fits = [plan.fit for plan in self._models.values()] + [plan.fit for plan in self._optimizers.values()]
        source, small = self._source, self._small
        warnings = [*source.warnings, *self._warnings, *small.warnings]
        forgotten = [
            what
            for what, role in (("scheduler=", Role.SCHEDULER), ("dataloader=", Role.DATALOADER))
            if self._optimizers and source.parts(role) and not any(self._is_used(part) for part in source.parts(role))
        ]
        if forgotten:
            warnings.append(f"saved, but not asked for: {' and '.join(forgotten)}")
        buffers = [name for live in self._live.values() for name in live.unsaved_buffers]
        broken = [
            name
            for live in self._live.values()
            for name, buffer in live.unsaved_buffers.items()
            if buffer.is_floating_point() and not buffer.is_meta and not bool(torch.isfinite(buffer.float()).all())
        ]
        if broken:
            warnings.append(
                f"not restored, as they are in no checkpoint, and not finite: {', '.join(broken)}; set these buffers "
                "after to_empty()"
            )
        fresh = [name for plan in self._optimizers.values() for name in plan.fresh]
        unused = [name for plan in self._optimizers.values() for name in plan.unused]
        if unused:
            warnings.append(f"saved optimizer state without a parameter here: {', '.join(unused)}")
        warnings += [text for plan in self._optimizers.values() for text in plan.kept_options]
        left = [part.name for part in source.checkpoint.parts if not self._is_used(part)]
        return LoadReport(
            path=source.path,
            loaded=sorted(part for part in self.used if part not in self._skipped),
            step=source.step,
            values=dict(source.manifest.values) if source.manifest else {},
            saved_world_size=source.world_size,
            world_size=self._ranks.size,
            missing=[name for fit in fits for name in fit.missing],
            unexpected=[name for fit in fits for name in fit.unexpected],
            cast={name: text for fit in fits for name, text in fit.cast.items()},
            resized={name: shapes for fit in fits for name, shapes in fit.resized.items()},
            renamed={old: new for plan in self._models.values() for old, new in plan.renamed.items()},
            optimizer_fresh=fresh,
            optimizer_unused=unused,
            unsaved_buffers=buffers,
            left=[*left, *(name for plan in self._models.values() for name in plan.left)],
            rng=small.rng,
            data=small.data,
            warnings=warnings,
            read_bytes=self._reader.read_bytes,
            verified_bytes=self._reader.verified_bytes,
            unverified_bytes=self._reader.unverified_bytes,
            elapsed_s=elapsed_s,
        )
