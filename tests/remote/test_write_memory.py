"""Results written to a store are those on a disk, and nobody ever takes half of one for the whole."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

import fsdp_ckpt
from fsdp_ckpt.errors import (
    CorruptCheckpoint,
    DestinationExists,
    FsdpCkptError,
    NotEnoughSpace,
    Unreachable,
    UsageError,
)
from fsdp_ckpt.ops.merge import merge_fsdp_weights
from fsdp_ckpt.ops.share import Share
from fsdp_ckpt.run.progress import Progress
from tests.remote.written import MemoryStore, contents, memory_store
from tests.unit.ops.saved_by_us import save_small

FIXTURES = Path(__file__).parents[2] / "fixtures"
ACCELERATE = FIXTURES / "torch-2.13.0/fsdp2_sharded_w2"
DCP = ACCELERATE / "pytorch_model_fsdp_0"
TRAINER = FIXTURES / "frameworks/trainer/checkpoint-2"
OTHER = FIXTURES / "torch-2.13.0/fsdp2_w4_mesh2x2"
HIDDEN = ".fsdp-ckpt-"

Write = Callable[..., Any]


def merge_many(src: Any, out: Any, **options: Any) -> Any:
    return fsdp_ckpt.merge(src, out, max_shard_size="1KB", **options)


def to_accelerate(src: Any, out: Any, **options: Any) -> Any:
    return fsdp_ckpt.convert(src, out, to="accelerate", world_size=3, **options)


def to_five(src: Any, out: Any, **options: Any) -> Any:
    return fsdp_ckpt.reshard(src, out, 5, **options)


WRITERS = pytest.mark.parametrize("write", [merge_many, fsdp_ckpt.merge, to_accelerate, to_five])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    with memory_store(monkeypatch) as made:
        yield made


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def _is_complete(url: str) -> bool:
    try:
        return fsdp_ckpt.inspect(url).complete
    except FsdpCkptError:
        return False


def on_disk(folder: Path) -> int:
    """Return the bytes that the files below a folder really take; those of mirrors take none."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


@WRITERS
@pytest.mark.parametrize("src", [ACCELERATE, OTHER])
def test_the_objects_are_the_files_of_a_local_run(write: Write, src: Path, store: MemoryStore, tmp_path: Path) -> None:
    local, remote = write(src, tmp_path / "out"), write(src, store.url())
    assert store.files() == contents(tmp_path / "out")
    assert remote.destination == store.url().removesuffix("/")
    assert remote.files == local.files
    assert fsdp_ckpt.validate(store.url(), level="deep").ok
    assert fsdp_ckpt.diff(store.url(), tmp_path / "out").is_equal


def test_from_one_store_to_another_place_in_it(store: MemoryStore, tmp_path: Path) -> None:
    src = store.upload(ACCELERATE, "src")
    report = to_accelerate(src, store.url())
    to_accelerate(ACCELERATE, tmp_path / "out")
    assert store.files() == contents(tmp_path / "out")
    assert (report.source, report.destination) == (src, store.url())
    assert store.files("src") == contents(ACCELERATE)
    report = merge_many(store.upload(TRAINER, "trainer"), store.url("merged"))
    merge_many(TRAINER, tmp_path / "merged")
    assert store.files("merged") == contents(tmp_path / "merged")
    assert "config.json" in report.side_files


def test_progress_counts_what_is_uploaded(store: MemoryStore) -> None:
    failed: list[str] = []

    def fail(verb: str, name: str) -> None:
        assert not events or events[-1].done_bytes == sum(map(len, large().values()))
        if name not in failed and name.endswith(".safetensors"):
            failed.append(name)
            raise ConnectionResetError(errno.ECONNRESET, "reset")

    def large() -> dict[str, bytes]:
        return {name: data for name, data in store.files().items() if name.endswith(".safetensors")}

    events: list[Progress] = []
    store.before = fail
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fsdp_ckpt.run.progress.time.monotonic", iter(range(1000)).__next__)
        merge_many(ACCELERATE, store.url(), listener=events.append, jobs=1)
    assert len(failed) == 6
    assert len(events) == 7  # the first one says that nothing is there
    assert events[-1].done_bytes == events[-1].total_bytes == sum(map(len, large().values()))


def test_a_name_of_a_file_is_taken_for_a_mistake(store: MemoryStore) -> None:
    with pytest.raises(UsageError, match="looks like a file") as caught:
        fsdp_ckpt.merge(ACCELERATE, store.url("model.safetensors"))
    assert caught.value.hint is not None
    assert caught.value.hint.endswith(store.url("model"))


@WRITERS
@pytest.mark.parametrize("overwrite", [False, True])
def test_at_no_step_a_reader_sees_a_whole_checkpoint(write: Write, overwrite: bool, store: MemoryStore) -> None:
    if overwrite:
        (to_accelerate if write in (to_accelerate, to_five) else merge_many)(OTHER, store.url())
        assert fsdp_ckpt.inspect(store.url()).complete
        store.calls.clear()
    seen: list[tuple[str, str]] = []

    def look(verb: str, name: str) -> None:
        if not store.calls:  # before the first change
            return
        seen.append((verb, name))
        assert not _is_complete(store.url()), (verb, name, store.calls)

    store.before = look
    write(ACCELERATE, store.url(), overwrite=overwrite)
    store.heal()
    assert len(seen) > 1
    assert fsdp_ckpt.inspect(store.url()).complete
    assert not any(HIDDEN in name for name in store.files())


def test_what_other_readers_go_by_comes_last_and_goes_first(store: MemoryStore, tmp_path: Path) -> None:
    merge_many(TRAINER, store.url())
    merge_many(TRAINER, tmp_path / "out")
    uploaded = [name.removeprefix("out/") for verb, name in store.calls if verb == "put"]
    assert uploaded[0].startswith(".saving.fsdp-ckpt-")
    assert uploaded[-2:] == ["config.json", "model.safetensors.index.json"]
    assert set(uploaded[1:]) == set(contents(tmp_path / "out"))


def test_torch_finds_no_metadata_before_everything_is_there(store: MemoryStore, tmp_path: Path) -> None:

    def torch_reads(verb: str, name: str) -> None:
        if verb == "put" and not name.endswith(".metadata") and store.calls:
            local = tmp_path / f"seen-{len(store.calls)}"
            local.mkdir()
            for path, content in store.files("c/pytorch_model_fsdp_0").items():
                (local / path).write_bytes(content)
            with pytest.raises(FileNotFoundError):
                FileSystemReader(local).read_metadata()

    store.before = torch_reads
    to_accelerate(ACCELERATE, store.url("c"))
    assert [name for verb, name in store.calls if verb == "put"][-1] == "c/pytorch_model_fsdp_0/.metadata"


def test_what_is_replaced_stops_being_complete_first(store: MemoryStore, tmp_path: Path) -> None:
    merge_many(TRAINER, store.url())
    store.calls.clear()
    fsdp_ckpt.merge(TRAINER, store.url(), overwrite=True)
    done = [(verb, name.removeprefix("out/")) for verb, name in store.calls]
    assert done[1:3] == [("rm", "model.safetensors.index.json"), ("rm", "config.json")]
    assert done[3] == ("put", "model.safetensors")
    assert [pair for pair in done if pair[0] == "put"][-1] == ("put", "config.json")
    stale = [number for number, (verb, name) in enumerate(done) if verb == "rm" and name.startswith("model-")]
    assert stale
    assert done.index(("put", "model.safetensors")) < min(stale)
    assert max(stale) < done.index(("put", "config.json"))
    fsdp_ckpt.merge(TRAINER, tmp_path / "one")
    assert store.files() == contents(tmp_path / "one")


@pytest.mark.parametrize("number", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("jobs", [1, 3])
def test_a_failure_for_good_leaves_nothing(number: int, jobs: int, store: MemoryStore, temporary: Path) -> None:
    puts: list[str] = []

    def fail(verb: str, name: str) -> None:
        if verb == "put":
            puts.append(name)
            if len(puts) >= number:
                raise PermissionError(errno.EACCES, "no")

    store.before = fail
    with pytest.raises(Unreachable, match="access is denied") as caught:
        merge_many(ACCELERATE, store.url(), jobs=jobs)
    assert caught.value.exit_code == 7
    assert store.url() in caught.value.message
    assert store.files() == {}
    assert on_disk(temporary) == 0


def test_what_fails_once_is_tried_again(store: MemoryStore, tmp_path: Path) -> None:
    failed: set[tuple[str, str]] = set()

    def fail(verb: str, name: str) -> None:
        if (verb, name) not in failed:
            failed.add((verb, name))
            raise ConnectionResetError(errno.ECONNRESET, "reset")

    store.before = fail
    merge_many(ACCELERATE, store.url())
    merge_many(ACCELERATE, tmp_path / "out")
    assert store.files() == contents(tmp_path / "out")
    assert len(failed) == len(store.calls)


def test_an_upload_that_came_short_is_made_again(store: MemoryStore, tmp_path: Path, monkeypatch: Any) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    info, short = MemoryFileSystem.info, ["model.safetensors", "model.safetensors"]

    def lie(self: Any, path: str, **options: Any) -> Any:
        found = info(self, path, **options)
        if short and path.endswith(short[-1]) and store.base.strip("/") in path:
            return {**found, "size": found["size"] - 1} if short.pop() else found
        return found

    monkeypatch.setattr(MemoryFileSystem, "info", lie)
    fsdp_ckpt.merge(ACCELERATE, store.url())
    assert [name for verb, name in store.calls if verb == "put"].count("out/model.safetensors") == 3


def test_a_damaged_source_leaves_what_is_there(store: MemoryStore, tmp_path: Path) -> None:
    fsdp_ckpt.merge(TRAINER, store.url())
    before = store.files()
    store.calls.clear()
    src = tmp_path / "src"
    for name, content in contents(DCP).items():
        src.mkdir(exist_ok=True)
        (src / name).write_bytes(
            content if name == ".metadata" else content[: len(content) // 2] + bytes(len(content) // 2)
        )
    with pytest.raises(CorruptCheckpoint):
        fsdp_ckpt.merge(src, store.url(), overwrite=True)
    assert store.calls == []
    assert store.files() == before


def test_only_as_many_files_as_workers_are_here(store: MemoryStore, temporary: Path) -> None:
    peaks: list[int] = []
    store.before = lambda _verb, _name: peaks.append(on_disk(temporary))
    report = merge_many(TRAINER, store.url(), jobs=2)
    sizes = sorted(-(-size // 4096) * 4096 for size in report.files.values())
    assert len(sizes) > 3
    small = sum(-(-len(content) // 4096) * 4096 for name, content in store.files().items() if name not in report.files)
    assert max(peaks) <= sum(sizes[-2:]) + small + 4096  # the mark
    assert on_disk(temporary) == 0


def test_the_space_that_is_asked_for_is_that_of_the_largest_files(
    store: MemoryStore, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsdp_ckpt.ops import preflight

    wanted: list[int] = []
    check = preflight.check_space

    def record(destination: Path, needed_bytes: int, *rest: Any, **options: Any) -> Any:
        wanted.append(needed_bytes)
        return check(destination, needed_bytes, *rest, **options)

    monkeypatch.setattr("fsdp_ckpt.ops.merge.check_space", record)
    report = merge_many(ACCELERATE, store.url(), jobs=3)
    assert wanted == [sum(sorted(report.files.values())[-3:])]
    monkeypatch.setattr("fsdp_ckpt.ops.merge.check_space", lambda destination, *_, **__: check(destination, 1 << 60, 1))
    with pytest.raises(NotEnoughSpace, match="on their way") as caught:
        merge_many(ACCELERATE, store.url("other"))
    assert store.url("other") in caught.value.message
    assert str(temporary) in caught.value.message
    assert caught.value.hint is not None
    assert "TMPDIR" in caught.value.hint
    assert store.files("other") == {}


def test_what_is_there_is_kept(store: MemoryStore) -> None:
    fsdp_ckpt.merge(ACCELERATE, store.url())
    before = store.files()
    store.calls.clear()
    with pytest.raises(DestinationExists, match="not empty") as caught:
        fsdp_ckpt.merge(ACCELERATE, store.url())
    assert caught.value.hint is not None
    assert f"{store.url()} --overwrite" in caught.value.hint
    with pytest.raises(DestinationExists, match="not empty"):  # nothing is unfinished here
        fsdp_ckpt.merge(ACCELERATE, store.url(), resume=True)
    store.put("out/notes.txt", b"mine")
    with pytest.raises(DestinationExists, match=r"notes\.txt"):
        fsdp_ckpt.merge(ACCELERATE, store.url(), overwrite=True)
    with pytest.raises(UsageError, match="the checkpoint itself"):
        to_accelerate(store.upload(DCP, "src"), store.url("src"), overwrite=True)
    store.put("file", b"x")
    with pytest.raises(DestinationExists, match="not a folder"):
        fsdp_ckpt.merge(ACCELERATE, store.url("file"), overwrite=True)
    assert store.calls == []
    assert store.files() == {**before, "notes.txt": b"mine"}


@pytest.mark.parametrize("write", [fsdp_ckpt.merge, to_accelerate, to_five])
def test_dry_run_touches_nothing(write: Write, store: MemoryStore, temporary: Path) -> None:
    report = write(ACCELERATE, store.url(), dry_run=True)
    assert report.dry_run
    assert report.destination == store.url()
    assert store.calls == []
    assert store.files() == {}
    assert on_disk(temporary) == 0


@pytest.mark.parametrize("write", [fsdp_ckpt.merge, to_accelerate, to_five])
def test_what_is_only_possible_on_a_disk_is_refused(write: Write, store: MemoryStore) -> None:
    for options, words in (({"remove_source": True}, "--remove-source"), ({"share": Share.parse("1/2")}, "share")):
        with pytest.raises(UsageError, match=words) as caught:
            write(ACCELERATE, store.url(), **options)
        assert caught.value.hint is not None
    assert store.calls == []


def test_one_share_of_one_is_all_of_it(store: MemoryStore, tmp_path: Path) -> None:
    merge_many(ACCELERATE, store.url(), share=Share.parse("1/1"))
    merge_many(ACCELERATE, tmp_path / "out")
    assert store.files() == contents(tmp_path / "out")


def test_accelerates_function_takes_urls(store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    merge_fsdp_weights(str(DCP), store.url())
    assert set(store.files()) == {"model.safetensors"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["ftp://host/out", "gs://bucket/out", "az://box/out", "memory://", "memory://a/../b"])
def test_no_local_folder_is_made_of_a_url(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("gcsfs", "adlfs"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    for write in (fsdp_ckpt.merge, to_accelerate, to_five):
        with pytest.raises(UsageError) as caught:
            write(ACCELERATE, url)
        assert url in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_resume_takes_up_what_an_interrupted_run_left(store: MemoryStore, tmp_path: Path, temporary: Path) -> None:
    def fail(verb: str, name: str) -> None:
        if verb == "put" and "00005" in name:
            raise PermissionError(errno.EACCES, "no")

    store.before = fail
    with pytest.raises(Unreachable):
        merge_many(ACCELERATE, store.url(), resume=True, jobs=1)
    kept = store.files()
    assert {name for name in kept if HIDDEN not in name} == {f"model-0000{n}-of-00006.safetensors" for n in range(1, 5)}
    assert on_disk(temporary) == 0
    assert not _is_complete(store.url())
    with pytest.raises(DestinationExists, match="interrupted") as caught:
        merge_many(ACCELERATE, store.url())
    assert caught.value.hint is not None
    assert "--resume" in caught.value.hint
    store.heal()
    merge_many(ACCELERATE, store.url(), resume=True, jobs=1)
    uploaded = [name for verb, name in store.calls if verb == "put" and name.startswith("out/model-")]
    assert uploaded == [f"out/model-0000{n}-of-00006.safetensors" for n in (5, 6)]
    merge_many(ACCELERATE, tmp_path / "out")
    assert store.files() == contents(tmp_path / "out")


def test_notes_of_another_result_are_not_taken_for_this_one(store: MemoryStore, tmp_path: Path) -> None:
    def fail(verb: str, name: str) -> None:
        if verb == "put" and "00003" in name:
            raise PermissionError(errno.EACCES, "no")

    store.before = fail
    for dtype in ("float16", "bfloat16"):  # of the same sizes
        with pytest.raises(Unreachable):
            merge_many(ACCELERATE, store.url(), resume=True, jobs=1, dtype=dtype)
    store.heal()
    merge_many(ACCELERATE, store.url(), resume=True, dtype="float16")
    merge_many(ACCELERATE, tmp_path / "out", dtype="float16")
    assert store.files() == contents(tmp_path / "out")


def test_another_writer_is_noticed_and_its_objects_are_left(store: MemoryStore) -> None:
    def write_too(verb: str, name: str) -> None:
        if name.endswith("model-00003-of-00006.safetensors"):
            store.put("out/theirs.bin", b"theirs")

    store.before = write_too
    with pytest.raises(DestinationExists, match=r"theirs\.bin"):
        merge_many(ACCELERATE, store.url())
    assert store.files() == {"theirs.bin": b"theirs"}


def test_ctrl_c_leaves_nothing(store: MemoryStore, temporary: Path) -> None:
    for number in (2, 7):
        puts: list[str] = []

        def press(verb: str, name: str, puts: list[str] = puts, number: int = number) -> None:
            if verb == "put":
                puts.append(name)
                if len(puts) == number:
                    raise KeyboardInterrupt

        store.before = press
        with pytest.raises(KeyboardInterrupt):
            merge_many(ACCELERATE, store.url())
        assert store.files() == {}
        assert on_disk(temporary) == 0


@pytest.mark.parametrize("combines", [True, False])
def test_the_manifest_of_a_save_is_made_anew_and_comes_last(
    combines: bool, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not combines:  # as where there is no library that combines checksums: the files are gone by then
        monkeypatch.setattr("fsdp_ckpt.run.checksum._combine", None)
    src = save_small(tmp_path / "src")
    fsdp_ckpt.reshard(src, tmp_path / "out", 3)
    fsdp_ckpt.reshard(src, store.url(), 3)
    assert store.files() == contents(tmp_path / "out")
    assert [name for verb, name in store.calls if verb == "put"][-1] == "out/fsdp_ckpt.json"
    assert fsdp_ckpt.validate(store.url(), level="deep").ok


def test_odd_names_arrive_as_they_are(store: MemoryStore) -> None:
    name = "w t/run_lr=[1e-3, 2e-3]_é*/epoch=0-step=10.ckpt"
    report = to_accelerate(ACCELERATE, store.url(name))
    assert report.destination == store.url(name)
    assert "pytorch_model_fsdp_0/.metadata" in store.files(name)
    assert fsdp_ckpt.inspect(store.url(name)).complete
