"""Checkpoints that training frameworks wrote themselves, through the suite; see fixtures/README.md for their versions.

What each of them is, is what fixtures/frameworks/generate.py gathered of the live model beside it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from fsdp_ckpt import inspect, merge, repair
from fsdp_ckpt.catalog import Role
from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.layouts.registry import read_checkpoint
from tests.build import assert_same, read_safetensors
from tests.contract.optimizers import read_optimizer
from tests.contract.suite import FIXTURES, LayoutSuite

TWO = (".metadata", "__0_0.distcp", "__1_0.distcp")


class FrameworkSuite(LayoutSuite):
    """A checkpoint in fixtures/frameworks.

    Attributes:
        step: As the layout tells it.
        by_number: Whether the optimizer knows parameters by number, in the order of the model's.
        optimizer_files: Files without which the optimizer is incomplete.
        has_optimizer: Whether there is one.
        parameters: The model's parameters in the order of its ``parameters()``.
    """

    __test__ = False
    world_size: ClassVar[int | None] = 2
    step: ClassVar[int | None] = 2
    by_number: ClassVar[bool] = False
    optimizer_files: ClassVar[tuple[str, ...]] = ()
    has_optimizer: ClassVar[bool] = True
    parameters: ClassVar[tuple[str, ...]] = (
        "embed.weight", "layers.0.up.weight", "layers.0.down.weight", "norm.weight",
    )  # fmt: skip

    def expected(self) -> dict[str, torch.Tensor]:
        return load_file(FIXTURES / self.fixture / "expected.safetensors")

    def test_the_step_is_known(self, path: Path) -> None:
        assert inspect(path).step == self.step

    def test_optimizer_tensors(self, path: Path) -> None:
        if not self.has_optimizer:
            assert all(part.role is not Role.OPTIMIZER for part in read_checkpoint(path).parts)
            return
        expected = load_file(FIXTURES / self.fixture / "expected_optim.safetensors")
        if self.by_number:
            numbers = {name: str(number) for number, name in enumerate(self.parameters)}
            parts = {key: key.rpartition(".") for key in expected}
            expected = {f"{numbers[parts[key][0]]}.{parts[key][2]}": tensor for key, tensor in expected.items()}
        assert_same(read_optimizer(path), {f"state.{key}": tensor for key, tensor in expected.items()})

    def test_every_file_is_of_some_part(self, path: Path) -> None:
        checkpoint = read_checkpoint(path)
        root = Path(checkpoint.root)
        files = {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file() and file.stat().st_size}
        known = {file for part in checkpoint.parts for file in part.files} | set(checkpoint.side_files)
        assert {file for file in files - known if not file.endswith((".json", ".txt"))} == set()

    def test_a_missing_file_of_the_optimizer_is_noticed(self, path: Path) -> None:
        for name in self.optimizer_files:
            kept = (path / name).read_bytes()
            (path / name).unlink()
            assert not inspect(path).complete, name
            (path / name).write_bytes(kept)


class TestFabricFsdp(FrameworkSuite):
    """Fabric's FSDPStrategy (FSDP1)."""

    __test__ = True
    fixture, inner = "frameworks/fabric_fsdp", "ckpt"
    layout, step = "lightning", None
    has_optimizer = False
    parts = (("net", "model", 5), ("meta", "other", 0))
    needed = TWO


class TestLightningFsdp(FrameworkSuite):
    """The Trainer's FSDPStrategy, given the dictionary that the Trainer dumps: it wants a GPU for the rest."""

    __test__ = True
    fixture, inner = "frameworks/lightning_fsdp", "epoch=0-step=2.ckpt"
    layout = "lightning"
    parts = (("model", "model", 5), ("optimizer_0", "optimizer", 12), ("meta", "other", 0))
    needed = TWO


class TestLightningModelParallel(FrameworkSuite):
    """A run of the Trainer with ModelParallelStrategy (FSDP2)."""

    __test__ = True
    fixture, inner = "frameworks/lightning_model_parallel", "epoch=0-step=2.ckpt"
    layout = "lightning"
    parts = (("state_dict", "model", 5), ("optimizer_0", "optimizer", 12), ("meta", "other", 0))
    needed = TWO


class TestComposer(FrameworkSuite):
    """Composer's sharded save: one state dict, the optimizer under its class, the random states beside it."""

    __test__ = True
    fixture, inner = "frameworks/composer", "ep0-ba2"
    layout = "composer"
    parts = (
        ("model", "model", 5), ("optimizers", "optimizer", 12), ("schedulers", "scheduler", 0), ("rng", "rng", 2),
        ("dataset_state", "dataloader", 0), ("other", "other", 0), ("timestamp", "other", 0),
    )  # fmt: skip
    needed = TWO


class TestComposerFolders(FrameworkSuite):
    """Composer's newer save, model and optimizer in folders of their own."""

    __test__ = True
    fixture, inner = "frameworks/composer_folders", "ep0-ba2"
    layout = "composer"
    parts = (("model", "model", 5), ("optim", "optimizer", 12))
    needed = tuple(f"model/{name}" for name in TWO)
    optimizer_files = tuple(f"optim/{name}" for name in TWO)

    def expected(self) -> dict[str, torch.Tensor]:
        """This save casts to the precision that it is asked for (fp32), and an integer buffer, too."""
        return super().expected() | {"layers.0.seen": torch.tensor(8.0)}


class TestComposerRankFiles(FrameworkSuite):
    """Composer before it had DCP, built to its source: one file of ShardedTensors per rank."""

    __test__ = True
    fixture, inner = "frameworks/composer_ranks", "."
    layout = "composer"
    parts = (
        ("ep0-ba2", "model", 5), ("optimizers", "optimizer", 12), ("schedulers", "scheduler", 0), ("rng", "rng", 1),
        ("timestamp", "other", 0), ("other", "other", 0),
    )  # fmt: skip
    needed = ("ep0-ba2-rank0.pt", "ep0-ba2-rank1.pt")


class TestTorchtitan03(FrameworkSuite):
    """torchtitan's CheckpointManager; its optimizer is flattened, one key per parameter and option."""

    __test__ = True
    fixture, inner = "frameworks/torchtitan", "checkpoint/step-4"
    layout, step = "torchtitan", 4
    parts = (
        ("model", "model", 5), ("optimizer", "optimizer", 12), ("lr_scheduler", "scheduler", 0),
        ("dataloader", "dataloader", 0), ("train_state", "other", 2),
    )  # fmt: skip
    needed = TWO


class TestOlmoCore(FrameworkSuite):
    """OLMo-core's Checkpointer: a storage record class of its own, the trainer's state per rank."""

    __test__ = True
    fixture, inner = "frameworks/olmo_core", "step2"
    layout = "olmo-core"
    parts = (("model", "model", 5), ("optim", "optimizer", 12), ("train", "other", 0))
    needed = ("model_and_optim/.metadata", "model_and_optim/__0_0.distcp", "model_and_optim/__1_0.distcp")


class TestByteCheckpoint(FrameworkSuite):
    """ByteCheckpoint's save for FSDP2: items are bare bytes."""

    __test__ = True
    fixture, inner = "frameworks/bytecheckpoint", "global_step_2"
    layout = "bytecheckpoint"
    parts = (("model", "model", 5), ("optimizer", "optimizer", 12), ("extra_state", "other", 0))
    needed = tuple(f"model/{name}" for name in TWO)
    optimizer_files = tuple(f"optimizer/{name}" for name in TWO)


class TestVeOmni(FrameworkSuite):
    """VeOmni's DistributedCheckpointer: sixteen files per rank, extra states beside them."""

    __test__ = True
    fixture, inner = "frameworks/veomni", "global_step_2"
    layout = "veomni"
    parts = (("model", "model", 5), ("optimizer", "optimizer", 12), ("extra_state", "other", 0))
    needed = TWO


class TestTorchtune(FrameworkSuite):
    """torchtune's DistributedCheckpointer: one file per item; the optimizer knows parameters by number."""

    __test__ = True
    fixture, inner = "frameworks/torchtune", "dist_epoch_0"
    layout, step, by_number = "torchtune", 0, True
    parts = (("model", "model", 5), ("optimizer", "optimizer", 12), ("other", "other", 0))
    needed = (".metadata", "__0_0.distcp")


class TestMegatron(FrameworkSuite):
    """Megatron-core's dist_checkpointing.save: layers stacked, rows over tensor-parallel ranks."""

    __test__ = True
    fixture, inner = "frameworks/megatron", "iter_0000002"
    layout = "megatron"
    parts = (("model", "model", 3), ("optimizer", "optimizer", 1), ("common", "other", 0))
    needed = (".metadata", "__0_0.distcp", "__1_0.distcp")


class TestNemoAutomodel(FrameworkSuite):
    """NeMo AutoModel's Checkpointer: safetensors per rank, a DCP folder of optimizer and scheduler."""

    __test__ = True
    fixture, inner = "frameworks/nemo_automodel", "epoch_0_step_2"
    layout = "nemo-automodel"
    parts = (
        ("model", "model", 5), ("optim", "optimizer", 12), ("sched", "scheduler", 0), ("rng", "rng", 0),
        ("dataloader", "dataloader", 0),
    )  # fmt: skip
    needed = tuple(f"model/shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2))
    optimizer_files = tuple(f"optim/{name}" for name in TWO)


class TestFmsFsdp(FrameworkSuite):
    """What fms-fsdp's Checkpointer calls, built to its source: it is no package."""

    __test__ = True
    fixture, inner = "frameworks/fms_fsdp", "step_2_ckp"
    layout = "fms-fsdp"
    parts = (
        ("model_state", "model", 5), ("optimizer_state", "optimizer", 12), ("loader_state", "dataloader", 0),
        ("metadata", "other", 0),
    )  # fmt: skip
    needed = TWO


class TestLlamaCookbook(FrameworkSuite):
    """llama-cookbook's save_model_and_optimizer_sharded, of the model: a plain distributed checkpoint."""

    __test__ = True
    fixture, inner = "frameworks/llama_cookbook", "out/fine-tuned-tiny"
    layout, step = "dcp", None
    has_optimizer = False
    parts = (("model", "model", 5),)
    needed = TWO


class VerlSuite(FrameworkSuite):
    """verl's FSDPCheckpointManager: files per rank, the optimizer as its own state_dict(), by number."""

    inner = "global_step_2/actor"
    layout, world_size, by_number = "rank-files", 4, True
    parts: ClassVar[tuple[tuple[str, str, int], ...]] = (("model", "model", 5), ("optim", "optimizer", 12))
    needed = tuple(f"model_world_size_4_rank_{rank}.pt" for rank in range(4))
    optimizer_files = tuple(f"optim_world_size_4_rank_{rank}.pt" for rank in range(4))


class TestVerlHsdp(VerlSuite):
    """Two replicas of two shards."""

    __test__ = True
    fixture = "frameworks/verl_hsdp"
    parts = (*VerlSuite.parts, ("extra_state", "scheduler", 0), ("rng", "rng", 1))


class TestVerlTensorParallel(VerlSuite):
    """FSDP2 over tensor parallelism: strided shards."""

    __test__ = True
    fixture = "frameworks/verl_tp"


class HuggingFaceWriterSuite(FrameworkSuite):
    """torch's HuggingFaceStorageWriter, one file per rank.

    No file says how many ranks or rows there are: that the last rank's file is gone does not show, but for the first.
    """

    layout, step, has_optimizer = "hf-safetensors", None, False
    needed: ClassVar[tuple[str, ...]] = ("shard-00001-model-00001-of-00001.safetensors",)
    inner = "ckpt"


class TestTransformersDistributed(HuggingFaceWriterSuite):
    """transformers' save_pretrained(distributed_checkpoint=True), save_optimizer_distributed beside it."""

    __test__ = True
    fixture, has_optimizer = "frameworks/transformers", True
    parts = (("model", "model", 12), ("optimizer", "optimizer", 3))
    needed = (*HuggingFaceWriterSuite.needed, "shard-00002-model-00001-of-00001.safetensors")
    optimizer_files = tuple(f"optimizer/{name}" for name in TWO)

    def test_the_config_is_at_hand(self, path: Path) -> None:
        assert "config.json" in read_checkpoint(path).side_files


class TestTorchsHuggingFaceWriterOfScalarsAndIntegers(HuggingFaceWriterSuite):
    """What torch's own consolidation makes zero, or never finishes."""

    __test__ = True
    fixture = "frameworks/torch_hf_writer"
    parts = (("model", "model", 8),)


class TestAccelerateRankFiles(FrameworkSuite):
    """What Accelerate's save_state calls with ``use_dcp=False``: model and optimizer in files per rank."""

    __test__ = True
    fixture, inner = "frameworks/accelerate_ranks", "checkpoint_2"
    layout = "rank-files"
    parts = (("pytorch_model_fsdp_0", "model", 5), ("optimizer_0", "optimizer", 12))
    needed = ("pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_0_rank1.bin")
    optimizer_files = ("optimizer_0_rank0.bin", "optimizer_0_rank1.bin")


class TestTrainer(FrameworkSuite):
    """A run of transformers' Trainer on one process: the optimizer knows parameters by number, decayed ones first."""

    __test__ = True
    fixture, inner = "frameworks/trainer", "checkpoint-2"
    layout, world_size, by_number = "trainer", 1, True
    parts = (("model", "model", 12), ("optimizer", "optimizer", 36), ("scheduler", "scheduler", 0))
    needed = ("model.safetensors",)
    parameters = (
        "model.embed_tokens.weight",
        *(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "lm_head.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    )


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """verl over FSDP1: ShardedTensors, and an optimizer of slices of flat parameters."""
    shutil.copytree(FIXTURES / "frameworks" / "verl_fsdp1" / "global_step_2", tmp_path / "ckpt")
    return tmp_path / "ckpt" / "actor"


def test_the_model_beside_an_optimizer_of_flat_slices(flat: Path, tmp_path: Path) -> None:
    merge(flat, tmp_path / "out")
    expected = load_file(FIXTURES / "frameworks" / "verl_fsdp1" / "expected.safetensors")
    assert_same(read_safetensors(tmp_path / "out"), expected)


def test_an_optimizer_of_flat_slices_is_no_set_of_copies(flat: Path) -> None:
    report = inspect(flat)
    roles = {part.role: part.complete for part in report.parts}
    assert roles["model"]
    assert not roles["optimizer"]


@pytest.mark.parametrize(
    ("fixture", "step"),
    [("torchtitan/checkpoint", 4), ("composer", 2), ("bytecheckpoint", 2), ("fms_fsdp", 2), ("megatron", 2)],
)
def test_the_newest_of_a_run_is_found_from_above(fixture: str, step: int, tmp_path: Path) -> None:
    source = FIXTURES / "frameworks" / fixture
    shutil.copytree(source, tmp_path / "run", ignore=shutil.ignore_patterns("expected*"))
    report = inspect(tmp_path / "run")
    assert (report.step, report.complete) == (step, True)


@pytest.mark.parametrize("part", ["optimizer", "optimizers"])
def test_an_optimizer_cannot_be_merged_as_a_model(part: str, tmp_path: Path) -> None:
    folder = {"optimizer": "veomni/global_step_2", "optimizers": "composer/ep0-ba2"}[part]
    with pytest.raises(FsdpCkptError, match=r"optimizer"):
        merge(FIXTURES / "frameworks" / folder, tmp_path / "out", part=part)


def test_metadata_of_olmo_core_is_written_anew_for_torch(tmp_path: Path) -> None:
    """In the folder below: torch cannot read a class of OLMo-core's own, and does once it is mended."""
    shutil.copytree(FIXTURES / "frameworks" / "olmo_core" / "step2", tmp_path / "step2")
    report = repair(tmp_path / "step2", for_torch="2.13", apply=True)
    assert [action.file for action in report.actions] == ["model_and_optim/.metadata"]
    found = {key: torch.empty_like(value) for key, value in TestOlmoCore().expected().items()}
    dcp.load({"model": found}, checkpoint_id=str(tmp_path / "step2" / "model_and_optim"), no_dist=True)
    assert_same(found, TestOlmoCore().expected())
