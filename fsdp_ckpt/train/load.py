"""Load the state of a training job: from our checkpoints and anyone's, on any number of ranks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fsdp_ckpt.catalog import Part, Role, Shape
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.hooks import Hooks, LoadEvent
from fsdp_ckpt.train.live import Piece
from fsdp_ckpt.train.locate import Source, open_source, refuse_faults
from fsdp_ckpt.train.model_plan import ModelPlan, Resize, plan_model
from fsdp_ckpt.train.modules import LiveModel, collect_model
from fsdp_ckpt.train.optimizer_plan import OptimizerPlan, plan_optimizer
from fsdp_ckpt.train.optimizer_state import read_optimizer
from fsdp_ckpt.train.optimizers import find_slots
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.reader import Reader
from fsdp_ckpt.train.small_parts import (
    Positions,
    SmallPlan,
    plan_dataloaders,
    plan_objects,
    plan_random_state,
    plan_schedulers,
)
from fsdp_ckpt.train.subjects import Subjects, all_slots, models_of

__all__ = ["LoadReport", "load_state"]

_log = logging.getLogger("fsdp_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What ``load_state`` did.

    Attributes:
        path: The checkpoint that was loaded; not the folder above it that may have been given.
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


@dataclass(kw_only=True)
class _Options:
    strict: bool
    include: Sequence[str]
    exclude: Sequence[str]
    resize: Resize
    positions: Positions
    rng: bool
    verify: bool


def load_state(
    path: str | os.PathLike[str],
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    dataloader: Any = None,
    scaler: Any = None,
    objects: Any = None,
    rng: bool | None = None,
    strict: bool = True,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    resize: Resize = None,
    positions: Positions = "exact",
    verify: bool = True,
    hooks: Sequence[Hooks] = (),
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load models, optimizers and everything else that was saved. A collective: every rank has to call it.

    Only what is given is loaded: pass the model alone to load weights. The checkpoint may be ours, Accelerate's, the
    Trainer's, torchtitan's or any other that ``fsdp-ckpt inspect`` shows, sharded for any number of ranks or one whole
    file; each rank reads only the bytes that it needs. Nothing is unpickled without the allow-list.

    Everything is checked before anything is changed: names, global shapes, dtypes, groups, checksums, small files.
    When a check fails on one rank, all ranks raise, and models and optimizers are as they were. (Only an I/O error
    while the checked bytes are read once more can leave them half loaded; the message says so.)

    A fresh optimizer gets its full state, whether or not parameters have gradients.

    Args:
        path: A checkpoint, or a folder of checkpoints of which the newest complete one is taken.
        model: A module, or a list or dictionary of them; names and order as when saving.
        optimizer: Likewise; matched by parameter names.
        scheduler: Likewise.
        dataloader: Likewise; see ``positions``.
        scaler: A gradient scaler.
        objects: Anything else with ``load_state_dict``.
        rng: Restore each rank's random states; None to do so when an optimizer is loaded.
        strict: Refuse names that only one side has. Off: they are in the report.
        include: Globs; load only these names of the model.
        exclude: Globs; leave these names of the model alone. With ``["*"]`` the checkpoint need not hold a model: what
            is loaded is the optimizer alone, and the model says what its parameters are called.
        resize: ``"grow"`` to load into tensors that have become larger (rows that are new stay as they are),
            ``"truncate"`` into smaller ones as well. Optimizer state follows.
        positions: ``"exact"`` to refuse data loader positions of another number of ranks, ``"fresh"`` to leave the
            loaders alone then.
        verify: Compare recorded checksums first; this reads everything twice, the second time from memory.
        hooks: Called before anything is changed, and after.
        process_group: The ranks that load together; None for all.

    Returns:
        What was loaded and what was not, on every rank.

    Raises:
        CheckpointNotFound: There is none, or something that was asked for is not in it.
        IncompleteCheckpoint: It is not whole.
        ChecksumMismatch: It is damaged.
        UnsafePickle: A file in it asks for code; nothing was run.
        StateMismatch: Names or shapes differ; lists are in the exception.
        Incompatible: State that cannot be brought into the live objects.

    Example:
        >>> report = load_state("run", model, optimizer, scheduler)  # doctest: +SKIP
        >>> for step in range((report.step or 0) + 1, 1001):  # doctest: +SKIP
        ...     train(step)
    """
    begun = time.monotonic()
    ranks = Ranks(process_group)
    target = os.fspath(path)
    doing = f"loading {target}"
    with ranks.together(doing):
        subjects = Subjects.of(
            model=model, optimizer=optimizer, scheduler=scheduler, dataloader=dataloader, objects=objects, scaler=scaler
        )
        options = _Options(
            strict=strict,
            include=include,
            exclude=exclude,
            resize=resize,
            positions=positions,
            rng=bool(subjects.optimizers) if rng is None else rng,
            verify=verify,
        )
        _check_options(options)
    source = open_source(path, ranks, doing)
    with Reader(source.checkpoint) as reader:
        with ranks.together(doing):
            live = {name: collect_model(item, ranks) for name, item in subjects.models.items()}
            job = _Job(source, subjects, live, ranks, reader=reader, options=options)
            event = LoadEvent(
                path=str(source.checkpoint.root), step=source.step, rank=ranks.rank, parts=sorted(job.used)
            )
            for hook in hooks:
                hook.before_load(event)
            job.check(event)
        half = f"{doing} (models and optimizers may be half loaded: do not go on with them)"
        with ranks.together(half), torch.no_grad():
            job.apply(event)
    report = job.report(time.monotonic() - begun)
    for hook in hooks:
        hook.after_load(report)
    if ranks.is_first:
        for warning in report.warnings:
            _log.warning("%s: %s", target, warning)
    return report


def _check_options(options: _Options) -> None:
    if options.resize not in (None, "grow", "truncate"):
        raise UsageError(f"resize={options.resize!r} is not possible", hint='choose None, "grow" or "truncate"')
    if options.positions not in ("exact", "fresh"):
        raise UsageError(f"positions={options.positions!r} is not possible", hint='choose "exact" or "fresh"')


class _Job:
    """Plans for everything that a call loads."""

    def __init__(
        self,
        source: Source,
        subjects: Subjects,
        live: Mapping[str, LiveModel],
        ranks: Ranks,
        *,
        reader: Reader,
        options: _Options,
    ) -> None:
        self._source = source
        self._ranks = ranks
        self._reader = reader
        self._options = options
        self._live = live
        self._models: dict[str, ModelPlan] = {}
        self._optimizers: dict[str, OptimizerPlan] = {}
        self.used: dict[str, str] = {}
        manifest = source.manifest
        wanted = {} if "*" in options.exclude else live  # models may be given for the names of their parameters alone
        model_parts = source.match(Role.MODEL, manifest.models if manifest else None, wanted, "model") if wanted else {}
        optimizer_parts = (
            source.match(Role.OPTIMIZER, manifest.optimizers if manifest else None, subjects.optimizers, "optimizer")
            if subjects.optimizers
            else {}
        )
        refuse_faults(source, [*model_parts.values(), *optimizer_parts.values()])
        for name, part in model_parts.items():
            self.used[part.name] = name
            _refuse_meta(name, live[name])
            self._models[name] = plan_model(
                live[name], part, include=options.include, exclude=options.exclude, resize=options.resize
            )
        for name, part in optimizer_parts.items():
            self.used[part.name] = name
            self._optimizers[name] = self._plan_optimizer(subjects.optimizers[name], part)
        self._small = SmallPlan()
        self._plan_small(subjects)

    def _plan_optimizer(self, optimizer: torch.optim.Optimizer, part: Part) -> OptimizerPlan:
        models_of(optimizer, self._live)
        slots = all_slots(self._live)
        names = {other: name for live in self._live.values() for other, name in live.names().items()}
        rows = [slot for row in find_slots(optimizer, slots) for slot in row]
        order = [slot.names[0] for slot in rows] if all(len(slot.names) == 1 for slot in rows) else None
        saved = read_optimizer(part, names, order, self._reader.value, self._reader.read)
        dtypes = {name: dtype for plan in self._models.values() for name, dtype in plan.dtypes.items()}
        options = self._options
        return plan_optimizer(optimizer, slots, saved, dtypes=dtypes, strict=options.strict, resize=options.resize)

    def _plan_small(self, subjects: Subjects) -> None:
        plan, source, reader = self._small, self._source, self._reader
        if subjects.schedulers:
            loaded = {id(optimizer) for optimizer in subjects.optimizers.values()}
            plan_schedulers(plan, source, subjects.schedulers, loaded, reader)
        if subjects.objects or subjects.scaler is not None:
            plan_objects(plan, source, subjects.objects, subjects.scaler, reader)
        if subjects.dataloaders:
            plan_dataloaders(plan, source, subjects.dataloaders, self._ranks, reader, positions=self._options.positions)
        if self._options.rng:
            plan_random_state(plan, source, self._ranks, reader)
        self.used |= {name: name for name, _ in plan.actions}

    def check(self, event: LoadEvent) -> None:
        """Raise for everything that does not fit or is damaged; nothing is changed yet."""
        options = self._options
        for part, name in self.used.items():
            if part in event.skipped or part in event.replaced:
                continue
            if name in self._models and self._is_model(part):
                plan = self._models[name]
                plan.fit.raise_for("the model" if len(self._models) == 1 else f"model `{name}`", strict=options.strict)
                for entry, pieces in plan.fills:
                    self._reader.check(entry, [piece.box for piece in pieces], verify=options.verify)
            elif name in self._optimizers and self._is_optimizer(part):
                optimizer_plan = self._optimizers[name]
                optimizer_plan.fit.raise_for("the optimizer", strict=options.strict)
                optimizer_plan.check(self._reader, verify=options.verify)

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
            for key, value in replacement.items():
                for piece in live.tensors[key].pieces:
                    piece.tensor.copy_(value[_slices(piece)])
        else:
            for entry, pieces in plan.fills:
                self._reader.fill(entry, pieces)
            for key, value in plan.extra.items():
                live.extra[key][0].set_extra_state(self._reader.value(value))
        live.after_write()

    def report(self, elapsed_s: float) -> LoadReport:
        """Return what was done."""
        fits = [plan.fit for plan in self._models.values()] + [plan.fit for plan in self._optimizers.values()]
        source, small = self._source, self._small
        warnings = [*source.warnings, *small.warnings]
        buffers = [name for live in self._live.values() for name in live.unsaved_buffers]
        broken = [
            name
            for live in self._live.values()
            for name, buffer in live.unsaved_buffers.items()
            if buffer.is_floating_point() and buffer.device.type != "meta" and not bool(torch.isfinite(buffer).all())
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
            path=str(source.checkpoint.root),
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


def _slices(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(piece.offsets, piece.lengths, strict=True))


def _refuse_meta(name: str, live: LiveModel) -> None:
    on_meta = [key for key, tensor in live.tensors.items() if any(piece.tensor.is_meta for piece in tensor.pieces)]
    if on_meta:
        raise UsageError(
            f"model `{name}` is still on the meta device ({on_meta[0]} and {len(on_meta) - 1} others)",
            hint="call model.to_empty(device=...) before load_state",
        )
