"""What belongs to a checkpoint, of real ones with other things put beside them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.ops.sharing.belonging import Belonging, choose_parts, find_belonging

FIXTURES = Path(__file__).parents[4] / "fixtures"
FRAMEWORKS = FIXTURES / "frameworks"


def belonging(path: Path, *wanted: str) -> Belonging:
    checkpoint = read_checkpoint(path)
    return find_belonging(checkpoint, choose_parts(checkpoint, wanted), is_file=path.is_file())


@pytest.mark.parametrize(
    "place",
    [
        "trainer/checkpoint-2", "transformers/ckpt", "verl_hsdp/global_step_2/actor", "megatron/iter_0000002",
        "nemo_automodel/epoch_0_step_2", "composer_folders/ep0-ba2", "fabric_fsdp/ckpt", "bytecheckpoint/global_step_2",
        "torchtune/dist_epoch_0", "fms_fsdp/step_2_ckp",
    ],
)  # fmt: skip
def test_every_file_that_a_framework_writes_belongs(place: str) -> None:
    folder = FRAMEWORKS / place
    every = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert belonging(folder).files == every


def test_what_lies_beside_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(FRAMEWORKS / "trainer/checkpoint-2", folder)
    before = belonging(folder).files
    (folder / "train.log").write_text("secret paths")
    (folder / ".checkpoint-2.fsdp-ckpt-0123456789abcdef").mkdir()
    (folder / ".checkpoint-2.fsdp-ckpt-0123456789abcdef/model.safetensors").write_bytes(b"unfinished")
    (folder / "runs").mkdir()
    (folder / "runs/events.json").write_text("{}")
    (folder / ".cache").mkdir()
    (folder / ".cache/x.json").write_text("{}")
    (folder / "outside.json").symlink_to("/etc/hostname")
    (tmp_path / "checkpoint-4").mkdir()
    (folder / "README.md").write_text("# mine")
    (folder / "LICENSE").write_text("MIT")
    found = belonging(folder)
    assert found.files == before | {"README.md": 6, "LICENSE": 3}
    assert "train.log" in found.left_out


def test_keys_to_somebodys_account_stay(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(FRAMEWORKS / "trainer/checkpoint-2", folder)
    before = belonging(folder).files
    secrets = (
        "credentials.json", ".secrets.json", "service-account.json", "hf_token.json", "api_key.json", "auth.json",
        "my_password.json", "private_key.json",
    )  # fmt: skip
    for name in secrets:
        (folder / name).write_text("{}")
    for name in ("special_tokens_map.json", "added_tokens.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    found = belonging(folder)
    assert set(found.files) - set(before) <= {"special_tokens_map.json", "added_tokens.json", "tokenizer.json"}
    assert {"special_tokens_map.json", "added_tokens.json", "tokenizer.json"} <= set(found.files)
    assert set(secrets) <= set(found.left_out)


def test_parts_are_chosen_by_what_they_are_for_or_by_name() -> None:
    trainer = FRAMEWORKS / "trainer/checkpoint-2"
    model = {"config.json", "generation_config.json", "model.safetensors", "trainer_state.json"}
    assert set(belonging(trainer, "model").files) == model
    assert set(belonging(trainer, "optimizer").files) == {"optimizer.pt", "trainer_state.json"}
    assert not belonging(trainer, "model").is_whole
    assert belonging(trainer, "all").is_whole
    nemo = FRAMEWORKS / "nemo_automodel/epoch_0_step_2"
    assert set(belonging(nemo, "optim").files) == {"optim/.metadata", "optim/__0_0.distcp", "optim/__1_0.distcp"}
    with pytest.raises(UsageError, match="there is no part `ema`") as caught:
        belonging(trainer, "ema")
    assert "model, optimizer, scheduler" in (caught.value.hint or "")


def test_a_manifest_goes_with_all_parts_only(tmp_path: Path) -> None:
    from tests.unit.ops.saved_by_us import save_small  # it imports torch

    folder = save_small(tmp_path / "step-7")
    whole = belonging(folder)
    every = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert whole.files == every
    assert "fsdp_ckpt.json" in every
    some = belonging(folder, "model").files
    assert "fsdp_ckpt.json" not in some
    assert set(some) == {file for file in every if file.startswith("pytorch_model_fsdp_0/")}


def test_of_a_single_file_nothing_else_belongs() -> None:
    file = FRAMEWORKS / "trainer/checkpoint-2/model.safetensors"
    assert belonging(file).files == {"model.safetensors": file.stat().st_size}
