"""Compare two checkpoints: which tensors and values differ, and by how much."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

from fsdp_ckpt.catalog import Checkpoint
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.layouts.registry import PathLike, given_paths, read_checkpoint
from fsdp_ckpt.names import glob_filter, parse_rename
from fsdp_ckpt.ops.diff_match import PartMatch, match_objects, match_tensors
from fsdp_ckpt.ops.diff_names import Naming
from fsdp_ckpt.ops.diff_parts import Pairing, pair_parts, refuse_damaged
from fsdp_ckpt.ops.diff_report import Change, DiffReport, ObjectDiff, PartDiff, TensorDiff
from fsdp_ckpt.run.progress import Listener, Meter
from fsdp_ckpt.run.settle import Settled, settle
from fsdp_ckpt.run.sides import Side, TensorPair, batches, blame
from fsdp_ckpt.run.sources import Sources
from fsdp_ckpt.store.remote.places import speaks_urls

__all__ = ["Change", "DiffReport", "ObjectDiff", "PartDiff", "TensorDiff", "diff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    statistics: bool
    tolerance: float | None
    rtol: float
    trust_crc: bool
    jobs: int


@speaks_urls
def diff(
    a: PathLike | Sequence[PathLike],
    b: PathLike | Sequence[PathLike],
    *,
    part: str | Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[str] = (),
    tolerance: float | None = None,
    rtol: float = 0.0,
    trust_crc: bool = True,
    statistics: bool = True,
    jobs: int | None = None,
    listener: Listener | None = None,
) -> DiffReport:
    """Compare two checkpoints of whatever layouts and numbers of ranks. torch is not imported, and no pickle is run.

    Parts correspond by role: model to model, optimizer to optimizer; several of a role by name, then by order. A part
    that one side lacks is a difference. But where one side holds models only, only models are compared: a checkpoint
    and what was merged from it are equal when their models are. To insist on other parts, name them.

    Tensors are equal when all bits are. Recorded checksums are compared first, and tensors that they prove equal are
    not read; neither are those that lie in the same file on both sides. The rest is read in bands of 1 MiB, so that
    memory does not depend on the sizes.

    Args:
        a: The older checkpoint: anything that ``inspect`` reads. Statistics are relative to it.
        b: The newer one.
        part: Compare only these: names of parts, or roles (``model``, ``optimizer``).
        include: Only names that fit one of these globs; as they are compared, so without wrapper prefixes, and of
            optimizers without ``state.``.
        exclude: No names that fit one of these.
        rename: Rules for the names of A, as for ``merge``.
        tolerance: Largest absolute difference of elements that counts as equal. Tensors of which all elements are
            within it are close, which is no difference, even if their dtypes differ.
        rtol: Adds this share of ``|a|`` to the tolerance.
        trust_crc: Let equal recorded checksums prove tensors equal; otherwise all are read.
        statistics: Work out by how much tensors differ. Without, a tensor is read up to its first difference only.
        jobs: Threads; None for the cores, at most 4.
        listener: Called with ``Progress`` while bytes are compared.

    Returns:
        What differs.

    Raises:
        CheckpointNotFound: Nothing is there, or nothing that is a checkpoint.
        CorruptCheckpoint: A side is damaged or incomplete; the message says which.
        Incompatible: Flat parameters; names that collide after the clean-up.
        UsageError: Options that make no sense; no such part; filters that leave nothing.

    Example:
        >>> report = diff("run/checkpoint-2000", "out")  # doctest: +SKIP
        >>> report.is_equal, report.num_tensors, report.read_bytes  # doctest: +SKIP
        (True, 291, 0)
    """
    begun = time.monotonic()
    texts = [" + ".join(given_paths(path)) for path in (a, b)]
    options = _check(tolerance, rtol, statistics=statistics, trust_crc=trust_crc, jobs=jobs)
    keep, renames = glob_filter(include, exclude), parse_rename(rename)
    namings = Naming(keep=keep, renames=renames), Naming(keep=keep)
    wanted = (part,) if isinstance(part, str) else tuple(part)
    checkpoints = _read("A", a), _read("B", b)
    pairing = pair_parts(*checkpoints, wanted)
    for number, label in enumerate("AB"):
        compared = [pair[number] for pair in pairing.pairs]
        aside = (pairing.aside_a, pairing.aside_b)[number]
        refuse_damaged(checkpoints[number], compared, label=label, path=texts[number], whole=not wanted and not aside)
    with ExitStack() as stack:
        sources = [stack.enter_context(Sources(checkpoint.roots)) for checkpoint in checkpoints]
        first, second = (
            Side(label=label, path=path, sources=source)
            for label, path, source in zip("AB", texts, sources, strict=True)
        )
        sides = first, second
        matches = [match_tensors(pair, sides, namings) for pair in pairing.pairs]
        read_bytes = _compare(matches, sides, options, listener)
        for match in matches:
            match_objects(match, sides, namings, _tensor_judge(sides))
    if (include or exclude) and not any(match.order or match.num_objects or match.objects for match in matches):
        raise UsageError("no name is left: nothing fits --include / --exclude")
    report = _report(checkpoints, texts, pairing, matches, options)
    return replace(report, read_bytes=read_bytes, elapsed_s=time.monotonic() - begun)


def _check(tolerance: float | None, rtol: float, *, statistics: bool, trust_crc: bool, jobs: int | None) -> _Options:
    for name, value in (("--tolerance", tolerance), ("--rtol", rtol)):
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise UsageError(f"{name} {value} is not possible", hint="give a number from 0 on")
    if jobs is not None and jobs < 1:
        raise UsageError(f"{jobs} threads", hint="at least one")
    return _Options(
        statistics=statistics,
        tolerance=0.0 if tolerance is None and rtol else tolerance,
        rtol=rtol,
        trust_crc=trust_crc,
        jobs=jobs or min(4, os.cpu_count() or 1),
    )


def _read(label: str, path: PathLike | Sequence[PathLike]) -> Checkpoint:
    with blame(label, " + ".join(given_paths(path))):
        return read_checkpoint(path)


def _compare(
    matches: Sequence[PartMatch], sides: tuple[Side, Side], options: _Options, listener: Listener | None
) -> int:
    """Compare all pairs, note in the matches what was found, and return the bytes that were read."""
    jobs = [(match, pair) for match in matches for pair in match.pairs.values()]

    def settle_all(pairs: Sequence[TensorPair]) -> list[Settled | None]:
        return [settle(pair, *sides, trust_crc=options.trust_crc) for pair in pairs]

    with ThreadPoolExecutor(max_workers=options.jobs) as pool:
        settled = [answer for found in pool.map(settle_all, batches([pair for _, pair in jobs])) for answer in found]
    left: list[tuple[PartMatch, TensorPair]] = []
    for (match, pair), answer in zip(jobs, settled, strict=True):
        if answer in (Settled.SAME_FILE, Settled.CHECKSUMS):
            match.num_equal += 1
            match.num_settled += 1
            match.num_same_file += answer is Settled.SAME_FILE
        elif answer is Settled.DIFFERENT and not options.statistics and options.tolerance is None:
            match.tensors[pair.name] = _changed(pair, Change.CHANGED)
        else:
            left.append((match, pair))
    if not left:
        return 0
    from fsdp_ckpt.run.compare import Comparer

    comparer = Comparer(
        *sides,
        meter=Meter(sum(pair.num_bytes for _, pair in left), listener),
        statistics=options.statistics,
        tolerance=options.tolerance,
        rtol=options.rtol,
    )
    found = comparer.run_all([pair for _, pair in left], jobs=options.jobs)
    for (match, pair), comparison in zip(left, found, strict=True):
        retyped = pair.a.dtype != pair.b.dtype
        if comparison.is_equal and not retyped:
            match.num_equal += 1
            continue
        change = Change.RETYPED if retyped else Change.CHANGED
        match.tensors[pair.name] = replace(
            _changed(pair, Change.CLOSE if comparison.is_close else change),
            stats=comparison.stats,
            cast=comparison.cast,
        )
    return sum(comparison.read_bytes for comparison in found)


def _changed(pair: TensorPair, change: Change) -> TensorDiff:
    return TensorDiff(
        name=pair.name,
        change=change,
        dtype_a=pair.a.dtype.name,
        dtype_b=pair.b.dtype.name,
        shape_a=pair.a.shape,
        shape_b=pair.b.shape,
        num_elements=pair.a.numel,
    )


def _tensor_judge(sides: tuple[Side, Side]) -> Callable[[TensorPair], bool]:
    """Return what tells whether small tensors among other values are equal."""

    def judge(pair: TensorPair) -> bool:
        answer = settle(pair, *sides)
        if answer is not None:
            return answer is not Settled.DIFFERENT
        from fsdp_ckpt.run.compare import Comparer

        return Comparer(*sides, meter=Meter(0, None), statistics=False).run(pair).is_equal

    return judge


def _report(
    checkpoints: tuple[Checkpoint, Checkpoint],
    texts: Sequence[str],
    pairing: Pairing,
    matches: Sequence[PartMatch],
    options: _Options,
) -> DiffReport:
    a, b = checkpoints
    parts = [match.report() for match in matches]
    notes = [
        f"{label}: passed over {value}"
        for label, checkpoint in zip("AB", checkpoints, strict=True)
        for fact, value in checkpoint.facts
        if fact == "passed over"
    ]
    return DiffReport(
        a=texts[0],
        b=texts[1],
        root_a=" + ".join(map(str, a.roots)),
        root_b=" + ".join(map(str, b.roots)),
        title_a=a.title,
        title_b=b.title,
        world_size_a=a.world_size,
        world_size_b=b.world_size,
        is_equal=all(part.is_equal for part in parts) and not pairing.only_a and not pairing.only_b,
        parts=parts,
        only_in_a=[part.name for part in pairing.only_a],
        only_in_b=[part.name for part in pairing.only_b],
        aside_a=[part.name for part in pairing.aside_a],
        aside_b=[part.name for part in pairing.aside_b],
        num_tensors=sum(part.num_tensors for part in parts),
        num_equal=sum(part.num_equal for part in parts),
        num_settled=sum(part.num_settled for part in parts),
        num_same_file=sum(part.num_same_file for part in parts),
        num_bytes=sum(pair.num_bytes for match in matches for pair in match.pairs.values()),
        read_bytes=0,
        tolerance=options.tolerance,
        rtol=options.rtol,
        notes=notes,
    )
