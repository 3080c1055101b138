"""Check ``trainer_state.json``, from which the Trainer goes on counting its steps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from fsdp_ckpt.catalog import Checkpoint, Problem
from fsdp_ckpt.errors import CorruptCheckpoint
from fsdp_ckpt.ops.validation.wording import finding
from fsdp_ckpt.store.local import LocalStore

__all__ = ["check_trainer_state"]

_FILE = "trainer_state.json"
_LIMIT_BYTES = 64 << 20
_FOLDER = re.compile(r"checkpoint-(\d{1,15})")


def check_trainer_state(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yield what is wrong with the file that the Trainer keeps its step in, where there is one."""
    store = LocalStore(checkpoint.roots)
    for file in checkpoint.side_files:
        if file.rpartition("/")[2] != _FILE:
            continue
        try:
            state = json.loads(store.read(file, limit_bytes=_LIMIT_BYTES))
        except CorruptCheckpoint:  # gone, or a link that leads out of the checkpoint
            continue
        except (ValueError, RecursionError) as error:
            yield finding("bad-trainer-state", file, f"it is no JSON: {error}")
            continue
        step = state.get("global_step") if isinstance(state, dict) else None
        if type(step) is not int:
            yield finding("bad-trainer-state", file, "it tells no global_step")
            continue
        named = _FOLDER.fullmatch(checkpoint.root.resolve().name)
        if named is not None and "/" not in file and int(named[1]) != step:
            yield finding("bad-trainer-state", file, f"global_step is {step}, its folder's name says {int(named[1])}")
