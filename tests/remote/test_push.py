"""Push to a hub that speaks huggingface_hub's protocol: what arrives is what lies on the disk, or nothing does."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fsdp_ckpt import push
from fsdp_ckpt.cli.app import app
from fsdp_ckpt.errors import CorruptCheckpoint, DestinationExists, IncompleteCheckpoint, Unreachable, UsageError
from fsdp_ckpt.ops.sharing import upload
from fsdp_ckpt.run.progress import Progress
from tests.cli.tool import flip, strict_json
from tests.remote.hub_repos import Storage
from tests.remote.hub_server import TOKEN, Hub, use_hub

FIXTURES = Path(__file__).parents[2] / "fixtures"
TRAINER = FIXTURES / "frameworks/trainer/checkpoint-2"
DCP = FIXTURES / "torch-2.13.0/fsdp2_sharded_w2/pytorch_model_fsdp_0"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", multipart_bytes=10_000) as running:
        use_hub(running, monkeypatch, tmp_path / "home")
        yield running


def contents(folder: Path, prefix: str = "") -> dict[str, bytes]:
    return {prefix + str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_card(files: dict[str, bytes]) -> dict[str, bytes]:
    return {path: content for path, content in files.items() if path not in {"README.md", ".gitattributes"}}


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_a_new_repository_is_private_and_gets_everything_in_one_commit(hub: Hub) -> None:
    events: list[Progress] = []
    report = push(TRAINER, "hf://owner/new", listener=events.append)
    repo = hub.repos["owner/new"]
    assert repo.private
    assert report.private
    assert report.created
    assert without_card(repo.files()) == contents(TRAINER)
    assert repo.messages() == ["initial commit", "Upload checkpoint, step 2 with fsdp-ckpt"]
    assert (report.commit, report.card) == (repo.branches["main"], True)
    assert report.commit_url == f"{hub.endpoint}/owner/new/commit/{report.commit}"
    assert report.num_bytes == sum(map(len, repo.files().values()))
    assert (events[-1].done_bytes, events[-1].total_bytes) == (report.num_bytes, report.num_bytes)
    assert not any(one.authorized for one in hub.of("upload", "part"))


def test_what_is_there_already_is_not_sent_again(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(TRAINER, folder)
    push(folder, "hf://owner/new")
    hub.forget()
    again = push(folder, "hf://owner/new")
    assert (again.commit, dict(again.files), hub.received_bytes()) == (
        None,
        {},
        hub.received_bytes("paths-info", "create"),
    )
    assert set(again.skipped) == set(contents(folder))
    (folder / "config.json").write_text("{}")
    third = push(folder, "hf://owner/new", message="only the config")
    assert dict(third.files) == {"config.json": 2}
    assert hub.count("upload", "part") == 0
    assert hub.repos["owner/new"].files()["config.json"] == b"{}"


def test_places_branches_and_kinds(hub: Hub) -> None:
    push(DCP, "hf://datasets/owner/runs@side/step-7", public=True)
    repo = hub.repos["datasets/owner/runs"]
    assert not repo.private
    assert without_card(repo.files("side")) == contents(DCP, "step-7/")
    assert without_card(repo.files("main")) == {}
    push(DCP, "hf://datasets/owner/runs", revision="side", path_in_repo="step-8")
    assert set(without_card(repo.files("side"))) == {*contents(DCP, "step-7/"), *contents(DCP, "step-8/")}
    push(TRAINER / "model.safetensors", "hf://owner/one")
    assert set(without_card(hub.repos["owner/one"].files())) == {"model.safetensors"}


def test_pull_requests_need_no_right_to_write(hub: Hub) -> None:
    repo = hub.add_repo("other/model", {"README.md": b"# theirs"}, read_only=True)
    with pytest.raises(Unreachable, match="access is denied"):
        push(DCP, "hf://other/model")
    report = push(DCP, "hf://other/model", create_pr=True)
    assert report.pull_request == f"{hub.endpoint}/other/model/discussions/1"
    assert report.url == "hf://other/model@refs/pr/1"
    assert repo.files("refs/pr/1") == {**contents(DCP), "README.md": b"# theirs"}
    assert repo.files() == {"README.md": b"# theirs"}
    assert not report.card
    with pytest.raises(UsageError, match="default branch"):
        push(DCP, "hf://other/model@side", create_pr=True)


def test_only_parts_that_were_chosen_go(hub: Hub) -> None:
    push(TRAINER, "hf://owner/new", parts=["model"], card=False)
    wanted = {"config.json", "generation_config.json", "model.safetensors", "trainer_state.json"}
    assert set(hub.repos["owner/new"].files()) == wanted
    push(TRAINER, "hf://owner/new", parts=["optimizer"])
    assert set(without_card(hub.repos["owner/new"].files())) == wanted | {"optimizer.pt"}


def test_a_damaged_checkpoint_is_refused_before_the_hub_is_asked(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(DCP, folder)
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(CorruptCheckpoint, match="__1_0") as caught:
        push(folder, "hf://owner/new")
    assert caught.value.exit_code == 4
    assert "--no-validate" in (caught.value.hint or "")
    assert hub.requests == []
    push(folder, "hf://owner/new", validate=False)
    assert without_card(hub.repos["owner/new"].files()) == contents(folder)


def test_bytes_that_only_a_deep_look_finds_do_not_stop_a_push(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "flipped"
    shutil.copytree(DCP, folder)
    flip(folder / "__0_0.distcp")
    push(folder, "hf://owner/new")
    assert without_card(hub.repos["owner/new"].files()) == contents(folder)


def test_weights_of_another_checkpoint_do_not_stay_beside_these(hub: Hub) -> None:
    old = {
        "model-00001-of-00002.safetensors": b"\0old", "model.safetensors.index.json": b"{}", "notes.txt": b"mine",
        "sub/x.safetensors": b"\0x", "flax_model.msgpack": b"\0",
    }  # fmt: skip
    repo = hub.add_repo("owner/model", old)
    with pytest.raises(DestinationExists, match="another checkpoint") as caught:
        push(TRAINER, "hf://owner/model")
    assert "--replace" in (caught.value.hint or "")
    assert repo.files() == dict(sorted(old.items()))
    report = push(TRAINER, "hf://owner/model", replace=True)
    assert sorted(report.removed) == ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    kept = {path: old[path] for path in ("sub/x.safetensors", "notes.txt", "flax_model.msgpack")}
    assert without_card(repo.files()) == contents(TRAINER) | kept
    assert len(repo.commits) == 2


def test_visibility_that_is_not_as_asked_is_told(hub: Hub) -> None:
    hub.add_repo("owner/open")
    hub.add_repo("owner/closed", private=True)
    assert any("is public: everybody" in note for note in push(DCP, "hf://owner/open").notes)
    assert any("is private" in note for note in push(DCP, "hf://owner/closed", public=True).notes)
    assert hub.repos["owner/closed"].private


def test_a_dry_run_changes_nothing(hub: Hub) -> None:
    report = push(TRAINER, "hf://owner/new@side/x", dry_run=True)
    assert (report.dry_run, report.created, report.commit) == (True, True, None)
    assert dict(report.files).keys() == contents(TRAINER, "x/").keys() | {"README.md"}
    assert hub.repos == {}
    hub.add_repo("owner/there", {"x/config.json": (TRAINER / "config.json").read_bytes()})
    hub.forget()
    report = push(TRAINER, "hf://owner/there@side/x", dry_run=True)
    assert set(report.skipped) == {"x/config.json"}
    assert {one.method for one in hub.of()} == {"GET", "POST"}
    assert {one.route for one in hub.of(method="POST")} == {"paths-info"}


def test_more_files_than_a_commit_holds_become_a_checkpoint_with_the_last(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "MANY_FILES", 2)
    repo = hub.add_repo("owner/model", {".metadata": b"\0another save's"})
    push(DCP, "hf://owner/model", card=False)
    states = [set(commit.files) for commit in repo.commits.values()]
    assert states == [{".metadata"}, {"__0_0.distcp", "__1_0.distcp"}, {".metadata", "__0_0.distcp", "__1_0.distcp"}]
    assert repo.files() == contents(DCP)
    report = push(TRAINER, "hf://owner/model", create_pr=True, path_in_repo="t")
    assert without_card(repo.files("refs/pr/1")) == contents(DCP) | contents(TRAINER, "t/")
    assert report.url == "hf://owner/model@refs/pr/1/t"
    assert "refs/pr/2" not in repo.branches


# -- what goes wrong


@pytest.mark.parametrize(
    ("route", "status"),
    [
        ("info", 503), ("create", 500), ("preupload", 429), ("batch", 503), ("upload", 500), ("part", 429),
        ("complete", 502), ("verify", 504), ("commit", 503),
    ],
)  # fmt: skip
def test_errors_that_pass_are_tried_again(hub: Hub, route: str, status: int) -> None:
    hub.fail(route, status=status, times=2, retry_after_s=0)
    push(DCP, "hf://owner/new")
    assert without_card(hub.repos["owner/new"].files()) == contents(DCP)
    statuses = [one.status for one in hub.of(route)]
    assert (statuses.count(status), len(statuses) >= 3) == (2, True)


@pytest.mark.parametrize("route", ["upload", "part", "commit", "preupload"])
def test_connections_that_break_are_made_again(hub: Hub, route: str) -> None:
    hub.fail(route, drop_after_bytes=50)
    push(DCP, "hf://owner/new")
    assert without_card(hub.repos["owner/new"].files()) == contents(DCP)


def test_a_commit_whose_answer_is_lost_is_made_once(hub: Hub) -> None:
    hub.fail("commit", lose_answer=True)
    report = push(DCP, "hf://owner/new")
    repo = hub.repos["owner/new"]
    assert len(repo.commits) == 2
    assert report.commit == repo.branches["main"]
    hub.fail("commit", lose_answer=True)
    with pytest.raises(Unreachable):
        push(DCP, "hf://owner/new", path_in_repo="x", create_pr=True)
    assert [name for name in repo.branches if name.startswith("refs/pr/")] == ["refs/pr/1"]


def test_a_push_that_fails_shows_nothing_and_the_next_sends_only_the_rest(hub: Hub) -> None:
    hub.add_repo("owner/model")
    oid = hashlib.sha256((DCP / "__1_0.distcp").read_bytes()).hexdigest()
    hub.fail("part", path=oid, status=500, times=1000)
    with pytest.raises(Unreachable, match="500"):
        push(DCP, "hf://owner/model")
    assert hub.repos["owner/model"].files() == {}
    hub.forget()
    push(DCP, "hf://owner/model")
    assert without_card(hub.repos["owner/model"].files()) == contents(DCP)
    assert hub.received_bytes("part") == (DCP / "__1_0.distcp").stat().st_size


def test_files_that_the_hub_leaves_out_are_missed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Storage.blob_of

    def forgetful(self: Storage, sha256: str) -> object:
        blob = real(self, sha256)
        assert blob is not None
        return blob if blob.num_bytes > 26_300 else self.add("x", b"other")

    monkeypatch.setattr(Storage, "blob_of", forgetful)
    with pytest.raises(IncompleteCheckpoint, match=r"did not take 2 of 4 files, such as `\.metadata`"):
        push(DCP, "hf://owner/new")


def test_a_card_that_the_hub_refuses_is_named(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(TRAINER, folder)
    (folder / "README.md").write_text("---\ntags: [\n---\n# x\n")
    with pytest.raises(Unreachable, match=r"the hub does not take it: Invalid metadata in README\.md"):
        push(folder, "hf://owner/new")
    assert hub.repos["owner/new"].files() == {}


def test_errors_say_what_to_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for url, words in {
        "hf://other/new": "access is denied (You don't have the rights",
        "hf://owner/new@refs/pr/9": "no such revision",
    }.items():
        with pytest.raises(Unreachable) as caught:
            push(DCP, url)
        assert words in caught.value.message
        assert caught.value.exit_code == 7
    with pytest.raises(Unreachable, match="no such repository"):
        push(DCP, "hf://owner/typo", create_pr=True)
    commit = hub.repos["owner/new"].branches["main"]
    with pytest.raises(UsageError, match="is a commit"):
        push(DCP, f"hf://owner/new@{commit}")
    with pytest.raises(UsageError, match="not on a local disk"):
        push("s3://bucket/step-1", "hf://owner/new")
    hub.add_repo("owner/file", {"a": b"file"})
    with pytest.raises(UsageError, match="is a file"):
        push(DCP, "hf://owner/file/a")
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with pytest.raises(Unreachable, match="does not accept your token"):
        push(DCP, "hf://owner/new")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(Unreachable, match="not logged in"):
        push(DCP, "hf://owner/new")


def test_the_command_prints_data_to_stdout_and_no_secret_anywhere(hub: Hub) -> None:
    hub.fail("part", status=503, times=1)
    done = command("push", TRAINER, "hf://owner/new", "--json")
    assert (done.exit_code, hub.count("part") > 2) == (0, True)
    report = strict_json(done.stdout)
    assert report["schema"] == "fsdp-ckpt/push/1"
    assert report["files"] == {path: len(data) for path, data in hub.repos["owner/new"].files().items()}
    again = command("push", TRAINER, "hf://owner/new", "-q")
    assert again.stdout == "hf://owner/new\n"
    whole = done.output + again.output + hub.repos["owner/new"].files()["README.md"].decode()
    assert TOKEN not in whole
    assert "Signature" not in whole
    damaged = command("push", TRAINER, "hf://owner/new@side", "--part", "ema")
    assert (damaged.exit_code, "choose among: model" in damaged.output) == (2, True)
