"""Options that are wrong or contradict each other: an error that says file, line, key, value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt.config.accelerate_yaml import read_config
from fsdp_ckpt.config.environment import fsdp_of_environment
from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.errors import UsageError

HEAD = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n"


def refusal(tmp_path: Path, *lines: str, after: str = "") -> str:
    """Return what is said against a file, without its folder; the first of the lines is line 4."""
    path = tmp_path / "c.yaml"
    path.write_text(HEAD + "".join(f"  {line}\n" for line in lines) + after)
    with pytest.raises(UsageError) as caught:
        read_config(path)
    return caught.value.message.replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["fsdp_version: 3"], ["c.yaml:4", "fsdp_version", "3", "1, 2"]),
        (["fsdp_version: 0"], ["c.yaml:4", "fsdp_version", "0"]),
        (["fsdp_version: two"], ["c.yaml:4", "fsdp_version", "'two'"]),
        (["fsdp_version: 2", "fsdp_sharding_strategy: FULL_SHARD"],
         ["c.yaml:5", "sharding_strategy: FULL_SHARD", "reshard_after_forward: true"]),
        (["fsdp_version: 2", "fsdp_sharding_strategy: 4"], ["c.yaml:5", "HYBRID_SHARD", "dp_replicate_size"]),
        (["fsdp_version: 2", "fsdp_reshard_after_forward: FULL_SHARD"],
         ["c.yaml:5", "fsdp_reshard_after_forward", "'FULL_SHARD'", "true, false"]),
        (["fsdp_version: 1", "fsdp_reshard_after_forward: true"],
         ["c.yaml:5", "fsdp_reshard_after_forward", "True", "1 FULL_SHARD, 2 SHARD_GRAD_OP"]),
        (["fsdp_sharding_strategy: FULL", ], ["c.yaml:4", "fsdp_sharding_strategy", "'FULL'", "FULL_SHARD"]),
        (["fsdp_sharding_strategy: 6"], ["c.yaml:4", "fsdp_sharding_strategy", "6", "5 HYBRID_SHARD_ZERO2"]),
        (["fsdp_sharding_strategy: FULL_SHARD", "fsdp_reshard_after_forward: NO_SHARD"],
         ["c.yaml:5", "NO_SHARD", "c.yaml:4", "FULL_SHARD"]),
        (["fsdp_auto_wrap_policy: LAYERS"], ["c.yaml:4", "fsdp_auto_wrap_policy", "'LAYERS'", "3 NO_WRAP"]),
        (["fsdp_backward_prefetch: 0"], ["c.yaml:4", "fsdp_backward_prefetch", "0", "1 BACKWARD_PRE"]),
        (["fsdp_state_dict_type: BOGUS"], ["c.yaml:4", "fsdp_state_dict_type", "'BOGUS'", "2 LOCAL_STATE_DICT"]),
        (["fsdp_version: 2", "fsdp_state_dict_type: LOCAL_STATE_DICT"],
         ["c.yaml:5", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT, FULL_STATE_DICT"]),
        (["fsdp_version: 2", "fsdp_forward_prefetch: true"], ["c.yaml:5", "forward_prefetch: true", "fsdp_version 2"]),
        (["fsdp_version: 2", "fsdp_use_orig_params: false"], ["c.yaml:5", "use_orig_params: false"]),
        (["fsdp_version: 2", "fsdp_backward_prefetch: NO_PREFETCH"], ["c.yaml:5", "backward_prefetch: NO_PREFETCH"]),
        (["fsdp_version: 2", "fsdp_activation_checkpointing_offload: true"],
         ["c.yaml:5", "activation_checkpointing_offload: true", "activation_checkpointing: true"]),
        (["fsdp_activation_checkpointing: true", "fsdp_activation_checkpointing_offload: true"],
         ["c.yaml:5", "activation_checkpointing_offload: true", "fsdp_version 2"]),
        (["fsdp_cpu_ram_efficient_loading: true", "fsdp_sync_module_states: false"],
         ["c.yaml:4", "cpu_ram_efficient_loading: true", "sync_module_states: true"]),
        (["fsdp_cpu_ram_efficient_loading: 'true'", "fsdp_sync_module_states: 'False'"],
         ["c.yaml:4", "cpu_ram_efficient_loading: true", "sync_module_states: true"]),
        (["fsdp_offload_params: maybe"], ["c.yaml:4", "fsdp_offload_params", "'maybe'", "true, false"]),
        (["fsdp_min_num_params: 1.5"], ["c.yaml:4", "fsdp_min_num_params", "1.5", "whole number"]),
        (["fsdp_min_num_params: -1"], ["c.yaml:4", "fsdp_min_num_params", "-1", "from 0"]),
        (["fsdp_min_num_params: .inf"], ["c.yaml:4", "fsdp_min_num_params", "inf", "whole number"]),
        (["fsdp_min_num_params: true"], ["c.yaml:4", "fsdp_min_num_params", "True", "whole number"]),
        (["fsdp_auto_wrap_policy: NO_WRAP", "fsdp_transformer_layer_cls_to_wrap: BertLayer"],
         ["c.yaml:5", "BertLayer", "NO_WRAP"]),
        (["fsdp_transformer_layer_cls_to_wrap: 7"], ["c.yaml:4", "fsdp_transformer_layer_cls_to_wrap", "7", "names"]),
        (["fsdp_ignored_modules: 'a('"], ["c.yaml:4", "ignored_modules", "a(", "regular expression"]),
        (["fsdp_unknown: 1"], ["c.yaml:4", "fsdp_unknown is no key of fsdp_config"]),
        (["fsdp_state_dict_typ: 1"], ["c.yaml:4", "fsdp_state_dict_typ ", "did you mean fsdp_state_dict_type?"]),
    ],
)  # fmt: skip
def test_a_file_is_refused_with_the_reason(tmp_path: Path, lines: list[str], said: list[str]) -> None:
    message = refusal(tmp_path, *lines)
    assert [part for part in said if part not in message] == [], message


def test_sizes_of_fsdp2_are_refused_under_fsdp1(tmp_path: Path) -> None:
    message = refusal(tmp_path, "fsdp_version: 1", after="parallelism_config:\n  parallelism_config_cp_size: 2\n")
    assert message.startswith("c.yaml:6: cp_size: 2 needs fsdp_version 2")


def test_copies_are_refused_under_fsdp1_unless_hybrid(tmp_path: Path) -> None:
    sizes = "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
    message = refusal(tmp_path, "fsdp_version: 1", "fsdp_sharding_strategy: FULL_SHARD", after=sizes)
    assert message.startswith("c.yaml:7: dp_replicate_size: 2 contradicts sharding_strategy: FULL_SHARD")


@pytest.mark.parametrize(
    "values",
    [
        {"fsdp_version": 3},
        {"fsdp_version": True},
        {"sharding_strategy": "FULL_SHARD"},
        {"fsdp_version": 1, "reshard_after_forward": True},
        {"fsdp_version": 1, "reshard_after_forward": "FULL_SHARD", "sharding_strategy": "NO_SHARD"},
        {"state_dict_type": "LOCAL_STATE_DICT"},
        {"state_dict_type": 4},
        {"forward_prefetch": True},
        {"activation_checkpointing_offload": True},
        {"fsdp_version": 1, "activation_checkpointing": True, "activation_checkpointing_offload": True},
        {"fsdp_version": 1, "cpu_ram_efficient_loading": "true", "sync_module_states": "false"},
        {"min_num_params": "1e8.5"},
        {"min_num_params": 1e-3},
        {"mixed_precision": "fp32"},
        {"mixed_precision_policy": {"param_dtype": "int8"}},
        {"mixed_precision_policy": {"buffer_dtype": "bf16"}},
        {"tp_size": 0},
    ],
)
def test_python_is_refused_too(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="|".join(values)):
        FSDPConfig.of(values)


def test_an_unknown_option_is_refused_with_the_closest() -> None:
    with pytest.raises(UsageError, match="no option `offload_param`; did you mean `offload_params`"):
        FSDPConfig.of({"offload_param": True})


@pytest.mark.parametrize("value", ["1e8", "1E8", " 100000000 ", "100_000_000", 1e8, 10**8])
def test_a_number_is_read_in_every_spelling(value: Any) -> None:
    assert FSDPConfig(min_num_params=value).min_num_params == 10**8
    variables = {"FSDP_VERSION": "2", "FSDP_MIN_NUM_PARAMS": str(value)}
    assert fsdp_of_environment(variables).min_num_params == 10**8


@pytest.mark.parametrize("spelling", ["1e8", "'1e8'", "1.0e+8", "100000000", "100_000_000"])
def test_a_number_is_read_in_every_spelling_of_a_file(tmp_path: Path, spelling: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"{HEAD}  fsdp_min_num_params: {spelling}\n")
    fsdp = read_config(path).fsdp
    assert fsdp is not None
    assert fsdp.min_num_params == 10**8


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "no FSDP_"),
        ({"FSDP_VERSION": "3"}, "3 is not possible"),
        ({"FSDP_VERSION": "x"}, "FSDP_VERSION=x"),
        ({"FSDP_STATE_DICT_TYPE": "BOGUS"}, "FSDP_STATE_DICT_TYPE=BOGUS is not possible"),
        ({"FSDP_VERSION": "2", "FSDP_FORWARD_PREFETCH": "true"}, "forward_prefetch: true"),
        ({"FSDP_SHARDING_STRATEGY": "NO_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "shard_grad_op"}, "contradicts"),
        ({"FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "false"}, "FSDP_RESHARD_AFTER_FORWARD=false"),
    ],
)
def test_an_environment_is_refused_with_the_variable(variables: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        fsdp_of_environment(variables)
