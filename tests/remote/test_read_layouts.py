"""Every layout says of itself in an object store, and on memory://, what it says on disk: all of ``fixtures/``."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import fsdp_ckpt
from fsdp_ckpt.ops.list_run import list_run
from tests.remote.normal import outcome
from tests.remote.proxy import Proxy
from tests.remote.s3_server import S3Server

FIXTURES = Path(__file__).parents[2] / "fixtures"


def checkpoints() -> list[str]:
    """Return the folders in ``fixtures/`` that hold a checkpoint and what it should be, and those that are in them."""
    found = []
    for family in sorted(FIXTURES.iterdir()):
        for case in sorted(family.iterdir()) if family.is_dir() else ():
            if case.is_dir() and case.name != "__pycache__":
                found.append(case)
                found.extend(sorted(inner for inner in case.iterdir() if inner.is_dir()))
    return [path.relative_to(FIXTURES).as_posix() for path in found]


@pytest.fixture(scope="module")
def on_s3(s3_server: S3Server) -> str:
    return s3_server.make_bucket(f"fixtures-{uuid.uuid4().hex}").upload(FIXTURES, "a/fixtures")


@pytest.fixture(scope="module")
def in_memory() -> Iterator[str]:
    fs = fsspec.filesystem("memory")
    base = f"/{uuid.uuid4().hex}/fixtures"
    for file in FIXTURES.rglob("*"):
        if file.is_file():
            fs.pipe_file(f"{base}/{file.relative_to(FIXTURES).as_posix()}", file.read_bytes())
    yield f"memory:/{base}"
    fs.rm(base, recursive=True)


def of_each_layout() -> list[str]:
    """Return those of what is written today: S3 takes longer, and differs in nothing that layouts see."""
    return [case for case in checkpoints() if re.fullmatch(r"(deepspeed|frameworks|torch-2\.13\.0)/[^/]+", case)]


@pytest.mark.parametrize("case", of_each_layout())
def test_s3_says_what_the_disk_says(case: str, on_s3: str, proxy: Proxy) -> None:
    local, url = str(FIXTURES / case), f"{on_s3}/{case}"
    for verb in (fsdp_ckpt.inspect, fsdp_ckpt.validate, list_run):
        expected = outcome(lambda verb=verb: verb(local), str(FIXTURES))  # type: ignore[misc]
        assert outcome(lambda verb=verb: verb(url), on_s3, "fsdp-ckpt-mirror") == expected  # type: ignore[misc]


@pytest.mark.parametrize("case", checkpoints())
def test_memory_says_what_the_disk_says(case: str, in_memory: str) -> None:
    local, url = str(FIXTURES / case), f"{in_memory}/{case}"
    for verb in (fsdp_ckpt.inspect, fsdp_ckpt.validate, list_run):
        expected = outcome(lambda verb=verb: verb(local), str(FIXTURES))  # type: ignore[misc]
        assert outcome(lambda verb=verb: verb(url), in_memory, "fsdp-ckpt-mirror") == expected  # type: ignore[misc]
