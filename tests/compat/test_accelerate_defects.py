"""What Accelerate 1.15 gets wrong in silence, asserted, so that a test tells when it is mended; and our answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

from fsdp_ckpt.config.accelerate_yaml import read_config, to_document, to_yaml
from fsdp_ckpt.config.environment import environment_of, fsdp_of_environment
from fsdp_ckpt.config.fsdp2 import to_fsdp2
from fsdp_ckpt.config.launch import LaunchConfig
from fsdp_ckpt.errors import Incompatible, UsageError
from tests.compat.accelerate_answers import launch, plugin_of, write
from tests.compat.accelerate_cases import FSDP1, every

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def saved(path: Path, **fsdp: Any) -> Path:
    values = {"distributed_type": "FSDP", "num_processes": 8, "num_machines": 1, "fsdp_config": fsdp}
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fsdp.yaml"


def test_a_strategy_chosen_in_accelerate_config_is_ignored_by_its_own_launcher(path: Path) -> None:
    for answers, strategy in zip(every(FSDP1, "strategy"), STRATEGIES, strict=True):
        write(answers, path)
        assert yaml.safe_load(path.read_text())["fsdp_config"]["fsdp_reshard_after_forward"] == strategy
        _, theirs = launch(path)
        config = read_config(path)
        assert plugin_of(theirs).sharding_strategy.name == "FULL_SHARD"
        assert plugin_of(environment_of(config)).sharding_strategy.name.removeprefix("_") == strategy
        assert any("Accelerate 1.15 ignores" in note for note in config.notes) == (strategy != "FULL_SHARD")


def test_a_new_file_names_the_strategy_so_that_accelerate_obeys(path: Path) -> None:
    config = LaunchConfig(fsdp=fsdp_of_environment({"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}))
    path.write_text(to_yaml(config))
    assert plugin_of(launch(path)[1]).sharding_strategy.name == "SHARD_GRAD_OP"


def test_version_three_is_accepted_by_accelerate_and_not_here(path: Path) -> None:
    variables = {"FSDP_VERSION": "3", "FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD", "ACCELERATE_MIXED_PRECISION": "no"}
    assert plugin_of(variables).fsdp_version == 3
    saved(path, fsdp_version=3)
    with pytest.raises(KeyError, match="TRUE"):
        plugin_of(launch(path)[1])
    with pytest.raises(UsageError, match=r"fsdp.yaml:\d+: fsdp_version: 3 is not possible; allowed: 1, 2"):
        read_config(path)


def test_an_unknown_key_is_dropped_by_accelerate_and_not_here(path: Path) -> None:
    saved(path, fsdp_version=1, fsdp_stat_dict_type="LOCAL_STATE_DICT")
    assert "LOCAL_STATE_DICT" not in launch(path)[1].values()
    with pytest.raises(UsageError, match=r"fsdp.yaml:3: fsdp_stat_dict_type .*did you mean fsdp_state_dict_type"):
        read_config(path)


def test_the_guide_s_prefetch_key_is_dropped_by_accelerate_and_counts_here(path: Path) -> None:
    saved(path, fsdp_version=1, fsdp_backward_prefetch_policy="BACKWARD_POST")
    assert "FSDP_BACKWARD_PREFETCH" not in launch(path)[1]
    assert plugin_of(environment_of(read_config(path))).backward_prefetch.name == "BACKWARD_POST"


def test_1e8_ends_accelerate_and_is_a_number_here(path: Path) -> None:
    path.write_text(
        "distributed_type: FSDP\nnum_processes: 2\nnum_machines: 1\n"
        "fsdp_config:\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 1e8\n"
    )
    with pytest.raises(ValueError, match="1e8"):
        plugin_of(launch(path)[1])
    assert plugin_of(environment_of(read_config(path))).min_num_params == 100_000_000


def test_efficient_loading_without_synchronization_given_on_the_command_line_passes_accelerate(path: Path) -> None:
    saved(path, fsdp_version=1)
    _, theirs = launch(path, "--fsdp_cpu_ram_efficient_loading", "true", "--fsdp_sync_module_states", "false")
    assert (theirs["FSDP_CPU_RAM_EFFICIENT_LOADING"], theirs["FSDP_SYNC_MODULE_STATES"]) == ("true", "false")
    with pytest.raises(UsageError, match="cpu_ram_efficient_loading: true needs sync_module_states: true"):
        fsdp_of_environment(theirs)


def test_a_rendezvous_backend_in_the_file_is_ignored_by_accelerate(path: Path) -> None:
    saved(path, fsdp_version=2)
    with path.open("a") as file:
        file.write("rdzv_backend: c10d\nsame_network: true\n")
    args, _ = launch(path)
    assert (args.rdzv_backend, args.same_network) == ("static", False)
    config = read_config(path)
    assert (config.rdzv_backend, config.same_network) == ("c10d", True)


def test_what_a_file_does_not_say_means_what_it_means_to_accelerate(path: Path) -> None:
    for version in ({}, {"fsdp_version": 1}, {"fsdp_version": 2}):
        saved(path, **version, fsdp_offload_params=False)
        _, theirs = launch(path)
        fsdp = read_config(path).fsdp
        assert fsdp == fsdp_of_environment(theirs)
        plugin = plugin_of(theirs)
        assert plugin.state_dict_type.name == fsdp.state_dict_type
        assert plugin.cpu_ram_efficient_loading is fsdp.cpu_ram_efficient_loading is True  # the launcher's own
        assert plugin.use_orig_params == fsdp.use_orig_params
        assert plugin.sync_module_states == fsdp.sync_module_states
        assert plugin.auto_wrap_policy is None
        assert fsdp.auto_wrap_policy == "NO_WRAP"
        assert fsdp.min_num_params == int(theirs["FSDP_MIN_NUM_PARAMS"])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("key", ["fsdp_sharding_strategy", "fsdp_reshard_after_forward"])
def test_to_fsdp2_is_accelerates_where_it_is_right(path: Path, strategy: str, key: str) -> None:
    options = {
        "fsdp_version": 1, key: strategy, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 5000,
        "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": False, "fsdp_offload_params": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_sync_module_states": True, "fsdp_use_orig_params": True,
        "fsdp_cpu_ram_efficient_loading": True, "fsdp_activation_checkpointing": True,
    }  # fmt: skip
    saved(path, **options)
    theirs = convert_config_to_fsdp2(yaml.safe_load(path.read_text()))["fsdp_config"]
    assert to_document(to_fsdp2(read_config(path)).config)["fsdp_config"] == theirs


@pytest.mark.parametrize("value", [2, "2", "shard_grad_op"])
def test_to_fsdp2_reads_a_strategy_that_accelerates_leaves_as_it_is(path: Path, value: Any) -> None:
    saved(path, fsdp_version=1, fsdp_sharding_strategy=value)
    theirs = convert_config_to_fsdp2(yaml.safe_load(path.read_text()))["fsdp_config"]
    assert theirs["fsdp_reshard_after_forward"] == value
    fsdp = to_fsdp2(read_config(path)).config.fsdp
    assert fsdp is not None
    assert fsdp.reshard_after_forward is False


def test_to_fsdp2_replaces_local_which_accelerates_keeps_and_then_refuses(path: Path) -> None:
    saved(path, fsdp_version=1, fsdp_state_dict_type="LOCAL_STATE_DICT")
    theirs = convert_config_to_fsdp2(yaml.safe_load(path.read_text()))["fsdp_config"]
    assert theirs["fsdp_state_dict_type"] == "LOCAL_STATE_DICT"
    result = to_fsdp2(read_config(path))
    path.write_text(to_yaml(result.config))
    assert plugin_of(launch(path)[1]).state_dict_type.name == "SHARDED_STATE_DICT"
    assert any("LOCAL_STATE_DICT became SHARDED_STATE_DICT" in line for line in result.changed)


def test_to_fsdp2_refuses_no_shard_which_accelerates_shards(path: Path) -> None:
    saved(path, fsdp_version=1, fsdp_sharding_strategy="NO_SHARD")
    assert convert_config_to_fsdp2(yaml.safe_load(path.read_text()))["fsdp_config"]["fsdp_version"] == 2
    with pytest.raises(Incompatible, match="NO_SHARD"):
        to_fsdp2(read_config(path))


@pytest.mark.parametrize(("strategy", "reshard"), [("HYBRID_SHARD", True), ("HYBRID_SHARD_ZERO2", False)])
def test_to_fsdp2_keeps_both_dimensions_which_accelerates_loses(path: Path, strategy: str, reshard: bool) -> None:
    saved(path, fsdp_version=1, fsdp_sharding_strategy=strategy)
    with path.open("a") as file:
        file.write("machine_rank: 0\nmain_process_ip: node\nmain_process_port: 29500\n")
    path.write_text(path.read_text().replace("num_machines: 1", "num_machines: 2"))
    assert "parallelism_config" not in convert_config_to_fsdp2(yaml.safe_load(path.read_text()))
    path.write_text(to_yaml(to_fsdp2(read_config(path)).config))
    _, theirs = launch(path)
    sizes = (theirs["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"], theirs["PARALLELISM_CONFIG_DP_SHARD_SIZE"])
    assert sizes == ("2", "4")
    assert plugin_of(theirs).reshard_after_forward is reshard


def test_to_fsdp2_drops_the_dead_key_which_accelerates_copies(path: Path) -> None:
    saved(path, fsdp_version=1, fsdp_backward_prefetch_policy="BACKWARD_POST")
    theirs = convert_config_to_fsdp2(yaml.safe_load(path.read_text()))["fsdp_config"]
    assert "fsdp_backward_prefetch_policy" in theirs
    result = to_fsdp2(read_config(path))
    assert not any("prefetch" in key for key in to_document(result.config)["fsdp_config"])
    assert any("backward_prefetch: BACKWARD_POST" in line for line in result.dropped)
