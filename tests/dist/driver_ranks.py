"""Plays runs of the training driver: `python -m tests.dist.driver_ranks OUT`.

Each start of ranks is what torchrun does, without torchrun: every rank is a process of its own, forked after torch has
been imported once, and none can hang. What came of them - exit codes and what they said - goes to `OUT/outcomes.json`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_ckpt.train.driver.__main__ import main as train
from fsdp_ckpt.train.driver.events import LOG
from fsdp_ckpt.train.driver.loop import train as _imported_once
from fsdp_ckpt.train.driver.options import TrainOptions

_LIMIT_S = 40
OUTCOMES = "outcomes.json"

SMALL = TrainOptions(folder="-", steps=12, save_every=4, batch_size=12, layers=2, hidden=16, digits=3, durable=False)
SHARDINGS: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1, "sharding_strategy": "SHARD_GRAD_OP"},
    "fsdp1_flat": {"fsdp_version": 1, "use_orig_params": False},
    "fsdp2_full": {"state_dict_type": "FULL_STATE_DICT", "reshard_after_forward": False},
    "fsdp2_bf16": {"mixed_precision": "bf16", "activation_checkpointing": True},
}


class Player:
    def __init__(self, out: Path) -> None:
        self.out = out
        self.outcomes: dict[str, dict[str, Any]] = {}
        """Exit codes by rank (negative: the signal that killed it) and what each said, by name."""

    def play(self, name: str, ranks: int, options: TrainOptions, *, stop_at: int | None = None) -> None:
        """Start ranks and wait for them; the options' folder is below OUT. SIGTERM goes to the last one at a step."""
        options = replace(options, folder=str(self.out / options.folder))
        file = self.out / f"{name}.json"
        options.write(file)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pids = [self._fork(name, rank, ranks, store.port, file) for rank in range(ranks)]
        if stop_at is not None:
            _wait_for_step(Path(options.folder) / LOG, stop_at)
            os.kill(pids[-1], signal.SIGTERM)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        said = [(self.out / f"{name}.{rank}.txt").read_text() for rank in range(ranks)]
        self.outcomes[name] = {"codes": codes, "said": said}

    def _fork(self, name: str, rank: int, ranks: int, port: int, file: Path) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            terminal = os.open(self.out / f"{name}.{rank}.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(terminal, 1)
            os.dup2(terminal, 2)
            faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
            }  # fmt: skip
            code = train([str(file), name])
            sys.stderr.flush()
            os._exit(code)
        finally:
            os._exit(99)

    def copy(self, source: str, target: str) -> None:
        shutil.copytree(self.out / source, self.out / target)


def _wait_for_step(log: Path, step: int) -> None:
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end:
        if log.exists() and f'"stepped", "step": {step},' in log.read_text():
            return
        time.sleep(0.005)


def main(out: Path) -> None:
    assert _imported_once.__module__ in sys.modules  # before ranks are forked
    torch.set_num_threads(1)
    player = Player(out)
    play = player.play
    play("whole", 2, replace(SMALL, folder="whole"))

    play("killed", 2, replace(SMALL, folder="cut", kill_at=6))
    for name, ranks in (("on_1", 1), ("on_3", 3), ("on_4", 4)):
        player.copy("cut", name)
        play(name, ranks, replace(SMALL, folder=name, resume="auto"))
    play("on_2", 2, replace(SMALL, folder="cut", resume="auto"))
    play("complete", 2, replace(SMALL, folder="cut", resume="auto"))

    play("killed_saving", 2, replace(SMALL, folder="half", kill_at=8))
    player.copy("half", "half_as_it_was")
    play("after_half", 2, replace(SMALL, folder="half", resume="auto"))

    endless = replace(SMALL, folder="stopped", steps=2000, save_every=1500)
    play("stopped", 2, endless, stop_at=3)
    last = max(int(path.name.removeprefix("step-")) for path in (out / "stopped").glob("step-*"))
    play("continued", 2, replace(endless, folder="continued", resume=str(out / "stopped"), kill_at=last + 2))

    play("in_use", 2, replace(SMALL, folder="whole"))
    play("in_use_by_another", 2, replace(SMALL, folder="whole", resume=str(out / "cut" / "step-8")))
    play("uneven", 3, replace(SMALL, folder="uneven", batch_size=16))
    play("missing", 2, replace(SMALL, folder="missing", resume=str(out / "nowhere")))

    for name, fsdp in SHARDINGS.items():
        options = replace(SMALL, folder=name, fsdp=fsdp)
        play(name, 2, options)
        shutil.move(out / name / "step-12", out / f"{name}-12")
        play(f"{name}_again", 2, replace(options, resume="auto"))
    shutil.copytree(out / "fsdp1" / "step-8", out / "crossed" / "step-8")
    play("crossed", 2, replace(SMALL, folder="crossed", resume="auto"))
    (out / OUTCOMES).write_text(json.dumps(player.outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
