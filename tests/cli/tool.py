"""Run the installed command as a user would, and look at what it left behind."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
TOOL = str(Path(sys.executable).with_name("fsdp-ckpt"))
TIMEOUT_S = 60

DCP = FIXTURES / "torch-2.13.0/fsdp2_sharded_w2/pytorch_model_fsdp_0"
"""A folder of two ranks, a model and nothing else."""
EXPECTED = FIXTURES / "torch-2.13.0/fsdp2_sharded_w2/expected.safetensors"
"""What is in it, written by torch from the unsharded model."""
ACCELERATE = FIXTURES / "torch-2.13.0/fsdp2_sharded_w2"

_INHERITED = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""dtype, shape and bytes by name."""


def environment(**changes: str) -> dict[str, str]:
    """Return a small environment that does not depend on who runs the tests."""
    base = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return base | {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a command ended; a negative code is the signal that killed it."""

    code: int
    out: str
    err: str

    @property
    def hint(self) -> str | None:
        """The text of the hint, without its label."""
        found = re.search(r"^hint: (.*)$", self.err, re.MULTILINE)
        return found[1] if found else None


def run(
    *arguments: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = (TOOL,),
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> Result:
    """Run ``fsdp-ckpt ARGUMENTS`` to its end."""
    done = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=cwd,
        env=environment() if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
        check=False,
        **options,
    )
    return Result(
        code=done.returncode, out=done.stdout.decode(errors="replace"), err=done.stderr.decode(errors="replace")
    )


def assert_refused(result: Any, *codes: int) -> None:
    """Check that a run ended with one of these codes and said why in a way that a person can read."""
    assert result.code in codes, f"exit {result.code}, wanted {codes}\n{result.out}\n{result.err}"
    assert "Traceback" not in result.err
    assert "internal error" not in result.err
    assert re.search(r"^(error: |Error: )\S|^.*Error", result.err, re.MULTILINE), result.err


deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize
"""The safetensors library's reader of whole files."""


def tensors(path: Path) -> Tensors:
    """Return every tensor of a safetensors file, or of all such files in a folder, read by the safetensors library."""
    found: Tensors = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        for name, item in deserialize(file.read_bytes()):
            assert name not in found, f"{name} stands in two files"
            found[name] = (item["dtype"], tuple(item["shape"]), bytes(item["data"]))
    return found


def tensor_ranges(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield where tensors' bytes lie in a ``.distcp`` file, found with Python's zipfile, archive by archive."""
    start = 0
    for end in re.finditer(rb"PK\x05\x06.{18}", data, re.DOTALL):
        with zipfile.ZipFile(io.BytesIO(data[start : end.end()])) as archive:
            for info in archive.infolist():
                if "/data/" in info.filename:
                    name_bytes, extra_bytes = struct.unpack_from("<2H", data, start + info.header_offset + 26)
                    begin = start + info.header_offset + 30 + name_bytes + extra_bytes
                    yield begin, begin + info.file_size
        start = end.end()


def flip(path: Path, number: int = 0) -> None:
    """Flip a bit in the bytes of the n-th tensor of a ``.distcp`` file that has any."""
    data = bytearray(path.read_bytes())
    start, _ = [(start, stop) for start, stop in tensor_ranges(bytes(data)) if start < stop][number]
    data[start] ^= 0x10
    path.write_bytes(data)


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes | str]]:
    """Return mode, modification time and content of everything below a folder, to see whether something touched it."""
    found: dict[str, tuple[int, int, bytes | str]] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content: bytes | str = b""
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)
    return found


def leftovers(parent: Path) -> list[str]:
    """Return the hidden siblings that runs write into, as far as they are still there."""
    return sorted(entry.name for entry in parent.iterdir() if ".fsdp-ckpt-" in entry.name)


def strict_json(text: str) -> Any:
    """Parse JSON as the standard has it: no NaN, no names twice."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), "a name stands twice"
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=once)
