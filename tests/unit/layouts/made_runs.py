"""Run folders for tests, written by hand: what our manifest says is computed here, with the standard library alone."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[3] / "fixtures"
DCP = FIXTURES / "torch-2.13.0/fsdp2_sharded_w2/pytorch_model_fsdp_0"
"""Two ranks' DCP folder, written by Accelerate."""
TITAN = FIXTURES / "torch-2.5.1/titan_w2"
HF = FIXTURES / "torch-2.9.1/hf_w1"

DATA = "pytorch_model_fsdp_0/__0_0.distcp"
INDEX = "pytorch_model_fsdp_0/.metadata"
FILES = {DATA: b"numbers" * 100, INDEX: b"index" * 10, "scheduler.bin": b"small"}
MANIFEST = "fsdp_ckpt.json"


def own(
    folder: Path,
    step: int,
    values: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    created: str = "2026-01-02T03:04:05+00:00",
    files: Mapping[str, bytes] = FILES,
) -> Path:
    """Make what ``save_state`` leaves, as far as a listing looks at it."""
    path = folder / (name or f"step-{step}")
    for file, content in files.items():
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_bytes(content)
    data = {
        "format": "fsdp-ckpt/checkpoint/1", "save_id": "0" * 16, "step": step, "world_size": 1,
        "state_dict_type": "SHARDED_STATE_DICT", "created": created, "versions": {"fsdp_ckpt": "0.1.0"},
        "models": [], "optimizers": [], "schedulers": [], "dataloaders": [], "objects": [], "has_rng": False,
        "values": dict(values or {}),
        "files": {
            file: {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"} for file, content in files.items()
        },
    }  # fmt: skip
    (path / MANIFEST).write_text(json.dumps(data))
    return path


def trainer(folder: Path, step: int, *logged: Mapping[str, Any]) -> Path:
    """Make a Trainer's checkpoint with the weights of a fixture."""
    path = folder / f"checkpoint-{step}"
    shutil.copytree(DCP, path / "pytorch_model_fsdp_0")
    (path / "config.json").write_text("{}")
    state = {"global_step": step, "epoch": 1.0, "log_history": list(logged)}
    (path / "trainer_state.json").write_text(json.dumps(state))
    return path


def change(path: Path, **fields: Any) -> None:
    """Change fields of a manifest."""
    manifest = path / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | fields))


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
