"""What reading in place costs in bytes, requests, memory and disk; a proxy and the kernel count."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.build import rows, save_dcp
from tests.cli.tool import environment
from tests.remote.folder_server import serving_folder
from tests.remote.proxy import Proxy, proxied

MB = 1_000_000
BUDGET_RSS = 128 << 20


@dataclass(frozen=True, slots=True)
class Served:
    """A folder of buckets behind a counting proxy, and what a process needs to find it."""

    folder: Path
    proxy: Proxy
    env: dict[str, str]


@pytest.fixture
def served(tmp_path: Path, s3_environment: dict[str, str]) -> Iterator[Served]:
    folder = tmp_path / "served"
    (folder / "bucket").mkdir(parents=True)
    (tmp_path / "scratch").mkdir()
    with serving_folder(folder) as server, proxied(server.host, server.port) as proxy:
        changes = {"AWS_ENDPOINT_URL_S3": proxy.url, "TMPDIR": str(tmp_path / "scratch")}
        yield Served(folder / "bucket", proxy, environment(**(s3_environment | changes)))


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str
    peak_bytes: int
    scratch_bytes: int


def run(served: Served, *arguments: str | Path, cwd: Path) -> Ended:
    """Run the command in a process of its own; note its peak memory, and the most that its temporary files took."""
    scratch, most, peak = Path(served.env["TMPDIR"]), 0, 0
    with (cwd / "out.txt").open("w+") as out, (cwd / "err.txt").open("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "fsdp_ckpt", *map(str, arguments)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=served.env, cwd=cwd,
        )  # fmt: skip
        try:
            while process.poll() is None:
                most, peak = max(most, _taken(scratch)), max(peak, _peak(process.pid))
                time.sleep(0.01)
        finally:
            process.kill()
            process.wait()
    return Ended(process.returncode, (cwd / "out.txt").read_text(), (cwd / "err.txt").read_text(), peak, most)


def _peak(pid: int) -> int:
    """Return the most memory that a process had so far; not ru_maxrss, which has what the tests' own process had."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) << 10 if found else 0
    return 0


def _taken(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


def sparse_safetensors(folder: Path, *, files: int, num_bytes: int) -> None:
    """Write a sharded model whose tensors are zeros that take no disk: 16 tensors of each file."""
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        each = num_bytes // files // 16
        header = {
            f"layers.{number * 16 + index}.weight": {
                "dtype": "BF16", "shape": [each // 2048, 1024], "data_offsets": [index * each, (index + 1) * each],
            }
            for index in range(16)
        }  # fmt: skip
        weight_map |= dict.fromkeys(header, name)
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + 16 * each)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")


def dcp_folder(folder: Path, *, megabytes: int) -> None:
    """Write as two ranks do: 60 tensors, one value all over each."""
    size = megabytes * MB // 60 // 4096
    state = {f"layers.{number}.weight": rows(torch.full((size, 1024), float(number)), 2) for number in range(60)}
    save_dcp(folder, state)


@pytest.mark.parametrize("verb", ["inspect", "validate"])
def test_looking_at_two_gigabytes_fetches_less_than_a_megabyte(verb: str, served: Served, tmp_path: Path) -> None:
    sparse_safetensors(served.folder / "model", files=8, num_bytes=2 << 30)
    ended = run(served, verb, "s3://bucket/model", "--json", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert served.proxy.sent_bytes < MB
    assert all(request.span for request in served.proxy.object_reads()), "an object was read as a whole"
    if verb == "inspect":
        report = json.loads(ended.out)
        assert report["fetched_bytes"] == sum(request.sent_bytes for request in served.proxy.object_reads())
        assert report["requests"] == len(served.proxy.object_reads())
        assert sum(len(part["tensors"]) for part in report["parts"]) == 128


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["inspect", "validate"])
def test_what_is_fetched_does_not_depend_on_how_large_tensors_are(verb: str, served: Served, tmp_path: Path) -> None:
    fetched = {}
    for megabytes in (30, 300):
        dcp_folder(served.folder / f"ck-{megabytes}", megabytes=megabytes)
        served.proxy.clear()
        ended = run(served, verb, f"s3://bucket/ck-{megabytes}", cwd=tmp_path)
        assert ended.code == 0, ended.err
        fetched[megabytes] = served.proxy.sent_bytes
    # 120 archives of torch: the head and the directory of each
    assert fetched[300] < 1.2 * fetched[30] + 100_000
    assert fetched[300] < (MB if verb == "inspect" else 15 * MB)


def test_inspecting_asks_few_times(served: Served, tmp_path: Path) -> None:
    """Two listings, and one request for the metadata, which may come in two."""
    dcp_folder(served.folder / "ck", megabytes=30)
    assert run(served, "inspect", "s3://bucket/ck", cwd=tmp_path).code == 0
    assert len(served.proxy.requests) <= 4


def test_heads_of_many_files_are_asked_for_at_the_same_time(served: Served, tmp_path: Path) -> None:
    from tests.remote.proxy import Delay

    sparse_safetensors(served.folder / "model", files=32, num_bytes=64 << 20)
    served.proxy.fail(Delay(0.25))
    ended = run(served, "inspect", "s3://bucket/model", cwd=tmp_path)
    assert ended.code == 0, ended.err
    reads = served.proxy.object_reads()
    span = max(request.began for request in reads) - min(request.began for request in reads)
    assert len(reads) >= 32
    assert span < 0.25 * len(reads) / 3, "one after the other"


def check_merged(folder: Path, served: Served, keys: Sequence[str] = ("layers.0.weight", "layers.59.weight")) -> None:
    from safetensors import safe_open

    (file,) = folder.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        assert len(opened.keys()) == 60
        for key in keys:
            assert torch.equal(opened.get_tensor(key).unique(), torch.tensor([float(key.split(".")[1])]))


@pytest.mark.slow
def test_a_merge_stays_within_its_memory_and_copies_nothing(served: Served, tmp_path: Path) -> None:
    dcp_folder(served.folder / "ck", megabytes=300)
    source_bytes = sum(file.stat().st_size for file in (served.folder / "ck").iterdir())
    ended = run(served, "merge", "s3://bucket/ck", "out", cwd=tmp_path)
    assert ended.code == 0, ended.err
    check_merged(tmp_path / "out", served)
    assert ended.peak_bytes < BUDGET_RSS, f"{ended.peak_bytes / 2**20:.0f} MiB"
    assert ended.scratch_bytes < 4 * MB, "a local copy of the source"
    assert served.proxy.sent_bytes < 1.3 * source_bytes, "what was fetched ahead was thrown away"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "times"),
    # Resharding cuts records, and reads them a second time to compare their checksums.
    [(("convert", "--to", "safetensors"), 1.4), (("reshard", "--world-size", "4"), 2.3)],
)
def test_conversions_stay_within_their_memory(
    arguments: tuple[str, ...], times: float, served: Served, tmp_path: Path
) -> None:
    dcp_folder(served.folder / "ck", megabytes=150)
    verb, *options = arguments
    ended = run(served, verb, "s3://bucket/ck", "out", *options, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert ended.peak_bytes < BUDGET_RSS, f"{ended.peak_bytes / 2**20:.0f} MiB"
    assert ended.scratch_bytes < 4 * MB
    source_bytes = sum(file.stat().st_size for file in (served.folder / "ck").iterdir())
    assert served.proxy.sent_bytes < times * source_bytes


@pytest.mark.slow
def test_reading_runs_ahead(served: Served, tmp_path: Path) -> None:
    """Where every answer takes long, a merge does not wait for one after the other."""
    from tests.remote.proxy import Delay

    dcp_folder(served.folder / "ck", megabytes=60)
    served.proxy.fail(Delay(0.2))
    ended = run(served, "merge", "s3://bucket/ck", "out", cwd=tmp_path)
    assert ended.code == 0, ended.err
    reads = [request for request in served.proxy.object_reads() if request.sent_bytes > 100_000]
    span = max(request.began for request in reads) - min(request.began for request in reads)
    assert span < 0.2 * len(reads) / 2, "one after the other"


@pytest.mark.slow
def test_a_deep_check_reads_everything_once(served: Served, tmp_path: Path) -> None:
    dcp_folder(served.folder / "ck", megabytes=100)
    ended = run(served, "validate", "s3://bucket/ck", "--deep", cwd=tmp_path)
    assert ended.code == 0, ended.err + ended.out
    source_bytes = sum(file.stat().st_size for file in (served.folder / "ck").iterdir())
    assert source_bytes * 0.99 < served.proxy.sent_bytes < 1.2 * source_bytes
    assert ended.peak_bytes < BUDGET_RSS, f"{ended.peak_bytes / 2**20:.0f} MiB"
    assert ended.scratch_bytes < 4 * MB
