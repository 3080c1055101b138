"""Pull from a hub that speaks huggingface_hub's protocol: all that is there, verified, or nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fsdp_ckpt import pull
from fsdp_ckpt.cli.app import app
from fsdp_ckpt.errors import ChecksumMismatch, DestinationExists, NotEnoughSpace, PathOutside, Unreachable, UsageError
from fsdp_ckpt.run.progress import Progress
from tests.cli.tool import flip, leftovers, strict_json
from tests.remote.hub_server import TOKEN, Hub, use_hub

FIXTURES = Path(__file__).parents[2] / "fixtures"
TRAINER = FIXTURES / "frameworks/trainer/checkpoint-2"
NEMO = FIXTURES / "frameworks/nemo_automodel/epoch_0_step_2"
DCP = FIXTURES / "torch-2.13.0/fsdp2_sharded_w2/pytorch_model_fsdp_0"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", page_size=3) as running:
        use_hub(running, monkeypatch, tmp_path / "home")
        yield running


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def files_of(folder: Path, prefix: str = "") -> dict[str, bytes | Path]:
    return {prefix + str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_everything_comes_as_it_is(hub: Hub, place: Path) -> None:
    more: dict[str, bytes | Path] = {"README.md": b"# card\n", ".gitattributes": b"*.bin filter=lfs", "empty": b""}
    hub.add_repo("owner/model", files_of(TRAINER) | more, private=True)
    events: list[Progress] = []
    report = pull("hf://owner/model", place / "deep/er/out", listener=events.append)
    assert contents(place / "deep/er/out") == contents(TRAINER) | {"README.md": b"# card\n", "empty": b""}
    assert (report.commit, report.checked) == (hub.repos["owner/model"].branches["main"], "headers")
    assert report.num_bytes == sum(map(len, contents(place / "deep/er/out").values()))
    assert (events[-1].done_bytes, events[-1].total_bytes) == (report.num_bytes, report.num_bytes)
    assert leftovers(place / "deep/er") == []
    assert not any(one.authorized for one in hub.of("cdn"))
    assert (place / "deep/er/out/model.safetensors").stat().st_mode & 0o777 == 0o666 & ~_umask(place)


def _umask(place: Path) -> int:
    (place / "probe").touch(0o666)
    mode = (place / "probe").stat().st_mode & 0o777
    (place / "probe").unlink()
    return 0o666 & ~mode


def test_names_with_dots_in_front_stay(hub: Hub, place: Path) -> None:
    hub.add_repo("owner/runs", files_of(NEMO, "nemo/") | files_of(DCP, "dcp/"), kind="dataset")
    pull("hf://datasets/owner/runs/nemo", place / "nemo")
    pull("hf://datasets/owner/runs/dcp", place / "dcp", deep=True)
    assert contents(place / "nemo") == contents(NEMO)
    assert contents(place / "dcp") == contents(DCP)
    assert any(name.startswith(".") for name in [*contents(NEMO), *contents(DCP)])


def test_a_revision_is_one_commit_even_while_the_branch_moves(hub: Hub, place: Path) -> None:
    repo = hub.add_repo("owner/model", files_of(TRAINER))
    first = repo.branches["main"]
    second = hub.add_commit(repo, {"config.json": b'{"second": 1}'})
    hub.add_commit(repo, {"config.json": b'{"side": 1}'}, branch="side")
    for number, (url, revision, expected) in enumerate(
        (
            ("hf://owner/model", None, b'{"second": 1}'),
            (f"hf://owner/model@{first}", None, (TRAINER / "config.json").read_bytes()),
            ("hf://owner/model", "side", b'{"side": 1}'),
            (f"hf://owner/model@{second}", second, b'{"second": 1}'),
        )
    ):
        pull(url, place / str(number), revision=revision)
        assert (place / str(number) / "config.json").read_bytes() == expected
    with pytest.raises(UsageError, match="the URL says"):
        pull("hf://owner/model@main", place / "x", revision="side")


def test_parts_and_patterns(hub: Hub, place: Path) -> None:
    big = place / "big.safetensors"
    shutil.copy(TRAINER / "model.safetensors", big)
    hub.add_repo("owner/run", files_of(TRAINER, "step-2/") | files_of(NEMO, "nemo/"))
    report = pull("hf://owner/run/step-2", place / "model", parts=["model"])
    wanted = {"config.json", "generation_config.json", "model.safetensors", "trainer_state.json"}
    assert set(contents(place / "model")) == wanted
    assert set(report.left_out) == {"step-2/optimizer.pt", "step-2/scheduler.pt"}
    pull("hf://owner/run/nemo", place / "optim", parts=["optimizer"])
    assert set(contents(place / "optim")) == {"optim/.metadata", "optim/__0_0.distcp", "optim/__1_0.distcp"}
    report = pull("hf://owner/run/step-2", place / "some", include=["*.json", "*.pt"], exclude=["optimizer*"])
    assert set(contents(place / "some")) == {
        "config.json",
        "generation_config.json",
        "scheduler.pt",
        "trainer_state.json",
    }
    assert report.checked is None
    pull("hf://owner/run/step-2/config.json", place / "one")
    assert contents(place / "one") == {"config.json": (TRAINER / "config.json").read_bytes()}
    with pytest.raises(UsageError, match="there is no part `ema`"):
        pull("hf://owner/run/step-2", place / "x", parts=["ema"])
    with pytest.raises(UsageError, match="none of them is wanted"):
        pull("hf://owner/run/step-2", place / "x", include=["*.gguf"])
    assert not (place / "x").exists()


def test_headers_are_all_that_choosing_a_part_costs(hub: Hub, place: Path) -> None:
    large = place / "large"
    with open(large, "wb") as file:
        file.truncate(30_000_000)
    hub.add_repo("owner/run", files_of(TRAINER) | {"extra.bin": large})
    report = pull("hf://owner/run", place / "out", parts=["model"])
    assert "extra.bin" in report.left_out
    assert hub.sent_bytes("cdn", "resolve") < 50_000


def test_a_dry_run_fetches_nothing(hub: Hub, place: Path) -> None:
    hub.add_repo("owner/model", files_of(TRAINER))
    report = pull("hf://owner/model", place / "out", dry_run=True)
    assert dict(report.files) == {name: len(data) for name, data in contents(TRAINER).items()}
    assert (list(place.iterdir()), hub.count("resolve", "cdn")) == ([], 0)


def test_destinations_that_are_in_the_way(hub: Hub, place: Path) -> None:
    hub.add_repo("owner/model", files_of(TRAINER))
    out = place / "out"
    out.mkdir()
    pull("hf://owner/model", out)  # an empty one is no obstacle
    with pytest.raises(DestinationExists, match="not empty"):
        pull("hf://owner/model", out)
    (out / "model-00009-of-00009.safetensors").write_bytes(b"old")
    pull("hf://owner/model", out, overwrite=True)
    assert contents(out) == contents(TRAINER)
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(DestinationExists, match=r"thesis\.tex"):
        pull("hf://owner/model", out, overwrite=True)
    (place / "file").touch()
    with pytest.raises(DestinationExists, match="not a folder"):
        pull("hf://owner/model", place / "file")
    with pytest.raises(UsageError, match="not a local folder"):
        pull("hf://owner/model", "s3://bucket/x")
    assert sorted(path.name for path in place.iterdir()) == ["file", "out"]


def test_a_disk_that_is_too_small_is_seen_before(hub: Hub, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo("owner/model", files_of(TRAINER))
    real = os.statvfs(place)

    class Small:
        f_bavail, f_frsize, f_files, f_favail = 1, 512, real.f_files, real.f_favail

    monkeypatch.setattr(os, "statvfs", lambda _path: Small)
    with pytest.raises(NotEnoughSpace):
        pull("hf://owner/model", place / "out")
    assert hub.count("resolve", "cdn") == 0


# -- what goes wrong


def test_faults_on_the_way_are_survived(hub: Hub, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    hub.add_repo("owner/model", files_of(TRAINER))
    hub.fail("info", status=500, times=2)
    hub.fail("tree", status=503, times=2)
    hub.fail("resolve", method="HEAD", status=429, retry_after_s=0, times=2)
    hub.fail("resolve", method="HEAD", drop_after_bytes=0, lose_answer=True)
    hub.fail("cdn", drop_after_bytes=1500, times=2)
    hub.fail("cdn", status=500, times=2)
    events: list[Progress] = []
    report = pull("hf://owner/model", place / "out", listener=events.append)
    assert contents(place / "out") == contents(TRAINER)
    assert all(fault.times == 0 for fault in hub.ledger.faults)
    assert events[-1].done_bytes == report.num_bytes
    assert sorted(event.done_bytes for event in events) == [event.done_bytes for event in events]


def test_content_that_changed_on_the_way_never_appears(hub: Hub, place: Path) -> None:
    hub.add_repo("owner/model", files_of(TRAINER))
    hub.fail("cdn", corrupt=True)
    pull("hf://owner/model", place / "out")  # the second time it came as it is
    assert contents(place / "out") == contents(TRAINER)
    oid = hashlib.sha256((TRAINER / "model.safetensors").read_bytes()).hexdigest()
    hub.fail("cdn", path=oid, corrupt=True, times=2)
    with pytest.raises(ChecksumMismatch, match=f"SHA-256.*the hub says {oid}"):
        pull("hf://owner/model", place / "other")
    assert not (place / "other").exists()
    hub.fail("resolve", method="GET", path="config.json", corrupt=True, times=9)
    with pytest.raises(ChecksumMismatch, match="git hash"):
        pull("hf://owner/model", place / "third")
    assert not (place / "third").exists()


def test_what_came_before_a_failure_is_not_fetched_again(hub: Hub, place: Path) -> None:
    hub.add_repo("owner/model", files_of(TRAINER))
    oid = hashlib.sha256((TRAINER / "optimizer.pt").read_bytes()).hexdigest()
    hub.fail("cdn", path=oid, status=500, delay_s=0.2, times=1000)  # the others come meanwhile
    with pytest.raises(Unreachable, match="500") as caught:
        pull("hf://owner/model", place / "out")
    assert "the same command goes on" in (caught.value.hint or "")
    assert not (place / "out").exists()
    assert len(leftovers(place)) == 1
    hub.forget()
    report = pull("hf://owner/model", place / "out")
    assert contents(place / "out") == contents(TRAINER)
    assert leftovers(place) == []
    assert hub.count("cdn", method="GET") == len(contents(TRAINER)) - len(report.kept) - _small(
        report.files, report.kept
    )
    assert len(report.kept) >= 3
    fetched = set(report.files) - set(report.kept)
    assert hub.sent_bytes("cdn", "resolve") == sum(report.files[name] for name in fetched)


def _small(files: object, kept: object) -> int:
    """Return how many files that were fetched are no large objects: those do not come from the CDN."""
    assert isinstance(files, dict)
    assert isinstance(kept, dict)
    return sum(name.endswith(".json") for name in files if name not in kept)


def test_a_failure_before_anything_came_leaves_nothing(hub: Hub, place: Path) -> None:
    hub.add_repo("owner/model", files_of(TRAINER))
    hub.fail("resolve", status=403, times=1000)
    with pytest.raises(Unreachable, match="access is denied"):
        pull("hf://owner/model", place / "a/b/out")
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil", "a//b", "./a", "..", "a\0b"])
def test_names_that_lead_out_are_refused(hub: Hub, place: Path, name: str) -> None:
    repo = hub.add_repo("owner/model", files_of(TRAINER))
    commit = repo.commits[repo.branches["main"]]
    repo.commit("main", {**commit.files, name: commit.files["config.json"]}, "evil")
    with pytest.raises(PathOutside):
        pull("hf://owner/model", place / "out")
    assert list(place.iterdir()) == []


def test_names_of_our_own_unfinished_files_are_left_out(hub: Hub, place: Path) -> None:
    odd: dict[str, bytes | Path] = {
        ".fsdp-ckpt-lock": b"x", "sub/.fsdp-ckpt-publish": b"x", ".config.json.done": b"x",
        ".out.fsdp-ckpt-00/x": b"x", ".arriving/x": b"x",
    }  # fmt: skip
    stays: dict[str, bytes | Path] = {"a.part": b"p", "sub/b.part": b"p", ".cache/huggingface/x": b"c"}
    hub.add_repo("owner/model", files_of(TRAINER) | odd | stays)
    report = pull("hf://owner/model", place / "out")
    assert set(report.left_out) == set(odd)
    assert contents(place / "out") == contents(TRAINER) | stays


def test_faults_of_the_checkpoint_itself_are_told_and_it_stays(hub: Hub, place: Path) -> None:
    broken = place / "broken"
    shutil.copytree(DCP, broken)
    (broken / "__1_0.distcp").unlink()
    hub.add_repo("owner/broken", files_of(broken))
    done = command("pull", "hf://owner/broken", place / "out")
    assert (done.exit_code, "as it is on the hub: __1_0.distcp" in done.stderr) == (4, True)
    assert contents(place / "out") == contents(broken)
    flipped = place / "flipped"
    shutil.copytree(DCP, flipped)
    flip(flipped / "__0_0.distcp")
    hub.add_repo("owner/flipped", files_of(flipped))
    assert command("pull", "hf://owner/flipped", place / "headers").exit_code == 0
    deep = command("pull", "hf://owner/flipped", place / "deep", "--deep", "--json")
    assert deep.exit_code == 4
    report = strict_json(deep.stdout)
    assert (report["schema"], report["checked"]) == ("fsdp-ckpt/pull/1", "deep")
    assert report["findings"][0]["name"] == "wrong-checksum"
    assert str(place / "deep") in report["findings"][0]["next"]
    hub.add_repo("owner/text", {"notes.txt": b"nothing"})
    assert "not a checkpoint" in command("pull", "hf://owner/text", place / "text").stderr


def test_errors_say_what_to_do(hub: Hub, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo("owner/model", files_of(TRAINER))
    hub.add_repo("owner/gated", files_of(TRAINER), gated=True)
    hub.add_repo("owner/secret", files_of(TRAINER), private=True)
    hub.add_repo("owner/empty")

    def error(url: str) -> str:
        with pytest.raises(Unreachable) as caught:
            pull(url, place / "out")
        assert caught.value.exit_code == 7
        assert list(place.iterdir()) == []
        return f"{caught.value.message} / {caught.value.hint}"

    assert "no such repository, or it is private" in error("hf://owner/typo")
    assert "no such revision" in error("hf://owner/model@typo")
    assert "no file or folder `typo`" in error("hf://owner/model/typo")
    assert "is empty" in error("hf://owner/empty")
    assert "gated: its owner has to grant access" in error("hf://owner/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    assert "does not accept your token" in error("hf://owner/model")
    monkeypatch.delenv("HF_TOKEN")
    assert "hf auth login" in error("hf://owner/secret")
    hub.fail("info", status=429, times=100)
    assert "too many requests" in error("hf://owner/model")
    hub.forget()
    hub.fail("resolve", status=502, times=1000)
    assert "error 502" in error("hf://owner/model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in error("hf://owner/model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in error("hf://owner/model")


def test_the_command_tells_no_secret(hub: Hub, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo("owner/model", files_of(TRAINER), private=True)
    hub.fail("cdn", status=503, times=1)
    done = command("pull", "hf://owner/model", place / "out")
    assert done.exit_code == 0
    hub.fail("cdn", status=503, times=1000)
    failed = command("pull", "hf://owner/model", place / "other")
    assert failed.exit_code == 7
    monkeypatch.setenv("FSDP_CKPT_DEBUG", "1")
    debugged = command("pull", "hf://owner/model", place / "other")
    assert "Traceback" in debugged.output
    for text in (done.output, failed.output, debugged.output):
        assert TOKEN not in text
        assert "Signature=secret" not in text
    hub.forget()
    quiet = command("pull", "hf://owner/model", place / "out", "--overwrite", "-q")
    assert quiet.stdout == f"{place / 'out'}\n"
