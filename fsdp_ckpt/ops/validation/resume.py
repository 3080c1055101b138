"""Answer "can I resume this?": what ``load_state`` takes, refuses, or begins anew on a given number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from fsdp_ckpt.catalog import Checkpoint, Part, Problem, Role, Severity
from fsdp_ckpt.errors import CorruptCheckpoint
from fsdp_ckpt.findings import KINDS
from fsdp_ckpt.layouts.manifest import Manifest, read_manifest
from fsdp_ckpt.names import is_flat_param
from fsdp_ckpt.ops.validation.misplaced import no_model, no_optimizer
from fsdp_ckpt.ops.validation.rank_state import numbered_files, ranks_in, ranks_of_files
from fsdp_ckpt.ops.validation.wording import counted, finding, rank_ranges
from fsdp_ckpt.store.local import Folder, LocalStore

__all__ = ["ResumeAnswer", "answer_resume", "check_resume"]

_ACCELERATES = "AcceleratedScheduler"
"""What our manifest calls a scheduler that counts the steps of all ranks."""

_NOT_BLOCKING = frozenset({
    "flat-parameters", "local-slices", "position-world-size", "other-state-dict-type", "torch-too-old",
    "torch-lacks-items",
})  # fmt: skip
"""Errors in spite of which ``load_state`` loads: with an option, into the same model, or as it reads by itself."""

_CHANGING = frozenset({
    "flat-parameters", "missing-rng", "missing-position", "optimizer-without-state", "parameter-without-state",
    "rng-world-size", "position-world-size", "scheduler-pace", "unexpected-key", "dtype-differs", "numbered-optimizer",
    "other-state-dict-type", "torch-too-old", "torch-lacks-items",
})  # fmt: skip
"""Kinds of findings after which training does not go on as it was, or not into any model."""

_ALWAYS_BLOCKING = frozenset({"no-optimizer", "no-model"})
"""Kinds that may be no fault, where nobody means to resume, and leave nothing to resume."""

_OTHER_LOADERS = {
    "other-state-dict-type": "Accelerate",
    "torch-too-old": "torch's own loader",
    "torch-lacks-items": "torch's own loader",
}
"""Who cannot load it, though ``load_state`` can."""

_IN_SHORT = {
    "flat-parameters": "only into the same model, wrapped by FSDP1 in the same way",
    "numbered-optimizer": "the optimizer needs the same parameters in the same order",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeAnswer:
    """Whether training can be resumed from a checkpoint.

    Attributes:
        can_resume: Whether ``load_state`` can load model and optimizer.
        reasons: Why not; or what will not be as if there had been no interruption. Each without a full stop.
    """

    can_resume: bool
    reasons: tuple[str, ...] = ()

    def sentence(self, world_size: int | None = None) -> str:
        """Return the answer in a line.

        Example:
            >>> ResumeAnswer(can_resume=True, reasons=("random states of ranks 4-7 begin anew",)).sentence(8)
            'can be resumed on 8 ranks: yes; random states of ranks 4-7 begin anew'
        """
        on = "" if world_size is None else f" on {counted(world_size, 'rank')}"
        return f"can be resumed{on}: {'; '.join(['yes' if self.can_resume else 'no', *self.reasons])}"


def answer_resume(problems: Iterable[Problem]) -> ResumeAnswer:
    """Return the answer that all findings of a checkpoint give together, those of ``check_resume`` among them.

    Errors block, but for those that ``load_state`` copes with.
    """
    blocking: dict[str, list[Problem]] = {}
    changing: dict[str, list[Problem]] = {}
    for problem in dict.fromkeys(problems):
        is_error = problem.severity is Severity.ERROR or problem.code in _ALWAYS_BLOCKING
        if is_error and problem.code not in _NOT_BLOCKING:
            blocking.setdefault(problem.code, []).append(problem)
        elif problem.code in _CHANGING:
            changing.setdefault(problem.code, []).append(problem)
    chosen = blocking or changing
    return ResumeAnswer(can_resume=not blocking, reasons=tuple(_reason(code, some) for code, some in chosen.items()))


def _reason(code: str, problems: list[Problem]) -> str:
    if code in _IN_SHORT:
        return _IN_SHORT[code]
    problems = list({(problem.where, problem.message): problem for problem in problems}.values())
    first = problems[0]
    if code in _OTHER_LOADERS:
        return f"with load_state; not with {_OTHER_LOADERS[code]}: {first.message}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if not first.where:
        return first.message + more
    title = KINDS[code].title if code in KINDS else code
    start = title[:1] if title[1:2].isupper() else title[:1].lower()
    return f"{start}{title[1:]}: `{first.where}`{more}"


def check_resume(checkpoint: Checkpoint, world_size: int | None) -> Iterator[Problem]:
    """Yield what stands in the way of resuming, or changes it, beyond the faults that other checks find.

    Args:
        checkpoint: The checkpoint.
        world_size: Ranks that are to go on; None for as many as saved it. Then a checkpoint without an optimizer is
            no error: it may be meant to be the model alone.
    """
    if not any(part.role is Role.OPTIMIZER for part in checkpoint.parts):
        yield no_optimizer(Severity.NOTE if world_size is None else None)
    elif not any(part.role is Role.MODEL for part in checkpoint.parts):
        yield no_model()
    manifest = _manifest(checkpoint)
    states, positions = (_ranks_with(checkpoint, manifest, role) for role in (Role.RNG, Role.DATALOADER))
    saved = manifest.world_size if manifest is not None else _saved_by(checkpoint, states)
    size = world_size or saved
    yield from _slices(checkpoint, saved, size)
    yield from _random_states(checkpoint, states, size)
    if size is not None:
        yield from _positions(checkpoint, positions, size)
    if saved is not None and size is not None and size != saved:
        yield from _schedulers(checkpoint, manifest, saved, size)


def _manifest(checkpoint: Checkpoint) -> Manifest | None:
    with suppress(CorruptCheckpoint):
        return read_manifest(Folder(LocalStore(checkpoint.roots)))
    return None


def _ranks_with(checkpoint: Checkpoint, manifest: Manifest | None, role: Role) -> set[int]:
    """Return the ranks that saved random states or positions; by our manifest also those whose files are elsewhere."""
    return set(ranks_of_files(manifest.files, role) if manifest is not None else numbered_files(checkpoint, role))


def _saved_by(checkpoint: Checkpoint, states: Collection[int]) -> int | None:
    """Return how many ranks saved it. One rank wrote a full file, however many there were."""
    counts = [len(states)]
    counts += [part.world_size or 0 for part in checkpoint.parts if part.dialect in ("dcp", "rank-files")]
    if checkpoint.world_size is not None and checkpoint.world_size > max(counts):
        counts = [checkpoint.world_size] if checkpoint.world_size > 1 else counts
    return max(counts) or None


def _slices(checkpoint: Checkpoint, saved: int | None, size: int | None) -> Iterator[Problem]:
    """Parts that hold what lay in each rank's memory. Flat parameters are in the answer for what they are."""
    for part in checkpoint.parts:
        if part.role not in (Role.MODEL, Role.OPTIMIZER):
            continue
        if _has_slices(part):
            where = f"`{part.name}` holds slices of flat parameters"
            message = f"{where}, whose places are not recorded: only what saved them can load them"
            if saved is not None:
                message += f", on {counted(saved, 'rank')}"
            yield finding("other-world-size", "", message)
        elif part.dialect == "rank-files" and saved is not None and size != saved:
            message = f"`{part.name}` is one file for each of {counted(saved, 'rank')}"
            yield finding("file-per-rank", part.name, message)


def _has_slices(part: Part) -> bool:
    """Whether a part holds each rank's slices of flat parameters, but not where in them they belong."""
    if part.flat is not None:
        # Where torch kept whole flat parameters, as ShardedTensor, load_state finds its way.
        flat = [entry for entry in part.tensors.values() if is_flat_param(entry.name)]
        return not flat or any(entry.placements is None and part.dialect != "dcp" for entry in flat)
    # Slices of equal size look like copies, but for what is in them.
    differing = {problem.where for problem in part.problems if problem.code == "replicas-differ"}
    return part.role is Role.OPTIMIZER and any(
        len(part.tensors[key].shape) == 1 for key in differing & part.tensors.keys()
    )


def _random_states(checkpoint: Checkpoint, states: Collection[int], size: int | None) -> Iterator[Problem]:
    have = {*states, *_lone_rank(checkpoint)}
    if not have:
        others = [part.name for part in checkpoint.parts if part.role is Role.RNG]
        why = f"random states in `{others[0]}` are not read by load_state" if others else "random states were not saved"
        message = f"{why}: all ranks begin with new ones"
        yield finding("missing-rng", "", message, severity=Severity.NOTE)
        return
    if size is None:
        return
    without = [rank for rank in range(min(size, 1 << 20)) if rank not in have]
    unused = [rank for rank in have if rank >= size]
    if without:
        yield finding("rng-world-size", "", f"random states of {rank_ranges(without)} begin anew")
    if unused:
        yield finding("rng-world-size", "", f"random states of {rank_ranges(unused)} are not used")


def _lone_rank(checkpoint: Checkpoint) -> set[int]:
    """The Trainer gives the file no number where there is one rank."""
    return {0} if any(part.role is Role.RNG and part.name == "rng_state" for part in checkpoint.parts) else set()


def _positions(checkpoint: Checkpoint, own: Collection[int], size: int) -> Iterator[Problem]:
    """By the rule of load_state: each rank's own position, on the same number of ranks only."""
    parts = [part for part in checkpoint.parts if part.role is Role.DATALOADER]
    saved = len(own) or max((len(ranks_in(part)) for part in parts), default=0)
    if saved and saved != size:
        message = f'positions in the data are of {counted(saved, "rank")}: load_state needs positions="fresh"'
        yield finding("position-world-size", "", message)


def _schedulers(checkpoint: Checkpoint, manifest: Manifest | None, saved: int, size: int) -> Iterator[Problem]:
    names = [part.name for part in checkpoint.parts if part.role is Role.SCHEDULER]
    doubt = ", if it is Accelerate's,"
    if manifest is not None:
        names, doubt = [member.part for member in manifest.schedulers if member.kind == _ACCELERATES], ""
    elif not any(part.name.startswith("pytorch_model") for part in checkpoint.parts):
        return
    if names:
        message = (
            f"`{names[0]}`{doubt} took {counted(saved, 'step')} at a time, and will take {size}: "
            "its learning rate changes at another pace"
        )
        yield finding("scheduler-pace", "", message)
