"""A conversion that dies: ``python -m tests.unit.ops.killed_writer SRC DST WAY``.

WAY is ``exit`` (as a kill would end it) or ``interrupt`` (Ctrl-C), once most of the files are finished.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fsdp_ckpt import reshard
from fsdp_ckpt.run.progress import Progress


def main(src: str, dst: str, way: str) -> None:
    def listener(_: Progress) -> None:
        parent = Path(dst).parent
        if len(list(parent.glob(".*/**/.*.done"))) >= 3:
            if way == "exit":
                os._exit(9)
            raise KeyboardInterrupt

    reshard(src, dst, 5, jobs=1, listener=listener)


if __name__ == "__main__":
    main(*sys.argv[1:])
