"""Every layout of DESIGN.md section 4 that is read so far, through one suite."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fsdp_ckpt import inspect
from tests.contract.suite import FIXTURES, LayoutSuite

TWO = ("__0_0.distcp", "__1_0.distcp")


class TestDcp(LayoutSuite):
    fixture, inner = "torch-2.13.0/dcp_flat_w2", "dcp"
    layout, world_size = "dcp", 2
    parts = (("model", "model", 16),)
    needed = (
        ".metadata",
        *TWO,
    )


class TestDcpOfTorch21(LayoutSuite):
    fixture, inner = "torch-2.1.2/fsdp1_sharded_w2", "pytorch_model_fsdp_0"
    layout, world_size = "dcp", 2
    parts = (("pytorch_model_fsdp_0", "model", 16),)
    needed = (
        ".metadata",
        *TWO,
    )


class TestDcpWithoutCollectives(LayoutSuite):
    fixture, inner = "torch-2.13.0/dcp_nocollectives_w2", "dcp"
    layout, world_size = "dcp", 2
    parts = (("model", "model", 16),)
    needed = (
        "__0.metadata",
        "__1.metadata",
        *TWO,
    )


class TestDcpThroughZstd(LayoutSuite):
    fixture, inner = "torch-2.13.0/dcp_zstd_w2", "dcp"
    layout, world_size = "dcp", 2
    parts = (
        ("model", "model", 16),
        ("extra", "other", 0),
    )
    needed = (
        ".metadata",
        *TWO,
    )


class TestDcpOfSafetensors(LayoutSuite):
    fixture, inner = "torch-2.13.0/dcp_safetensors_w2", "dcp"
    layout, world_size = "dcp", 2
    parts = (("model", "model", 15),)
    needed = (
        ".metadata",
        *TWO,
    )


class TestDcpOfManyThreads(LayoutSuite):
    fixture, inner = "torch-2.13.0/dcp_threads_w2", "dcp"
    layout, world_size = "dcp", 2
    parts = (("model", "model", 16),)
    needed = (
        ".metadata",
        "__0_7.distcp",
        "__1_12.distcp",
    )


class TestTorchtitan(LayoutSuite):
    fixture, inner = "torch-2.5.1/titan_w2", "step-10"
    layout, world_size = "torchtitan", 2
    parts = (
        ("model", "model", 16), ("optimizer", "optimizer", 39), ("lr_scheduler", "scheduler", 0),
        ("dataloader", "dataloader", 0), ("train_state", "other", 2),
    )  # fmt: skip
    needed = (
        ".metadata",
        *TWO,
    )

    def test_the_step_is_known(self, path: Path) -> None:
        assert inspect(path).step == 10


class TestAccelerateFsdp2(LayoutSuite):
    fixture = "torch-2.13.0/fsdp2_sharded_w2"
    layout, world_size = "accelerate", 2
    parts = (
        ("pytorch_model_fsdp_0", "model", 16),
        ("optimizer_0", "optimizer", 39),
    )
    needed = tuple(f"pytorch_model_fsdp_0/{name}" for name in (".metadata", *TWO))


class TestAccelerateFsdp1(LayoutSuite):
    fixture = "torch-2.13.0/fsdp1_sharded_w3"
    layout, world_size = "accelerate", 3
    parts = (("pytorch_model_fsdp_0", "model", 16),)
    needed = tuple(f"pytorch_model_fsdp_0/{name}" for name in (".metadata", *TWO, "__2_0.distcp"))


class TestAccelerateTensorParallel(LayoutSuite):
    fixture = "torch-2.13.0/tp_fully_shard_w4"
    layout, world_size = "accelerate", 4
    parts = (("pytorch_model_fsdp_0", "model", 16),)
    needed = tuple(f"pytorch_model_fsdp_0/__{rank}_0.distcp" for rank in range(4))


class TestAccelerateFull(LayoutSuite):
    fixture = "torch-2.13.0/full_w2"
    layout, world_size = "accelerate", 1
    parts = (
        ("pytorch_model_fsdp", "model", 16),
        ("optimizer", "optimizer", 39),
    )
    needed = ("pytorch_model_fsdp.bin",)


class TestRankFilesOfDTensors(LayoutSuite):
    fixture = "torch-2.13.0/rank_files_fsdp2_w2"
    layout, world_size = "rank-files", 2
    parts = (
        ("model", "model", 16),
        ("optim", "optimizer", 39),
        ("extra_state", "scheduler", 0),
        ("rng", "rng", 1),
    )
    needed = (
        "model_world_size_2_rank_0.pt",
        "model_world_size_2_rank_1.pt",
    )


class TestRankFilesOfShardedTensors(LayoutSuite):
    fixture = "torch-2.13.0/rank_files_fsdp1_w2"
    layout, world_size = "rank-files", 2
    parts = (("model", "model", 16),)
    needed = (
        "model_world_size_2_rank_0.pt",
        "model_world_size_2_rank_1.pt",
    )


class TestRankFilesOfAccelerate(LayoutSuite):
    fixture = "torch-2.13.0/rank_files_accelerate_w2"
    layout, world_size = "rank-files", 2
    parts = (("pytorch_model_fsdp_0", "model", 16),)
    needed = (
        "pytorch_model_fsdp_0_rank0.bin",
        "pytorch_model_fsdp_0_rank1.bin",
    )


class FromExpected(LayoutSuite):
    """Layouts that a library of today writes from the whole tensors."""

    fixture = "torch-2.13.0/full_w2"
    __test__ = False

    def state(self) -> dict[str, torch.Tensor]:
        return load_file(FIXTURES / self.fixture / "expected.safetensors")


class TestTorchFileZip(FromExpected):
    __test__ = True
    layout = "torch-file"
    parts = (("model", "model", 16), ("other", "other", 0))
    inner = "model.pt"
    needed = (".",)

    def make(self, folder: Path) -> None:
        torch.save({"model": self.state(), "epoch": 3}, folder / "model.pt")


class TestTorchFileLegacy(FromExpected):
    __test__ = True
    layout = "torch-file"
    inner = "model.pt"
    needed = (".",)
    parts = (("model", "model", 16),)

    def make(self, folder: Path) -> None:
        torch.save(self.state(), folder / "model.pt", _use_new_zipfile_serialization=False)


class TestShardsOfTorchFiles(FromExpected):
    __test__ = True
    layout, world_size = "torch-files", 1
    parts = (("pytorch_model", "model", 16),)
    needed = (
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
    )

    def make(self, folder: Path) -> None:
        items = sorted(self.state().items())
        torch.save(dict(items[:7]), folder / "pytorch_model-00001-of-00002.bin")
        torch.save(dict(items[7:]), folder / "pytorch_model-00002-of-00002.bin")


class TestSafetensorsFile(FromExpected):
    __test__ = True
    layout, world_size = "safetensors", None
    parts = (("model", "model", 16),)
    inner = "model.safetensors"
    needed = (".",)

    def make(self, folder: Path) -> None:
        save_file(self.state(), folder / "model.safetensors")


class TestSafetensorsFolder(FromExpected):
    __test__ = True
    layout, world_size = "hf-safetensors", None
    parts = (("model", "model", 16),)
    needed = ("model.safetensors",)

    def make(self, folder: Path) -> None:
        save_file(self.state(), folder / "model.safetensors", metadata={"format": "pt"})


class TestHuggingFaceShards(LayoutSuite):
    fixture, inner = "torch-2.13.0/hf_w1", "hf"
    layout, world_size = "hf-safetensors", None
    parts = (("model", "model", 15),)
    needed = (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )


class TestShardsOfTorchsHuggingFaceWriter(LayoutSuite):
    fixture, inner = "torch-2.13.0/hf_sharded_w2", "hf"
    layout, world_size = "hf-safetensors", 2
    parts = (("model", "model", 15),)
    needed = (
        "shard-00001-model-00001-of-00002.safetensors",
        "shard-00001-model-00002-of-00002.safetensors",
    )


class TestConsolidatedShardsOfTorchsHuggingFaceWriter(LayoutSuite):
    fixture, inner = "torch-2.13.0/hf_consolidated_float_w2", "hf"
    layout, world_size = "hf-safetensors", 2
    parts = (
        ("sharded", "model", 13),
        ("model", "model", 13),
    )
    lacks = ("steps", "mask")  # this variant is of floats only: the consolidation of integers never ends
    needed = ("sharded/shard-00001-model-00001-of-00002.safetensors",)
