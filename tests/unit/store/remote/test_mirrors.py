"""Which mirrors stay: those that were used last, and those of the process that forked this one."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

import fsspec
import pytest

from fsdp_ckpt.store.remote import mirrors
from fsdp_ckpt.store.remote.mirror import mirror
from fsdp_ckpt.store.remote.mirrors import close_mirrors, mirror_of

_PROGRAM = """
import os, sys
import fsspec
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.store.remote.mirror import mirror
fsspec.filesystem("memory").pipe_file("/b/run/x.bin", b"x" * (1 << 20))
made = mirror("memory://b/run")
store = LocalStore(made.path)
buffer = memoryview(bytearray(400_000))
with store.opened("x.bin") as file:
    file.read_into(buffer, 0)
if os.fork() == 0:
    with store.opened("x.bin") as file:
        assert file.read_into(buffer, 500_000) == 400_000
    sys.exit(7)  # unlike os._exit this calls what was registered for the end
_, status = os.wait()
assert os.waitstatus_to_exitcode(status) == 7
assert made.path.is_dir()
with store.opened("x.bin") as file:
    assert file.read(900_000, 5) == b"xxxxx"
print(made.top)
"""


@pytest.fixture
def url() -> Iterator[str]:
    fs, base = fsspec.filesystem("memory"), uuid.uuid4().hex
    fs.pipe_file(f"/{base}/run/x.bin", b"x")
    close_mirrors()
    yield f"memory://{base}/run"
    close_mirrors()
    fs.rm(f"/{base}", recursive=True)


def test_the_one_that_nobody_used_goes_first(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "_MAX_MIRRORS", 3)
    used, idle = mirror(url), mirror(url)
    for _ in range(4):
        mirror(url)
        assert mirror_of(used.path) is used
    assert used.path.is_dir()
    assert not idle.top.exists()


def test_a_forked_process_leaves_its_parents_mirrors_alone() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not os.path.exists(done.stdout.strip())
