"""Hold the results against the budgets: what must be reached, what is aimed at, what was measured."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from benchmarks import cases, conversion, shared, state, validation
from benchmarks.compare import Comparison
from benchmarks.measure import Series
from benchmarks.synthetic import Synthetic
from fsdp_ckpt.units import format_size

_MILLION = 1_000_000
_NOT_MEASURED = "not measured"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One budget and how it was kept.

    Attributes:
        what: The quantity.
        must: What must be reached.
        aim: What is aimed at.
        measured: What was measured, or why it was not.
        of_must: Measured over must; None when not measured. Above 1 is a miss, unless more is better.
        is_met: Whether the must was reached; None when not measured.
    """

    what: str
    must: str
    aim: str
    measured: str
    of_must: float | None = None
    is_met: bool | None = None


def judge(results: Mapping[str, Comparison], chunks: Sequence[int]) -> tuple[Budget, ...]:
    """Return every budget, in a fixed order.

    Args:
        results: Comparisons by the name of their case; cases that did not run may be absent.
        chunks: Sizes of the synthetic metadata that were asked for, chunks.
    """
    start_up, scale = results.get("inspect"), results.get("scale")
    merge, cast, memory = results.get("merge"), results.get("cast"), results.get("memory")
    help_s = _from(start_up, cases.HELP, _cpu_s)
    inspect_s = _from(start_up, cases.INSPECT, _cpu_s)
    plan_s = _from(scale, cases.DRY_RUN, _wall_s)
    cp, cp_sync = cases.CP, cases.CP_SYNC
    return (
        _at_most("`fsdp-ckpt --help`, CPU", help_s, 0.25, 0.12, _milliseconds),
        _at_most("`fsdp-ckpt inspect` of 150 tensors, CPU", inspect_s, 0.4, 0.2, _milliseconds),
        *(budget for num_chunks in chunks for budget in _inspect_budgets(scale, num_chunks)),
        _at_most(f"`fsdp-ckpt merge --dry-run` of {cases.SPARSE.num_chunks:,} chunks", plan_s, 30, None, _seconds),
        _at_most("`merge --no-fsync`, CRC checked, against `cp`", _ratio(merge, cases.MERGE_NO_FSYNC, cp), 1.25, 1.05),
        _at_most("`merge`, durable, against `cp && sync`", _ratio(merge, cases.MERGE, cp_sync), 1.0, 0.7),
        _at_least("`accelerate merge-weights` against `merge`", _ratio(merge, cases.ACCELERATE, cases.MERGE), 5, 10),
        _at_most("`--dtype bfloat16 --no-fsync` against `cp`", _ratio(cast, cases.CAST_NO_FSYNC, cp), 1.5, 1.1),
        _at_most("Peak RSS of any merge", _most_rss([merge, cast, memory]), 128e6, 48e6, format_size),
        _at_most("Peak RSS of a merge, large against small", _rss_growth(memory), 1.05, 1.0),
        *_conversion_budgets(results.get("reshard"), results.get("convert")),
        *_validate_budgets(results.get("validate"), results.get("validate-scale")),
        *_state_budgets([results.get(name) for name, (_, in_memory) in state.KINDS.items() if not in_memory]),
        *(_shared_budget(kind, results.get(name)) for name, kind in shared.KINDS.items()),
    )


def _conversion_budgets(reshard: Comparison | None, convert: Comparison | None) -> list[Budget]:
    """Judge another sharding of the same bytes, and the first one of a whole model."""
    ratio = _ratio(reshard, conversion.RESHARD_NO_FSYNC, cases.CP)
    return [
        _at_most(f"`reshard --no-fsync` from {conversion.FROM} ranks to {conversion.TO} against `cp`", ratio, 1.5),
        _at_most("`reshard`, durable, against `cp && sync`", _ratio(reshard, conversion.RESHARD, cases.CP_SYNC), 1.0),
        _at_most(
            "`convert` of a whole model for 8 ranks against `cp`",
            _ratio(convert, conversion.CONVERT_NO_FSYNC, cases.CP),
            1.5,
        ),
        _at_most(
            "Peak RSS of `reshard` and `convert`",
            _most_rss([reshard, convert], (conversion.RESHARD, conversion.CONVERT)),
            128e6,
            48e6,
            format_size,
        ),
    ]


def _validate_budgets(deep: Comparison | None, geometry: Comparison | None) -> list[Budget]:
    """Judge `validate`: reading all against `cat`, and a million chunks by themselves."""
    name = f"`{validation.GEOMETRY}`"
    rss_bytes = _from(deep, validation.DEEP, _rss_bytes)
    geometry_s, geometry_bytes = (_from(geometry, validation.GEOMETRY, part) for part in (_wall_s, _rss_bytes))
    return [
        _at_most("`validate --deep` against `cat`", _ratio(deep, validation.DEEP, validation.CAT), 1.3),
        _at_most("`validate --deep`, peak RSS", rss_bytes, 128e6, 48e6, format_size),
        _at_most(name, geometry_s, 15, None, _seconds),
        _at_most(f"{name}, peak RSS", geometry_bytes, 2e9, None, format_size),
    ]


def _shared_budget(kind: str, comparison: Comparison | None) -> Budget:
    merge = comparison.find(shared.MERGE) if comparison else None
    measured, is_met = f"{_NOT_MEASURED}: needs root and mkfs.{kind}", None
    if comparison and merge and comparison.disk_bytes is not None:
        is_met = comparison.disk_bytes < comparison.payload_bytes / 100
        taken, size = format_size(comparison.disk_bytes), format_size(comparison.payload_bytes)
        measured = f"{_seconds(merge.wall_s)} and {taken} of disk for {size}"
    return Budget(
        what=f"`merge` of a checkpoint that our writer saved, on {kind}",
        must="no data copied",
        aim="< 1 s for any size",
        measured=measured,
        is_met=is_met,
    )


def _state_budgets(comparisons: Sequence[Comparison | None]) -> list[Budget]:
    """Judge saving and loading by the worse of the wrappers."""
    found = [comparison for comparison in comparisons if comparison]
    others = ("Accelerate", "DCP", state.COPY, state.DD)
    ours = [series for one in found for series in one.series if not series.name.startswith(others)]
    export = [series for series in ours if series.name in (state.GET_STATE_DICT, state.SAVE_MODEL)]
    moving = [series for series in ours if series not in export]
    saves = [value for one in found if (value := one.ratio(state.SAVE, state.SAVE_ACCELERATE)) is not None]
    loads = [value for one in found if (value := one.ratio(state.LOAD_ACCELERATE, state.LOAD)) is not None]
    stalls = [value for one in found if (value := one.ratio(state.ASYNC, state.SAVE)) is not None]
    copies = [value for one in found if (value := one.ratio(state.ASYNC, state.COPY)) is not None]
    zeros = [value for one in found if (value := one.ratio(state.SAVE, state.DD)) is not None]
    reshards = [value for one in found if (value := one.ratio(state.LOAD_OTHER_DCP, state.LOAD_OTHER)) is not None]
    dcp_loads = [value for one in found if (value := one.ratio(state.LOAD_DCP, state.LOAD)) is not None]
    memory = max((series.rss_bytes for series in moving), default=None)
    exporting = max((series.rss_bytes for series in export), default=None)
    return [
        _at_most("Memory beyond the state, `save_state` and `load_state`, a rank", memory, 128e6, None, format_size),
        _at_most("The same, `get_state_dict` and `save_model`", exporting, 128e6, None, format_size),
        _at_most("`save_state`, durable, against Accelerate's save", max(saves, default=None), 0.8, 0.4),
        _at_most("`save_state`, durable, against writing and syncing zeros", max(zeros, default=None), None, 1.15),
        _at_most("`save_state`, asynchronous: the stop, against the synchronous save", max(stalls, default=None), 0.25),
        _at_most("The same, against a copy into memory that is used again", max(copies, default=None), None, 1.2),
        _at_least("Accelerate's load against `load_state`", min(loads, default=None), 2, 4),
        _at_least("DCP's load against `load_state`", min(dcp_loads, default=None), 2, 4),
        _at_least("DCP's load of 4 ranks' checkpoint on 2, against `load_state`", min(reshards, default=None), 2, 4),
    ]


def _inspect_budgets(scale: Comparison | None, chunks: int) -> list[Budget]:
    """Judge `inspect` at one size: up to a million chunks there are a time and a memory to keep, above it a memory."""
    num_chunks = Synthetic.of_chunks(chunks).num_chunks
    what = f"`fsdp-ckpt inspect` of {num_chunks:,} chunks"
    series = scale.find(cases.inspect_name(num_chunks)) if scale else None
    wall_s, rss_bytes = (series.wall_s, series.rss_bytes) if series else (None, None)
    if num_chunks <= _MILLION:
        return [
            _at_most(what, wall_s, 8, 5, _seconds),
            _at_most(f"{what}, peak RSS", rss_bytes, 1.5e9, 0.5e9, format_size),
        ]
    if series and series.samples[-1].exit_code == cases.REFUSED:
        said = f"refused after {_seconds(series.wall_s)}"
        return [Budget(what=what, must="completes in 24 GB or is refused", aim="", measured=said, is_met=True)]
    return [_at_most(f"{what}, peak RSS", rss_bytes, 24e9, None, format_size)]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else _milliseconds(seconds)


def _times(ratio: float) -> str:
    return f"{ratio:.3g} x"


def _at_most(
    what: str,
    value: float | None,
    must: float | None,
    aim: float | None = None,
    show: Callable[[float], str] = _times,
) -> Budget:
    bound = must if must is not None else aim
    return Budget(
        what=what,
        must=f"<= {show(must)}" if must is not None else "",
        aim=f"<= {show(aim)}" if aim is not None else "",
        measured=_NOT_MEASURED if value is None else show(value),
        of_must=None if value is None or bound is None else value / bound,
        is_met=None if value is None or must is None else value <= must,
    )


def _at_least(what: str, value: float | None, must: float, aim: float) -> Budget:
    return Budget(
        what=what,
        must=f">= {_times(must)}",
        aim=f">= {_times(aim)}",
        measured=_NOT_MEASURED if value is None else _times(value),
        of_must=None if value is None else value / must,
        is_met=None if value is None else value >= must,
    )


def _wall_s(series: Series) -> float:
    return series.wall_s


def _cpu_s(series: Series) -> float:
    return series.cpu_s


def _rss_bytes(series: Series) -> float:
    return series.rss_bytes


def _from(comparison: Comparison | None, name: str, quantity: Callable[[Series], float]) -> float | None:
    series = comparison.find(name) if comparison else None
    return quantity(series) if series else None


def _ratio(comparison: Comparison | None, numerator: str, denominator: str) -> float | None:
    return comparison.ratio(numerator, denominator) if comparison else None


def _most_rss(comparisons: Sequence[Comparison | None], prefixes: tuple[str, ...] = (cases.MERGE,)) -> float | None:
    every = [series for comparison in comparisons if comparison for series in comparison.series]
    chosen = [series for series in every if series.name.startswith(prefixes) and series.samples]
    return max((series.rss_bytes for series in chosen), default=None)


def _rss_growth(memory: Comparison | None) -> float | None:
    small, large = (_from(memory, name, _rss_bytes) for name in (cases.MERGE_SMALL, cases.MERGE_LARGE))
    return large / small if small and large else None
