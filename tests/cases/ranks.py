"""Write the checkpoints of ../shared/cases.md with real gloo ranks: `python -m tests.cases.ranks OUT [--large]`.

torch is imported once; the ranks are forked from here, first four, then two.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing import start_processes

from tests.cases import recipes as r

Build = Callable[[Path, DeviceMesh], None]
_ORDER = (4, 2)

BUILDS: dict[int, dict[str, Build]] = {
    4: {"p03": r.p03, "p05": r.p05, "p08": r.p08, "p28": r.p28_first, "p40": r.p40, "p48": r.p48},
    2: {
        "p01": r.p01, "p09": r.p09, "p14": r.p14, "p17": r.p17, "p22": r.p22, "p28": r.p28_second, "p34": r.p34,
        "p37": r.p37, "p44": r.p44, "p49": r.p49, "p51": r.p51, "p52": r.p52, "p54": r.p54,
        "p23": lambda out, mesh: r.p23(out, mesh, {16: (1024, 2048), 32: (1024, 2048)}),
    },
}  # fmt: skip
LARGE: dict[int, dict[str, Build]] = {2: {"p23": lambda out, mesh: r.p23(out, mesh, {16: (4096, 4096)})}}


def build(rank: int, world_size: int, out: Path, builds: Mapping[str, Build]) -> None:
    """Be one rank."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(80, exit=True)
    store = f"file://{out}/.store-{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (world_size,))
    for name, run in builds.items():
        run(out / name, mesh)
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Build everything, or the large checkpoint alone."""
    out, table = Path(sys.argv[1]), LARGE if "--large" in sys.argv else BUILDS
    for world_size in _ORDER:
        if world_size in table:
            start_processes(build, (world_size, out, table[world_size]), nprocs=world_size, start_method="fork")


if __name__ == "__main__":
    main()
