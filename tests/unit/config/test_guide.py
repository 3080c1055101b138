"""The guide's own configuration: every key of it counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_ckpt.config.accelerate_yaml import read_config, to_document
from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.config.launch import LaunchConfig
from fsdp_ckpt.config.options import OPTIONS

GUIDE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
# What the text of the guide explains, one by one.
NAMED = (
    "fsdp_sharding_strategy", "fsdp_offload_params", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_min_num_params", "fsdp_backward_prefetch_policy", "fsdp_forward_prefetch", "fsdp_state_dict_type",
    "fsdp_use_orig_params", "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states",
)  # fmt: skip
# Other values than the ones above, which differ from what no key at all would mean.
OTHER = {
    "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n": ("auto_wrap_policy", "NO_WRAP"),
    "fsdp_backward_prefetch_policy: BACKWARD_PRE\n": ("backward_prefetch", "BACKWARD_POST"),
    "fsdp_forward_prefetch: false\n": ("forward_prefetch", True),
    "fsdp_cpu_ram_efficient_loading: true\n": ("cpu_ram_efficient_loading", False),
    "fsdp_offload_params: false\n": ("offload_params", True),
    "fsdp_sharding_strategy: FULL_SHARD\n": ("sharding_strategy", "NO_SHARD"),
    "fsdp_state_dict_type: SHARDED_STATE_DICT\n": ("state_dict_type", "LOCAL_STATE_DICT"),
    "fsdp_use_orig_params: true\n": ("use_orig_params", False),
}


def read(tmp_path: Path, text: str) -> LaunchConfig:
    path = tmp_path / "guide.yaml"
    path.write_text(text, encoding="utf-8")
    return read_config(path)


def test_the_guide_s_file_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, GUIDE)
    assert config.fsdp == FSDPConfig(
        fsdp_version=1,
        sharding_strategy="FULL_SHARD",
        offload_params=False,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_layer_cls_to_wrap=("BertLayer",),
        backward_prefetch="BACKWARD_PRE",
        forward_prefetch=False,
        state_dict_type="SHARDED_STATE_DICT",
        use_orig_params=True,
        cpu_ram_efficient_loading=True,
        sync_module_states=True,
        mixed_precision="bf16",
    )
    assert (config.num_processes, config.num_machines, config.machine_rank) == (2, 1, 0)
    assert (config.mixed_precision, config.rdzv_backend, config.same_network) == ("bf16", "static", True)
    assert any("fsdp_backward_prefetch_policy" in note for note in config.notes)


@pytest.mark.parametrize("line", OTHER)
def test_every_key_of_the_guide_s_file_counts(tmp_path: Path, line: str) -> None:
    name, value = OTHER[line]
    shown = str(value).lower() if isinstance(value, bool) else value
    text = GUIDE.replace(line, f"{line.partition(':')[0]}: {shown}\n")
    if value == "NO_WRAP":
        text = text.replace("  fsdp_transformer_layer_cls_to_wrap: BertLayer\n", "")
    before, after = read(tmp_path, GUIDE).fsdp, read(tmp_path, text).fsdp
    assert getattr(before, name) != value
    assert getattr(after, name) == value


def test_every_option_that_the_guide_names_is_known() -> None:
    keys = {key for option in OPTIONS.values() for key in (option.key, *option.aliases)}
    assert set(NAMED) <= keys


def test_the_guide_s_file_is_written_with_the_keys_that_accelerate_reads(tmp_path: Path) -> None:
    section = to_document(read(tmp_path, GUIDE))["fsdp_config"]
    assert section["fsdp_backward_prefetch"] == "BACKWARD_PRE"
    assert section["fsdp_sharding_strategy"] == "FULL_SHARD"
    assert "fsdp_reshard_after_forward" not in section
