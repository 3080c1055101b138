"""DeepSpeed's layouts, written by DeepSpeed itself (fixtures/deepspeed/generate.py)."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from safetensors.torch import load_file

from fsdp_ckpt import inspect, validate
from fsdp_ckpt.catalog import Role
from fsdp_ckpt.layouts.registry import read_checkpoint
from tests.build import assert_same
from tests.contract.suite import FIXTURES, LayoutSuite
from tests.unit.layouts.made_deepspeed import read_entry

SIDE = (("lr_scheduler", "scheduler", 0), ("extra_state", "other", 0))
RANK = "zero_pp_rank_{}_mp_rank_00"


class DeepSpeedSuite(LayoutSuite):
    """What DeepSpeed's checkpoints have in common: the model of the generator, after three steps."""

    __test__ = False
    layout, world_size, inner = "deepspeed", 2, "global_step3"
    parts = (("model", "model", 12), ("optimizer", "optimizer", 21), *SIDE)
    needed = ("mp_rank_00_model_states.pt", *(f"bf16_{RANK.format(rank)}_optim_states.pt" for rank in range(2)))
    title: ClassVar[str]

    def test_title_and_step(self, path: Path) -> None:
        report = inspect(path)
        assert (report.title, report.step) == (self.title, 3)

    def test_moments_are_those_that_deepspeed_gathers(self, path: Path) -> None:
        part = next(part for part in read_checkpoint(path).parts if part.role is Role.OPTIMIZER)
        expected = load_file(FIXTURES / self.fixture / "expected_optim.safetensors")
        found = {key: read_entry(path, entry) for key, entry in part.tensors.items()}
        steps = {key: tensor for key, tensor in found.items() if key.endswith(".step")}
        assert {float(step) for step in steps.values()} == {3.0}
        assert len(steps) == len(expected) // 2
        names = self.names_of_moments()
        assert_same({key: found[f"state.{name}.{kind}"] for key, (name, kind) in names.items()}, expected)
        assert found.keys() == {f"state.{name}.{kind}" for name, kind in names.values()} | steps.keys()
        assert all(entry.path[0] == "state" and len(entry.path) == 3 for entry in part.tensors.values())

    def names_of_moments(self) -> dict[str, tuple[str, str]]:
        """Return how the optimizer names a parameter, and the kind of moment, by expected key."""
        keys = load_file(FIXTURES / self.fixture / "expected_optim.safetensors")
        return {key: (key.rpartition(".")[0], key.rpartition(".")[2]) for key in keys}

    def test_every_checksum_is_right(self, path: Path) -> None:
        report = validate(path, level="deep")
        assert [finding.message for finding in report.findings if finding.severity != "note"] == []
        tensors = sum(part.num_bytes for part in inspect(path).parts)
        assert report.checked.verified_bytes > tensors / 2  # tied weights are there once
        assert report.checked.unverified_bytes == 0


class TestZero1(DeepSpeedSuite):
    __test__ = True
    fixture, title = "deepspeed/zero1_fp32_w2", "DeepSpeed ZeRO-1 checkpoint"
    needed = ("mp_rank_00_model_states.pt", *(f"{RANK.format(rank)}_optim_states.pt" for rank in range(2)))


class TestZero1OfBf16Optimizer(DeepSpeedSuite):
    __test__ = True
    fixture, title = "deepspeed/zero1_bf16_w2", "DeepSpeed ZeRO-1 checkpoint"


class TestZero2(DeepSpeedSuite):
    __test__ = True
    fixture, title = "deepspeed/zero2_bf16_w2", "DeepSpeed ZeRO-2 checkpoint"


class TestZero2InRoundRobinOrder(DeepSpeedSuite):
    __test__ = True
    fixture, title = "deepspeed/zero2_round_robin_w2", "DeepSpeed ZeRO-2 checkpoint"


class TestZero2Elastic(DeepSpeedSuite):
    __test__ = True
    fixture, title = "deepspeed/zero2_elastic_w2", "DeepSpeed ZeRO-2 checkpoint"


class TestZero2WithPaddingBetweenParameters(DeepSpeedSuite):
    __test__ = True
    fixture, title, world_size = "deepspeed/zero2_aligned_w4", "DeepSpeed ZeRO-2 checkpoint", 4
    needed = ("mp_rank_00_model_states.pt", *(f"bf16_{RANK.format(rank)}_optim_states.pt" for rank in range(4)))


class TestZero3(DeepSpeedSuite):
    __test__ = True
    fixture, title = "deepspeed/zero3_bf16_w2", "DeepSpeed ZeRO-3 checkpoint"
    needed = tuple(
        name
        for rank in range(2)
        for name in (f"{RANK.format(rank)}_model_states.pt", f"bf16_{RANK.format(rank)}_optim_states.pt")
    )


class TestZero3OfThreeRanks(DeepSpeedSuite):
    __test__ = True
    fixture, title, world_size = "deepspeed/zero3_fp32_w3", "DeepSpeed ZeRO-3 checkpoint", 3
    needed = tuple(f"{RANK.format(rank)}_{kind}_states.pt" for rank in range(3) for kind in ("model", "optim"))


class TestWithoutZero(DeepSpeedSuite):
    __test__ = True
    fixture, title = "deepspeed/zero0_fp32_w2", "DeepSpeed checkpoint"
    needed = ("mp_rank_00_model_states.pt",)

    def names_of_moments(self) -> dict[str, tuple[str, str]]:
        # torch's own state dict: parameters by number, in the order in which the generator put them into groups
        order = ["embed.weight", "up.weight", "down.weight", "scale", "up.bias", "norm.weight", "norm.bias"]
        kinds = ("exp_avg", "exp_avg_sq")
        return {f"{name}.{kind}": (str(number), kind) for number, name in enumerate(order) for kind in kinds}


class TestUniversalOfZero1(DeepSpeedSuite):
    __test__ = True
    fixture, inner, title = "deepspeed/universal1_w2", "global_step3_universal", "DeepSpeed universal checkpoint"
    needed = ("mp_rank_00_model_states.pt", "zero/up.bias/fp32.pt")


class TestUniversalOfZero3(DeepSpeedSuite):
    __test__ = True
    fixture, inner, title = "deepspeed/universal3_w2", "global_step3_universal", "DeepSpeed universal checkpoint"
    needed = (*(f"{RANK.format(rank)}_model_states.pt" for rank in range(2)), "zero/up.bias/fp32.pt")
