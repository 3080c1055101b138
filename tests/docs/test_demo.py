"""``make demo``: it runs as it stands, and the model has learned across the kill."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_the_demo_learns_across_a_kill(tmp_path: Path) -> None:
    tool = Path(sys.executable).with_name("fsdp-ckpt")
    env = {"PATH": "/usr/bin:/bin", "FSDP_CKPT": str(tool), "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", str(ROOT / "docs" / "demo.sh")], env=env,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every rank killed in the middle of its save" in done.stdout
    assert "4 ranks on cpu; resumed from run/step-100, saved by 2: step 101 comes next" in done.stdout
    assert "31415926 > 11234569  right" in done.stdout
    share = re.search(r"^([\d.]+)% of 500 held-out numbers right", done.stdout, re.MULTILINE)
    assert share is not None
    assert float(share[1]) >= 95
    explained = [line for line in done.stdout.splitlines() if line.startswith("# ")]
    assert len(explained) >= 7
