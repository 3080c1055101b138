"""A conversion that dies: ``python -m tests.unit.ops.killed_writer SRC DST WAY``.

WAY is ``exit`` (as a kill would end it) or ``interrupt`` (Ctrl-C), once three of its files are finished.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from fsdp_ckpt import reshard
from fsdp_ckpt.store.publish import Staging

_finish_file = Staging.finish_file


def _finish_and_die(self: Staging, name: str, part: Path, note: str) -> None:
    _finish_file(self, name, part, note)
    if len(list(self.path.rglob(".*.done"))) < 3:
        return
    if sys.argv[3] == "exit":
        os._exit(9)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)  # until the main thread has seen it


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Staging.finish_file = _finish_and_die  # type: ignore[method-assign]
    reshard(sys.argv[1], sys.argv[2], 5, jobs=1)
