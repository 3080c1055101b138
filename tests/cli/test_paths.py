"""Sources and destinations as people type them, and destinations that are in the way."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.tool import (
    ACCELERATE,
    DCP,
    EXPECTED,
    TOOL,
    assert_refused,
    environment,
    flip,
    leftovers,
    run,
    snapshot,
    tensors,
)
from tests.hostile.sandbox import Sandbox

NAMES = [
    "my run",
    "a[0-9]b",
    "x=y",
    "ступень-層-é",
    "per%20cent",
    "a'b\"c",
    "$HOME",
    "semi;colon",
    "-dash",
    "a\nb",
    "~",
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_source_and_destination(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    source = shutil.copytree(DCP, tmp_path / name / "pytorch_model_fsdp_0").parent
    out = tmp_path / f"{name} out"
    result = run("merge", source, out, "--json")
    assert result.code == 0, result.err
    assert tensors(out) == tensors(EXPECTED)
    relative = sandbox.run("inspect", "-q", "--", name, cwd=tmp_path)
    assert relative.code == 0, relative.err
    assert sandbox.run("merge", "-q", "--", name, f"{name} out2", cwd=tmp_path).code == 0
    assert tensors(tmp_path / f"{name} out2") == tensors(EXPECTED)
    assert leftovers(tmp_path) == []


def test_slashes_dots_and_links(tmp_path: Path, sandbox: Sandbox) -> None:
    source = shutil.copytree(DCP, tmp_path / "run/pytorch_model_fsdp_0")
    (tmp_path / "latest").symlink_to("run")
    for number, (where, typed) in enumerate(
        [
            (tmp_path, f"{source}/"),
            (tmp_path, f"{source}//"),
            (tmp_path, "run/../run/./pytorch_model_fsdp_0"),
            (source, "."),
            (source, "./"),
            (source.parent, "."),
            (source / "..", "../run"),
            (tmp_path, "latest"),
            (tmp_path, "latest/pytorch_model_fsdp_0/"),
            (tmp_path, f"{source}/.metadata"),
            (tmp_path, f"{source}/__0_0.distcp"),
            (tmp_path, f"file://{source}"),
        ]
    ):
        out = tmp_path / f"out{number}"
        result = sandbox.run("merge", typed, f"{out}/", "-q", cwd=where)
        assert result.code == 0, (typed, result.err)
        assert tensors(out) == tensors(EXPECTED), typed
    assert run("inspect", cwd=source).code == 2
    assert run("inspect", ".", "-q", cwd=source).out.startswith("dcp\tcomplete")


def test_a_destination_below_nothing_gets_its_parents(tmp_path: Path) -> None:
    assert run("merge", DCP, tmp_path / "a/b/c", "-q").code == 0
    assert tensors(tmp_path / "a/b/c") == tensors(EXPECTED)


def test_a_failed_merge_takes_the_parents_it_made_away_again(tmp_path: Path) -> None:
    source = shutil.copytree(DCP, tmp_path / "ckpt")
    flip(source / "__0_0.distcp")
    (tmp_path / "a").mkdir()
    assert_refused(run("merge", source, tmp_path / "a/b/c"), 4)
    assert list((tmp_path / "a").iterdir()) == []


def test_an_empty_destination_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run("merge", DCP, tmp_path / "out").code == 0
    assert tensors(tmp_path / "out") == tensors(EXPECTED)


def test_a_destination_that_is_a_file_is_refused(tmp_path: Path, sandbox: Sandbox) -> None:
    (tmp_path / "out").write_text("mine")
    for options in ([], ["--overwrite"], ["--resume"]):
        assert_refused(sandbox.run("merge", DCP, tmp_path / "out", *options), 5)
        assert (tmp_path / "out").read_text() == "mine"
    assert_refused(run("merge", DCP, tmp_path / "out/below"), 2, 5)
    assert leftovers(tmp_path) == []


def test_a_destination_that_is_the_source_or_around_it_is_refused(tmp_path: Path, sandbox: Sandbox) -> None:
    source = shutil.copytree(DCP, tmp_path / "runs/run/pytorch_model_fsdp_0")
    (tmp_path / "link").symlink_to(source)
    before = snapshot(tmp_path)
    for out in (source, f"{source}/", source.parent, source.parents[1], f"{source}/../../run", tmp_path / "link"):
        for options in ([], ["--overwrite"], ["--resume"], ["--overwrite", "--remove-source"]):
            assert_refused(sandbox.run("merge", source, out, *options), 2, 5)
            assert snapshot(tmp_path) == before, (out, options)


def test_a_destination_within_the_source_leaves_the_source_alone(tmp_path: Path) -> None:
    source = shutil.copytree(ACCELERATE, tmp_path / "ckpt", ignore=shutil.ignore_patterns("expected*"))
    before = snapshot(source / "pytorch_model_fsdp_0")
    result = run("merge", source, source / "merged")
    if result.code:
        assert_refused(result, 2)
        assert not (source / "merged").exists()
    else:
        assert tensors(source / "merged") == tensors(EXPECTED)
    assert snapshot(source / "pytorch_model_fsdp_0") == before
    result = run("merge", source, source / "pytorch_model_fsdp_0/merged", "--remove-source")
    assert_refused(result, 2)
    assert snapshot(source / "pytorch_model_fsdp_0") == before


def test_a_destination_that_is_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    assert run("merge", DCP, tmp_path / "out").code == 0
    assert (tmp_path / "out").is_symlink()
    assert tensors(tmp_path / "disk") == tensors(EXPECTED)
    assert run("merge", DCP, tmp_path / "out", "--overwrite", "--dtype", "bfloat16").code == 0
    assert (tmp_path / "out").is_symlink()
    assert tensors(tmp_path / "disk")["embed.weight"][0] == "BF16"
    assert leftovers(tmp_path) == []


def test_a_foreign_file_survives_overwrite(tmp_path: Path, sandbox: Sandbox) -> None:
    out = tmp_path / "out"
    for name in ("thesis.tex", ".git", "optimizer.bin", "notes", "model.safetensors.bak"):
        assert sandbox.run("merge", DCP, out).code == 0
        (out / name).mkdir() if name == ".git" else (out / name).write_text("mine")
        before = snapshot(out)
        result = sandbox.run("merge", DCP, out, "--overwrite")
        assert_refused(result, 5)
        assert name in result.err
        assert snapshot(out) == before
        shutil.rmtree(out)


def test_overwrite_replaces_all_of_the_old(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("merge", DCP, out, "--max-shard-size", "1KB").code == 0
    (out / "config.json").write_text("{}")
    assert len(list(out.iterdir())) > 5
    result = run("merge", DCP, out, "--overwrite")
    assert result.code == 0, result.err
    assert [entry.name for entry in out.iterdir()] == ["model.safetensors"]
    assert tensors(out) == tensors(EXPECTED)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_modes_follow_the_umask(umask: int, tmp_path: Path) -> None:
    source = shutil.copytree(DCP, tmp_path / "ckpt")
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer.json").chmod(0o600)
    out = tmp_path / "made/out"
    options = ["--format", "bin"] if umask == 0o077 else ["--max-shard-size", "2KB"]
    assert run("merge", source, out, *options, umask=umask).code == 0
    for path in [out.parent, out, *out.iterdir()]:
        full = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == full & ~umask, path


def test_a_dry_run_touches_nothing(tmp_path: Path, sandbox: Sandbox) -> None:
    work = tmp_path / "work"
    work.mkdir()
    source = shutil.copytree(DCP, work / "ckpt")
    (work / "out").mkdir()
    (work / "out/model.safetensors").write_bytes(b"old")
    before = snapshot(work)
    for out, options in ((work / "new/out", []), (work / "out", ["--overwrite"]), (work / "x", ["--remove-source"])):
        result = sandbox.run("merge", source, out, "--dry-run", *options)
        assert result.code == 0, result.err
        assert "would write 16 tensors" in result.out
        assert snapshot(work) == before
    assert_refused(sandbox.run("merge", source, work / "out", "--dry-run"), 5)
    assert snapshot(work) == before


def test_the_source_is_never_touched(tmp_path: Path, sandbox: Sandbox) -> None:
    source = shutil.copytree(ACCELERATE, tmp_path / "ckpt")
    before = snapshot(source)
    for number, options in enumerate(([], ["--format", "bin"], ["--dtype", "float16"], ["--max-shard-size", "1KB"])):
        assert sandbox.run("merge", source, tmp_path / f"out{number}", *options).code == 0
    assert sandbox.run("inspect", source, "--objects", "--shards").code == 0
    assert snapshot(source) == before


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    if os.getuid() != 0:
        folder = tmp_path / "locked"
        folder.mkdir(mode=0o555)
        yield folder
        return
    folder = tmp_path / "mount"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(folder)], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"root may write anywhere, and no file system can be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_destination_that_cannot_be_written(read_only: Path, tmp_path: Path) -> None:
    result = run("merge", DCP, read_only / "out")
    assert_refused(result, 2, 5, 6)  # it is no bug of ours, which 70 would say
    assert str(read_only) in result.err
    result = run("merge", DCP, "/proc/out")
    assert_refused(result, 2, 5, 6)
    assert run("merge", DCP, read_only / "out", "--dry-run").code in (0, 2, 5, 6)
    source = shutil.copytree(DCP, tmp_path / "ckpt")
    assert run("inspect", source).code == 0


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_source_that_cannot_be_read(tmp_path: Path) -> None:
    for name in (".metadata", "__0_0.distcp"):
        source = shutil.copytree(DCP, tmp_path / name)
        (source / name).chmod(0)
        result = run("merge", source, tmp_path / "out")
        assert_refused(result, 3, 4)
        assert name in result.err
        assert not (tmp_path / "out").exists()


def test_a_reader_sees_the_old_or_the_new(tmp_path: Path) -> None:
    """While --overwrite runs again and again, somebody else always finds a whole model."""
    out = tmp_path / "out"
    assert run("merge", DCP, out, "-q").code == 0
    loop = f'for n in 1 2 3 4; do "{TOOL}" merge "{DCP}" "{out}" --overwrite --no-fsync -q || exit 1; done'
    with subprocess.Popen(["bash", "-c", loop], env=environment(), stdout=subprocess.DEVNULL) as writer:
        expected, inodes, looks = tensors(EXPECTED), set(), 0
        while writer.poll() is None:
            with open(out / "model.safetensors", "rb") as file:
                inodes.add(os.fstat(file.fileno()).st_ino)
            # By its path: a listing of the folder that is just being replaced may come out empty.
            assert tensors(out / "model.safetensors") == expected
            looks += 1
    assert writer.returncode == 0
    assert len(inodes) >= 3
    assert looks >= 10
