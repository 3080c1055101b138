"""The table in docs/layouts.md: every cell is backed by the tests of a suite class."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_ckpt.ops.conversion.options import TARGETS
from tests.cases import test_convert_adapters as adapters
from tests.contract import test_deepspeed as deepspeed
from tests.contract import test_flat_params as flat
from tests.contract import test_frameworks as frameworks
from tests.contract import test_layouts as layouts

PAGE = Path(__file__).parents[2] / "docs/layouts.md"
COLUMNS = ("layout", "inspect", "validate", "merge", "convert from", "convert to", "optimizer")
BACKING = {
    "inspect": "test_inspect_names_it",
    "validate": "test_validate_finds_no_fault_in_a_whole_one",
    "merge": "test_merge_gives_the_unsharded_tensors",
    "convert from": "test_torch_reads_what_it_is_converted_to",
}
SUITES: dict[str, list[type]] = {
    "torch.distributed.checkpoint, torch 2.1 to 2.15": [layouts.TestDcp, layouts.TestDcpOfTorch21],
    "the same with `use_collectives=False`": [layouts.TestDcpWithoutCollectives],
    "the same with safetensors items, or through zstd": [layouts.TestDcpOfSafetensors, layouts.TestDcpThroughZstd],
    "Accelerate SHARDED_STATE_DICT: FSDP1, FSDP2, tensor parallel": [
        layouts.TestAccelerateFsdp1, layouts.TestAccelerateFsdp2, layouts.TestAccelerateTensorParallel,
    ],
    "Accelerate FULL_STATE_DICT": [layouts.TestAccelerateFull],
    "Accelerate `use_dcp=False`": [layouts.TestRankFilesOfAccelerate, frameworks.TestAccelerateRankFiles],
    "Trainer `checkpoint-N`": [frameworks.TestTrainer],
    "Lightning, Fabric": [
        frameworks.TestFabricFsdp, frameworks.TestLightningFsdp, frameworks.TestLightningModelParallel,
    ],
    "torchtitan": [layouts.TestTorchtitan, frameworks.TestTorchtitan03],
    "Composer: sharded, its newer folders, files per rank": [
        frameworks.TestComposer, frameworks.TestComposerFolders, frameworks.TestComposerRankFiles,
    ],
    "torchtune": [frameworks.TestTorchtune],
    "VeOmni": [frameworks.TestVeOmni],
    "OLMo-core": [frameworks.TestOlmoCore],
    "ByteCheckpoint": [frameworks.TestByteCheckpoint],
    "Megatron-core `torch_dist`": [frameworks.TestMegatron],
    "NeMo AutoModel": [frameworks.TestNemoAutomodel],
    "fms-fsdp": [frameworks.TestFmsFsdp],
    "llama-cookbook": [frameworks.TestLlamaCookbook],
    "verl and kin: HSDP, FSDP over tensor parallel": [frameworks.TestVerlHsdp, frameworks.TestVerlTensorParallel],
    "DeepSpeed ZeRO-1, 2, 3": [deepspeed.TestZero1, deepspeed.TestZero2, deepspeed.TestZero3],
    "DeepSpeed universal": [deepspeed.TestUniversalOfZero1, deepspeed.TestUniversalOfZero3],
    "transformers `distributed_checkpoint=True`": [frameworks.TestTransformersDistributed],
    "torch's HuggingFaceStorageWriter (`shard-…`)": [
        layouts.TestShardsOfTorchsHuggingFaceWriter, frameworks.TestTorchsHuggingFaceWriterOfScalarsAndIntegers,
    ],
    "full `.bin`, `.pt`: zip, legacy, in numbered files": [
        layouts.TestTorchFileZip, layouts.TestTorchFileLegacy, layouts.TestShardsOfTorchFiles,
    ],
    "safetensors: one file, or several with an index": [
        layouts.TestSafetensorsFile, layouts.TestSafetensorsFolder, layouts.TestHuggingFaceShards,
    ],
}  # fmt: skip
"""The suite classes behind each row; rows without one have tests of their own, see below."""
OPTIMIZERS_ELSEWHERE = {
    "torch.distributed.checkpoint, torch 2.1 to 2.15", "the same with `use_collectives=False`",
    "the same with safetensors items, or through zstd",
    "Accelerate SHARDED_STATE_DICT: FSDP1, FSDP2, tensor parallel", "Accelerate FULL_STATE_DICT",
    "full `.bin`, `.pt`: zip, legacy, in numbered files",
}  # fmt: skip
"""Rows whose optimizers tests/unit/ops/conversion/test_optimizer*.py and tests/contract/test_targets.py compare."""


def table() -> list[dict[str, str]]:
    """Return the rows of the page's first table."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    rows = []
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(COLUMNS):
            rows.append(dict(zip(COLUMNS, cells, strict=True)))
    assert tuple(rows[0].values()) == COLUMNS
    return rows[2:]


@pytest.mark.parametrize("row", table(), ids=lambda row: row["layout"])
def test_every_cell_has_its_test(row: dict[str, str]) -> None:
    suites = SUITES.get(row["layout"])
    if suites is None:
        assert row["layout"] in ("FSDP1 LOCAL_STATE_DICT, with `--shapes-from`", "PEFT adapter")
        return
    for suite in suites:
        assert getattr(suite, "__test__", True), suite
        for column, test in BACKING.items():
            assert row[column] == "yes"
            assert callable(getattr(suite, test)), (suite, test)
    has_own = any(
        getattr(suite, "has_optimizer", False) and hasattr(suite, "test_optimizer_tensors") for suite in suites
    ) or any(issubclass(suite, deepspeed.DeepSpeedSuite) for suite in suites)
    if row["optimizer"] == "none":
        assert not has_own
    else:
        assert has_own or row["layout"] in OPTIMIZERS_ELSEWHERE


def test_every_target_stands_in_its_row() -> None:
    shown = {target.split()[0].strip("`") for row in table() for target in row["convert to"].split(", ")} - {"no"}
    assert shown == set(TARGETS)


def test_flat_parameters_and_adapters_have_tests_of_their_own() -> None:
    rows = {row["layout"]: row for row in table()}
    assert rows["FSDP1 LOCAL_STATE_DICT, with `--shapes-from`"]["merge"] == "no"
    assert callable(flat.test_what_versions_of_torch_saved)
    assert callable(adapters.test_p51_the_base_model_and_the_adapter)


def test_no_row_is_forgotten() -> None:
    assert set(SUITES) <= {row["layout"] for row in table()}
