"""Measure save_state and load_state: inside a running job of two ranks, ours and Accelerate's in turns."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.cases import Settings
from benchmarks.compare import Comparison, Ratio
from benchmarks.measure import CommandFailedError, Sample, Series, ratio
from fsdp_ckpt.units import format_size

__all__ = [
    "GET_STATE_DICT", "KINDS", "LOAD", "LOAD_ACCELERATE", "LOAD_FRESH", "LOAD_NO_VERIFY", "SAVE", "SAVE_ACCELERATE",
    "SAVE_MODEL", "SAVE_NO_FSYNC", "play",
]  # fmt: skip

SAVE, SAVE_NO_FSYNC, SAVE_ACCELERATE = "save_state", "save_state, durable=False", "Accelerate: save model and optimizer"
LOAD, LOAD_NO_VERIFY = "load_state", "load_state, verify=False"
LOAD_FRESH, LOAD_ACCELERATE = "load_state into a fresh optimizer", "Accelerate: load model and optimizer"
GET_STATE_DICT, SAVE_MODEL = "get_state_dict", "save_model, files of 100 MB"

KINDS = {"state-fsdp1": "fsdp1", "state-fsdp2": "fsdp2"}
"""Wrapper by the name of its case."""

_RATIOS = (
    (SAVE, SAVE_ACCELERATE),
    (SAVE_NO_FSYNC, SAVE_ACCELERATE),
    (LOAD_ACCELERATE, LOAD),
    (LOAD_ACCELERATE, LOAD_NO_VERIFY),
)
_TIMEOUT_S = 1200


def play(name: str, settings: Settings, *, tell: Callable[[str], None]) -> Comparison:
    """Run one case in a process of its own and return what it gave.

    Raises:
        CommandFailedError: It failed.
    """
    kind = KINDS[name]
    folder = settings.work / name
    sizes = ("--bytes", str(settings.size_bytes), "--rounds", str(settings.rounds))
    argv = [sys.executable, "-m", "benchmarks.state_ranks", kind, str(folder), *sizes]
    tell(f"{name}: {settings.rounds} rounds")
    root = Path(__file__).parents[1]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=root)
    if done.returncode != 0:
        raise CommandFailedError(f"{name} failed; last output: {done.stderr.strip()[-2000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    series = {
        operation: Series(
            name=operation,
            samples=tuple(
                Sample(wall_s=wall_s, cpu_s=cpu_s, rss_bytes=extra, exit_code=0) for wall_s, cpu_s, extra in costs
            ),
        )
        for operation, costs in found["costs"].items()
    }
    for one in series.values():
        tell(f"  {one.name}: {one.wall_s:.3g} s, {format_size(one.rss_bytes)} extra")
    payload = found["payload_bytes"]
    return Comparison(
        title=f"Save and load {format_size(payload)} of model and AdamW on 2 ranks, {kind.upper()}",
        payload_bytes=payload,
        series=tuple(series.values()),
        ratios=tuple(
            Ratio(numerator=above, denominator=below, value=ratio(series[above], series[below]))
            for above, below in _RATIOS
        ),
        memory="extra memory",
    )
