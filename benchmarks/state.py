"""Measure save_state and load_state: inside a running job of two ranks, ours and Accelerate's in turns."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from benchmarks.cases import Settings
from benchmarks.compare import Comparison, Ratio
from benchmarks.measure import CommandFailedError, Sample, Series, ratio
from fsdp_ckpt.units import format_size

__all__ = [
    "ASYNC", "COPY", "DD", "GET_STATE_DICT", "KINDS", "LOAD", "LOAD_ACCELERATE", "LOAD_DCP", "LOAD_FRESH",
    "LOAD_NO_VERIFY", "LOAD_OTHER", "LOAD_OTHER_ACCELERATE", "LOAD_OTHER_DCP", "SAVE", "SAVE_ACCELERATE", "SAVE_DCP",
    "SAVE_MODEL", "SAVE_NO_FSYNC", "SOURCE_RANKS", "play",
]  # fmt: skip

SAVE, SAVE_NO_FSYNC = "save_state", "save_state, durable=False"
ASYNC = "save_state, async_save=True: until it returns"
SAVE_ACCELERATE, SAVE_DCP = "Accelerate: save model and optimizer", "DCP: get_state_dict and dcp.save"
LOAD, LOAD_NO_VERIFY = "load_state", "load_state, verify=False"
LOAD_FRESH = "load_state into a fresh optimizer"
LOAD_ACCELERATE, LOAD_DCP = "Accelerate: load model and optimizer", "DCP: dcp.load and set_state_dict"
GET_STATE_DICT, SAVE_MODEL = "get_state_dict", "save_model, files of 100 MB"
COPY, DD = "copy of the state to memory that is used again", "write and fsync of as many zeros (dd conv=fsync)"
SOURCE_RANKS = 4
LOAD_OTHER, LOAD_OTHER_ACCELERATE, LOAD_OTHER_DCP = (
    f"{how} of {SOURCE_RANKS} ranks' checkpoint" for how in (LOAD, LOAD_ACCELERATE, LOAD_DCP)
)

KINDS = {
    "state-fsdp1": ("fsdp1", False),
    "state-fsdp2": ("fsdp2", False),
    "state-fsdp1-memory": ("fsdp1", True),
    "state-fsdp2-memory": ("fsdp2", True),
}
"""By name of the case: the wrapper, and whether files are kept in memory (/dev/shm), which shows the CPU's share."""

_RATIOS = (
    (SAVE, SAVE_ACCELERATE),
    (SAVE, SAVE_DCP),
    (SAVE, DD),
    (SAVE_NO_FSYNC, SAVE_ACCELERATE),
    (ASYNC, SAVE),
    (ASYNC, COPY),
    (LOAD_ACCELERATE, LOAD),
    (LOAD_ACCELERATE, LOAD_NO_VERIFY),
    (LOAD_DCP, LOAD),
    (LOAD_OTHER_ACCELERATE, LOAD_OTHER),
    (LOAD_OTHER_DCP, LOAD_OTHER),
)
_TIMEOUT_S = 1200
_MEMORY = Path("/dev/shm")


def play(name: str, settings: Settings, *, tell: Callable[[str], None]) -> Comparison:
    """Run one case in a process of its own and return what it gave.

    Raises:
        CommandFailedError: It failed.
    """
    kind, in_memory = KINDS[name]
    scratch = tempfile.TemporaryDirectory(prefix="fsdp-ckpt-", dir=_MEMORY) if in_memory else nullcontext(settings.work)
    with scratch as work:
        return _play(name, kind, Path(work) / name, settings, tell, where=", in /dev/shm" if in_memory else "")


def _play(
    name: str, kind: str, folder: Path, settings: Settings, tell: Callable[[str], None], *, where: str
) -> Comparison:
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
        title=f"Save and load {format_size(payload)} of model and AdamW on 2 ranks, {kind.upper()}{where}",
        payload_bytes=payload,
        series=tuple(series.values()),
        ratios=tuple(
            Ratio(numerator=above, denominator=below, value=ratio(series[above], series[below]))
            for above, below in _RATIOS
            if above in series and below in series
        ),
        memory="extra memory",
    )
