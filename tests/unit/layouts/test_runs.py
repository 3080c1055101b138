from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt import latest_complete
from fsdp_ckpt.errors import CheckpointNotFound, UsageError
from fsdp_ckpt.layouts.runs import RunCheckpoint, Seen, own_values, read_run
from tests.unit.layouts.made_runs import DATA, DCP, FILES, HF, INDEX, MANIFEST, TITAN, change, flip, own, trainer


def only(folder: Path) -> RunCheckpoint:
    (found,) = read_run(folder).checkpoints
    return found


def test_a_checkpoint_of_ours_that_is_whole(tmp_path: Path) -> None:
    path = own(tmp_path, 70, {"loss": 0.5, "note": "x"})
    found = only(tmp_path)
    assert (found.step, found.path, found.state, found.why) == (70, path, "complete", "")
    assert (found.layout, found.is_own) == ("fsdp-ckpt", True)
    assert found.values == {"loss": 0.5, "note": "x"}
    assert found.num_bytes == sum(map(len, FILES.values())) + (path / MANIFEST).stat().st_size
    assert found.written_s == 1767323045  # 2026-01-02T03:04:05Z, by date -d


def _folder_for_file(path: Path) -> None:
    (path / DATA).unlink()
    (path / DATA).mkdir()


def _link_for_file(path: Path) -> None:
    (path / DATA).unlink()
    (path / DATA).symlink_to("/etc/passwd")


def _lists(file: str) -> Callable[[Path], None]:
    return lambda path: change(path, files={file: {"bytes": 1, "crc32": "0"}})


DAMAGE: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a file is gone": (lambda path: (path / DATA).unlink(), "incomplete", f"{DATA}: listed in the manifest"),
    "a folder is gone": (lambda path: shutil.rmtree(path / DATA.partition("/")[0]), "incomplete", DATA),
    "a file is cut off": (lambda path: os.truncate(path / DATA, 10), "incomplete", f"{DATA}: has 10 bytes"),
    "a file is longer": (lambda path: os.truncate(path / DATA, 1000), "incomplete", f"{DATA}: has 1000 bytes"),
    "a bit of the index": (lambda path: flip(path / INDEX), "damaged", f"{INDEX}: its CRC-32 is"),
    "an empty manifest": (lambda path: (path / MANIFEST).write_bytes(b""), "damaged", f"{MANIFEST}: broken"),
    "half a manifest": (lambda path: os.truncate(path / MANIFEST, 99), "damaged", f"{MANIFEST}: broken"),
    "a newer manifest": (lambda path: change(path, format="fsdp-ckpt/checkpoint/9"), "damaged", "checkpoint/9"),
    "a manifest of another kind": (lambda path: (path / MANIFEST).write_text("[]"), "damaged", MANIFEST),
    "deep nonsense": (lambda path: (path / MANIFEST).write_text("[" * 10**5), "damaged", MANIFEST),
    "a path out of it": (_lists("../../x"), "damaged", "leads out"),
    "an absolute path": (_lists("/etc/passwd"), "damaged", "leads out"),
    "a folder for a file": (_folder_for_file, "damaged", "no regular file"),
    "a link out of it": (_link_for_file, "damaged", "link out"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_wrong_with_one_of_ours_is_said(tmp_path: Path, name: str) -> None:
    act, state, why = DAMAGE[name]
    act(own(tmp_path, 5))
    found = only(tmp_path)
    assert found.state == state
    assert why in found.why
    assert found.is_own
    assert latest_complete(tmp_path) is None
    assert own_values(tmp_path, {}) == {}


def test_several_faults_are_counted(tmp_path: Path) -> None:
    path = own(tmp_path, 5)
    for file in FILES:
        (path / file).unlink()
    assert only(tmp_path).why.endswith("(and 2 more)")


def test_bits_of_data_are_not_looked_at(tmp_path: Path) -> None:
    flip(own(tmp_path, 5) / DATA)
    assert only(tmp_path).state == "complete"


@pytest.mark.parametrize("created", ["", "yesterday", "-1", "0001-01-01T00:00:00+14:00", "99999-01-01"])
def test_a_time_that_is_none_is_replaced_by_that_of_the_newest_file(tmp_path: Path, created: str) -> None:
    path = own(tmp_path, 5, created=created)
    for number, file in enumerate((*FILES, MANIFEST)):
        os.utime(path / file, (1_700_000_000 + number, 1_700_000_000 + number))
    found = only(tmp_path)
    assert found.state == "complete"
    assert found.written_s in (1_700_000_003, -62135647200.0)  # year 1 is a time, if an odd one


@pytest.fixture
def new_york() -> Iterator[None]:
    """Be five hours behind UTC."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "EST5")
        time.tzset()
        yield
    time.tzset()


def test_without_a_time_zone_it_is_utc(tmp_path: Path, new_york: None) -> None:
    own(tmp_path, 5, created="2026-01-02T03:04:05")
    assert only(tmp_path).written_s == 1767323045


def test_a_foreign_checkpoint_is_judged_by_its_own_rules(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "a/step-100")
    shutil.copytree(TITAN / "step-10", tmp_path / "b/step-200")
    shutil.copytree(HF / "hf", tmp_path / "c/checkpoint-300")
    trainer(tmp_path / "d", 400)
    found = [read_run(tmp_path / name).checkpoints[0] for name in "dcba"]
    assert [item.step for item in found] == [400, 300, 200, 100]
    assert [item.state for item in found] == ["complete"] * 4, [item.why for item in found]
    assert not any(item.is_own for item in found)
    assert all(item.layout for item in found)
    assert found[0].layout == "trainer"
    assert found[3].num_bytes == sum(path.stat().st_size for path in DCP.iterdir())
    assert found[3].written_s == max(path.stat().st_mtime for path in (tmp_path / "a/step-100").iterdir())


def test_weights_alone_are_not_the_newest_checkpoint_of_a_run_with_optimizers(tmp_path: Path) -> None:
    """Weights that were merged to there, or a checkpoint of another tool that was cut off between two files."""
    shutil.copytree(TITAN / "step-10", tmp_path / "step-10")
    shutil.copytree(HF / "hf", tmp_path / "step-20")
    own(tmp_path, 5)
    found = {item.step: item for item in read_run(tmp_path).checkpoints}
    assert [found[step].state for step in (5, 10, 20)] == ["complete", "complete", "model only"]
    assert "no optimizer" in found[20].why
    assert latest_complete(tmp_path) == tmp_path / "step-10"
    shutil.rmtree(tmp_path / "step-10")
    assert latest_complete(tmp_path) == tmp_path / "step-20", "where no other has one, that is how they are saved"


def test_a_foreign_save_that_was_cut_off(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        shutil.copytree(DCP, tmp_path / f"step-{step}")
    (tmp_path / "step-1" / ".metadata").unlink()
    (tmp_path / "step-2" / "__1_0.distcp").unlink()
    os.truncate(tmp_path / "step-3" / "__0_0.distcp", 100)
    os.truncate(tmp_path / "step-4" / ".metadata", 100)
    found = {item.step: item for item in read_run(tmp_path).checkpoints}
    assert [found[step].state for step in (1, 2, 3, 4)] == ["incomplete", "incomplete", "incomplete", "damaged"]
    for step, name in ((1, ".metadata"), (2, "__1_0.distcp"), (3, "__0_0.distcp"), (4, ".metadata")):
        assert name in found[step].why
    assert latest_complete(tmp_path) is None


def test_a_foreign_checkpoint_without_any_tensor(tmp_path: Path) -> None:
    shutil.rmtree(trainer(tmp_path, 5) / "pytorch_model_fsdp_0")
    found = only(tmp_path)
    assert (found.state, found.why, found.layout) == ("incomplete", "it holds no tensors", "trainer")
    assert latest_complete(tmp_path) is None


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pwned",)


def test_a_pickle_that_asks_for_code_is_damaged_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DCP, tmp_path / "run/step-1")
    (tmp_path / "run/step-1/.metadata").write_bytes(pickle.dumps(_Evil()))
    found = only(tmp_path / "run")
    assert found.state == "damaged"
    assert "mkdir" in found.why
    assert not (tmp_path / "pwned").exists()


def test_folders_in_which_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "notes.txt").write_text("mine")
    shutil.copytree(DCP, tmp_path / "epoch-3" / "step-7")
    found = {item.step: item for item in read_run(tmp_path).checkpoints}
    assert {item.state for item in found.values()} == {"incomplete"}
    assert {item.layout for item in found.values()} == {None}
    assert "empty" in found[1].why
    assert "notes.txt" in found[2].why
    assert "folder of a run" in found[3].why
    assert latest_complete(tmp_path) is None
    assert latest_complete(tmp_path / "epoch-3") == tmp_path / "epoch-3" / "step-7"


def test_what_the_trainer_logged_at_that_step(tmp_path: Path) -> None:
    trainer(
        tmp_path,
        20,
        {"step": 10, "eval_loss": 9.0, "old": 1},
        {"step": 20, "loss": 0.5},
        {"step": 20, "eval_loss": 0.25},
    )
    assert only(tmp_path).values == {"loss": 0.5, "eval_loss": 0.25}


@pytest.mark.parametrize("text", ["", "{", "[" * 10**5])
def test_a_trainer_state_that_is_no_json_is_damage(tmp_path: Path, text: str) -> None:
    (trainer(tmp_path, 20) / "trainer_state.json").write_text(text)
    assert only(tmp_path).state == "damaged"
    assert "trainer_state.json" in only(tmp_path).why


@pytest.mark.parametrize("text", ["[]", "{}", '{"global_step": 20, "log_history": [1, null]}', "null"])
def test_a_broken_trainer_state_has_no_values(tmp_path: Path, text: str) -> None:
    (trainer(tmp_path, 20) / "trainer_state.json").write_text(text)
    assert (only(tmp_path).state, only(tmp_path).values) == ("complete", {})


def test_order_is_by_number_and_twins_are_both_there(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        own(tmp_path, step)
    trainer(tmp_path, 10)
    own(tmp_path, 9, name="step-009")
    huge = "9" * 200
    own(tmp_path, int(huge))
    found = [(item.step, item.path.name) for item in read_run(tmp_path).checkpoints]
    assert found == [
        (int(huge), f"step-{huge}"), (100, "step-100"), (10, "step-10"), (10, "checkpoint-10"), (9, "step-9"),
        (9, "step-009"),
    ]  # fmt: skip


def test_names_that_are_no_checkpoints(tmp_path: Path) -> None:
    own(tmp_path, 1)
    for name in ("step-x", "step--5", "logs", ".step-3", "step-5.tmp", ".step-4.fsdp-ckpt-0123456789abcdef", "best"):
        own(tmp_path, 999, name=name)
    (tmp_path / "step-7").write_text("a file")
    (tmp_path / "step-8").symlink_to("step-8")
    (tmp_path / "step-9").symlink_to(tmp_path / "nowhere")
    (tmp_path / "latest").symlink_to("step-1")
    os.mkfifo(tmp_path / "step-10")
    assert [item.path.name for item in read_run(tmp_path).checkpoints] == ["step-1"]


def test_a_link_to_elsewhere_is_listed_as_a_link(tmp_path: Path) -> None:
    elsewhere = own(tmp_path / "archive", 50)
    own(tmp_path / "run", 40)
    (tmp_path / "run" / "step-50").symlink_to(elsewhere)
    found = read_run(tmp_path / "run").checkpoints
    assert [item.path for item in found] == [tmp_path / "run" / "step-50", tmp_path / "run" / "step-40"]
    assert latest_complete(tmp_path / "run") == tmp_path / "run" / "step-50"
    assert set(own_values(tmp_path / "run", {})) == {40}, "what may be pruned is in the folder itself"


def test_unfinished_saves_are_leftovers_and_no_checkpoints(tmp_path: Path) -> None:
    own(tmp_path, 1)
    place = own(tmp_path, 2, name=".step-2.fsdp-ckpt-00ff00ff")
    (tmp_path / ".step-3.fsdp-ckpt-0a").symlink_to(place)
    (tmp_path / ".step-4.fsdp-ckpt-0b").write_text("a file")
    run = read_run(tmp_path)
    assert [item.step for item in run.checkpoints] == [1]
    (left,) = run.leftovers
    assert left.path == place
    assert left.num_bytes == sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def test_the_newest_that_is_whole_and_never_one_that_is_not(tmp_path: Path) -> None:
    assert latest_complete(tmp_path / "missing") is None
    assert latest_complete(tmp_path) is None
    for step in (8, 9, 10, 11):
        own(tmp_path, step)
    os.utime(tmp_path / "step-8")  # the time says nothing
    assert latest_complete(tmp_path) == tmp_path / "step-11"
    (tmp_path / "step-11" / DATA).unlink()
    assert latest_complete(str(tmp_path)) == tmp_path / "step-10"
    (tmp_path / "step-10" / MANIFEST).write_text("{")
    assert latest_complete(f"file://{tmp_path}") == tmp_path / "step-9"
    for step in (8, 9):
        flip(tmp_path / f"step-{step}" / INDEX)
    assert latest_complete(tmp_path) is None


def test_a_final_model_beside_them_does_not_hide_them(tmp_path: Path) -> None:
    path = trainer(tmp_path, 500)
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    assert latest_complete(tmp_path) == path


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    path = own(tmp_path, 5)
    for place, message in (
        (path, "is a checkpoint"), (path / MANIFEST, "is a file"), ("xyz://bucket/run", "not supported"),
    ):  # fmt: skip
        for look in (latest_complete, read_run):
            with pytest.raises(UsageError, match=message) as caught:
                look(place)
            assert caught.value.hint
    with pytest.raises(CheckpointNotFound, match="no folder"):
        read_run(tmp_path / "missing")


def test_what_pruning_counts(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        own(tmp_path, step, {"loss": step / 2})
    own(tmp_path, 4, name="checkpoint-4")
    own(tmp_path, 5, name="step-05")
    shutil.copytree(DCP, tmp_path / "step-6")
    assert own_values(tmp_path, {}) == {3: {"loss": 1.5}, 2: {"loss": 1.0}, 1: {"loss": 0.5}}


def _on_a_node(folder: Path, step: int) -> Path:
    """What the first of two nodes with disks of their own has."""
    other = {"pytorch_model_fsdp_0/__1_0.distcp": b"theirs", "random_states_1.pkl": b"theirs"}
    path = own(folder, step, {"loss": step}, files=FILES | {"random_states_0.pkl": b"ours"} | other)
    for file in other:
        (path / file).unlink()
    return path


def test_where_nodes_have_disks_of_their_own_each_counts_its_share(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _on_a_node(tmp_path, step)
    own(tmp_path, 4)
    (_on_a_node(tmp_path, 5) / DATA).unlink()  # of this node, lost
    assert own_values(tmp_path, {}) == {4: {}}
    assert own_values(tmp_path, {}, like=4) == {4: {}}
    assert set(own_values(tmp_path, {}, like=3)) == {1, 2, 3, 4}
    assert set(own_values(tmp_path, {}, like=5)) == {4}
    found = {item.step: item for item in read_run(tmp_path).checkpoints}
    assert found[3].state == "incomplete"
    assert found[3].why.endswith("nothing of that rank is here: is it on another node?")
    assert f"{DATA}: listed in the manifest" in found[5].why
    assert "node" not in found[5].why
    assert latest_complete(tmp_path) == tmp_path / "step-4"


def test_a_manifest_is_read_again_when_it_is_another(tmp_path: Path) -> None:
    seen: Seen = {}
    own(tmp_path, 1, {"loss": 0.5})
    assert own_values(tmp_path, seen) == {1: {"loss": 0.5}}
    shutil.rmtree(tmp_path / "step-1")
    assert own_values(tmp_path, seen) == {}
    own(tmp_path, 1, {"loss": 0.125})
    assert own_values(tmp_path, seen) == {1: {"loss": 0.125}}
    assert own_values(tmp_path, seen) == {1: {"loss": 0.125}}


def test_nothing_is_written_and_torch_is_not_imported(tmp_path: Path) -> None:
    own(tmp_path, 1)
    trainer(tmp_path, 2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code = (
        "import sys, fsdp_ckpt; print(fsdp_ckpt.latest_complete(sys.argv[1]));"
        "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"{tmp_path / 'checkpoint-2'}\n[]\n"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert json.loads((tmp_path / "step-1" / MANIFEST).read_text())["step"] == 1
