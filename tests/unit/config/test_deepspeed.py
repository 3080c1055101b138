"""The guide's table of FSDP's strategies and DeepSpeed's stages, both ways; what has no counterpart is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils.deepspeed import HfDeepSpeedConfig

from fsdp_ckpt.config.deepspeed import from_deepspeed, to_deepspeed, to_json
from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.config.launch import LaunchConfig
from fsdp_ckpt.errors import Incompatible, UsageError


def job(**options: Any) -> LaunchConfig:
    fsdp = FSDPConfig.of(options)
    return LaunchConfig(num_processes=8, num_machines=2, mixed_precision=fsdp.mixed_precision, fsdp=fsdp)


def saved(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(document))
    return path


def sharding(path: Path, num_processes: int | None = None) -> FSDPConfig:
    fsdp = from_deepspeed(path, num_processes=num_processes).config.fsdp
    assert fsdp is not None
    return fsdp


@pytest.mark.parametrize(
    ("strategy", "zero"),
    [
        ("FULL_SHARD", {"stage": 3}),
        ("SHARD_GRAD_OP", {"stage": 2}),
        ("NO_SHARD", {"stage": 0}),
        ("HYBRID_SHARD", {"stage": 3, "zero_hpz_partition_size": 4}),
    ],
)
def test_the_guide_s_table(tmp_path: Path, strategy: str, zero: dict[str, int]) -> None:
    result = to_deepspeed(job(fsdp_version=1, sharding_strategy=strategy))
    assert result.document["zero_optimization"] == zero
    back = sharding(saved(tmp_path, dict(result.document)), 8)
    if strategy == "NO_SHARD":
        assert (back.fsdp_version, back.sharding_strategy) == (1, "NO_SHARD")
    else:
        assert (back.fsdp_version, back.reshard_after_forward) == (2, zero["stage"] == 3)
    sizes = (2, 4) if strategy == "HYBRID_SHARD" else (1, None)
    assert (back.dp_replicate_size, back.dp_shard_size) == sizes


@pytest.mark.parametrize(("reshard", "stage"), [(True, 3), (False, 2)])
def test_fsdp2_is_stage_three_or_two(reshard: bool, stage: int) -> None:
    assert to_deepspeed(job(reshard_after_forward=reshard)).document["zero_optimization"]["stage"] == stage


def test_what_no_stage_does_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Incompatible, match="HYBRID_SHARD_ZERO2"):
        to_deepspeed(job(fsdp_version=1, sharding_strategy="HYBRID_SHARD_ZERO2"))
    with pytest.raises(Incompatible, match="HYBRID_SHARD_ZERO2"):
        to_deepspeed(job(reshard_after_forward=False, dp_replicate_size=2, dp_shard_size=4))
    with pytest.raises(Incompatible, match="stage 1"):
        from_deepspeed(saved(tmp_path, {"zero_optimization": {"stage": 1}}))


@pytest.mark.parametrize("stage", [4, -1, "x", None, True])
def test_a_stage_that_is_none_is_refused(tmp_path: Path, stage: Any) -> None:
    with pytest.raises(UsageError, match=r"ds\.json: stage: .* allowed: 0, 1, 2, 3"):
        from_deepspeed(saved(tmp_path, {"zero_optimization": {"stage": stage}}))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_accelerate_reads_the_json_alike(tmp_path: Path, precision: str) -> None:
    result = to_deepspeed(job(offload_params=True, mixed_precision=precision, state_dict_type="FULL_STATE_DICT"))
    path = tmp_path / "ds.json"
    path.write_text(to_json(result))
    theirs = HfDeepSpeedConfig(str(path))
    assert theirs.is_zero3()
    assert theirs.is_offload()
    assert theirs.is_true(f"{precision}.enabled")
    assert theirs.get_value("zero_optimization.offload_param.device") == "cpu"
    assert theirs.get_value("zero_optimization.offload_optimizer.device") == "cpu"
    assert theirs.is_true("zero_optimization.stage3_gather_16bit_weights_on_model_save")
    back = sharding(path)
    assert (back.offload_params, back.mixed_precision, back.state_dict_type) == (True, precision, "FULL_STATE_DICT")


def test_stage_two_offloads_the_optimizer_alone_and_says_so() -> None:
    result = to_deepspeed(job(offload_params=True, reshard_after_forward=False))
    zero = result.document["zero_optimization"]
    assert zero == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert any("parameters stay on the device" in line for line in result.dropped)


def test_what_deepspeed_lacks_is_listed() -> None:
    options = {"fsdp_version": 1, "forward_prefetch": True, "activation_checkpointing": True, "ignored_modules": "head"}
    dropped = to_deepspeed(job(**options)).dropped
    names = {line.partition(":")[0] for line in dropped}
    assert names == {
        "auto_wrap_policy", "backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states",
        "cpu_ram_efficient_loading", "activation_checkpointing", "ignored_modules",
    }  # fmt: skip


def test_what_fsdp_lacks_is_listed(tmp_path: Path) -> None:
    document = {
        "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "nvme"}},
        "gradient_clipping": 1.0,
        "train_batch_size": "auto",
    }
    result = from_deepspeed(saved(tmp_path, document))
    assert [line.partition(":")[0] for line in result.dropped] == [
        "gradient_clipping", "offload_optimizer", "zero_optimization.overlap_comm",
    ]  # fmt: skip
    assert result.config.fsdp is not None
    assert result.config.fsdp.offload_params


def test_copies_need_the_number_of_processes(tmp_path: Path) -> None:
    path = saved(tmp_path, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}})
    with pytest.raises(UsageError, match="zero_hpz_partition_size: 4"):
        from_deepspeed(path)
    with pytest.raises(UsageError, match="num_processes: 6 does not divide"):
        from_deepspeed(path, num_processes=6)
    assert sharding(path, 16).dp_replicate_size == 4


ACCELERATE = """\
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 1
  offload_optimizer_device: cpu
  offload_param_device: {device}
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""


def test_accelerate_s_yaml_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(ACCELERATE.format(device="nvme") + "use_cpu: false\n")
    result = from_deepspeed(path)
    fsdp = result.config.fsdp
    assert fsdp is not None
    assert (fsdp.reshard_after_forward, fsdp.offload_params, fsdp.mixed_precision) == (True, True, "bf16")
    assert (fsdp.state_dict_type, result.config.num_processes) == ("FULL_STATE_DICT", 4)
    assert {line.partition(":")[0] for line in result.dropped} == {"gradient_accumulation_steps", "offload_param"}


def test_what_is_no_deepspeed_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no zero_optimization"):
        from_deepspeed(saved(tmp_path, {"bf16": {"enabled": True}}))
    path = tmp_path / "a.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n")
    with pytest.raises(UsageError, match="distributed_type is FSDP"):
        from_deepspeed(path)
    path.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n")
    with pytest.raises(UsageError, match=r"the settings are in ds\.json"):
        from_deepspeed(path)
    with pytest.raises(UsageError, match="no FSDP options"):
        to_deepspeed(LaunchConfig(distributed_type="MULTI_GPU", fsdp=None))


def test_copies_over_several_machines_have_the_size_of_a_copy() -> None:
    config = LaunchConfig(num_processes=16, num_machines=2, fsdp=FSDPConfig(dp_replicate_size=4))
    assert to_deepspeed(config).document["zero_optimization"]["zero_hpz_partition_size"] == 4


def test_auto_and_whatever_has_no_counterpart_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "fp16": {"loss_scale": 2}}')
    listed = "\n".join(from_deepspeed(path).dropped)
    assert "bf16.enabled: auto" in listed
    assert "fp16.loss_scale" in listed
    fsdp = FSDPConfig(tp_size=2, activation_checkpointing=True, activation_checkpointing_offload=True)
    listed = "\n".join(to_deepspeed(LaunchConfig(num_processes=4, fsdp=fsdp)).dropped)
    assert "tp_size: 2" in listed
    assert "activation_checkpointing_offload: true" in listed
