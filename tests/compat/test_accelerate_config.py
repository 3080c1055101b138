"""Every FSDP file of `accelerate config`: read, written back byte for byte, and meant as Accelerate means it."""

from __future__ import annotations

import functools
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import wrap

from fsdp_ckpt.config.accelerate_yaml import read_config, to_yaml
from fsdp_ckpt.config.environment import environment_of, fsdp_of_environment
from fsdp_ckpt.config.fsdp import FSDPConfig
from tests.compat.accelerate_answers import launch, plugin_of, write
from tests.compat.accelerate_cases import ANSWERS

POLICIES = {
    None: "NO_WRAP",
    wrap.transformer_auto_wrap_policy: "TRANSFORMER_BASED_WRAP",
    wrap.size_based_auto_wrap_policy: "SIZE_BASED_WRAP",
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


@functools.cache
def text_of(number: int, folder: Path) -> str:
    path = folder / "written.yaml"
    write(ANSWERS[number], path)
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("written")


@pytest.fixture(params=range(len(ANSWERS)))
def path(request: pytest.FixtureRequest, folder: Path) -> Path:
    path = folder / f"{request.param}.yaml"
    if not path.exists():
        path.write_text(text_of(request.param, folder), encoding="utf-8")
    return path


def test_there_are_hundreds_of_different_files(folder: Path) -> None:
    assert len({text_of(number, folder) for number in range(len(ANSWERS))}) > 300


def test_is_written_back_byte_for_byte(path: Path) -> None:
    assert to_yaml(read_config(path)) == path.read_text(encoding="utf-8")


def test_launches_and_builds_what_accelerate_does(path: Path) -> None:
    config = read_config(path)
    fsdp = config.fsdp
    assert fsdp is not None
    args, theirs = launch(path)
    _same_job(config, args)
    ours = environment_of(config)
    expected = dict(theirs)
    if fsdp.fsdp_version == 1:
        assert theirs["FSDP_SHARDING_STRATEGY"] == "FULL_SHARD"  # whatever the file says: mended in ours
        expected["FSDP_SHARDING_STRATEGY"] = str(fsdp.sharding_strategy)
    assert ours == expected
    _same_sharding(fsdp, plugin_of(ours))
    assert fsdp_of_environment(theirs) == fsdp
    assert fsdp_of_environment(ours) == fsdp


def _same_job(config: Any, args: Namespace) -> None:
    names = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "debug", "mixed_precision", "use_cpu",
             "enable_cpu_affinity", "main_training_function")  # fmt: skip
    assert {name: getattr(config, name) for name in names} == {name: getattr(args, name) for name in names}
    # `accelerate launch` has defaults for these two, and takes them over what the file says.
    assert (args.rdzv_backend, args.same_network) == ("static", False)
    if config.main_process_port:
        assert config.main_process_port == args.main_process_port
    assert config.processes_per_machine() == int(args.nproc_per_node)


def _same_sharding(fsdp: FSDPConfig, plugin: Any) -> None:
    version = fsdp.fsdp_version
    assert plugin.fsdp_version == version
    assert POLICIES[plugin.auto_wrap_policy] == fsdp.auto_wrap_policy
    assert tuple(plugin.transformer_cls_names_to_wrap or ()) == fsdp.transformer_layer_cls_to_wrap
    if fsdp.auto_wrap_policy == "SIZE_BASED_WRAP":
        assert plugin.min_num_params == fsdp.min_num_params
    assert plugin.state_dict_type.name == fsdp.state_dict_type
    assert plugin.cpu_ram_efficient_loading == fsdp.cpu_ram_efficient_loading
    assert plugin.activation_checkpointing == fsdp.activation_checkpointing
    assert plugin.activation_checkpointing_offload == bool(fsdp.activation_checkpointing_offload)
    assert plugin.ignored_modules == fsdp.ignored_modules
    # None under FSDP2, on both sides.
    assert plugin.use_orig_params == fsdp.use_orig_params
    assert plugin.sync_module_states == fsdp.sync_module_states
    assert plugin.forward_prefetch == fsdp.forward_prefetch
    if version == 1:
        assert plugin.sharding_strategy.name == {"HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2"}.get(
            str(fsdp.sharding_strategy), fsdp.sharding_strategy
        )
        assert getattr(plugin.backward_prefetch, "name", "NO_PREFETCH") == fsdp.backward_prefetch
        assert plugin.cpu_offload.offload_params == fsdp.offload_params
        assert plugin.limit_all_gathers == fsdp.limit_all_gathers
    else:
        assert plugin.reshard_after_forward is fsdp.reshard_after_forward
        assert type(plugin.cpu_offload).__name__ == ("CPUOffloadPolicy" if fsdp.offload_params else "OffloadPolicy")
    policy = plugin.mixed_precision_policy
    if fsdp.mixed_precision == "no":
        assert policy is None
    else:
        last = policy.buffer_dtype if version == 1 else policy.output_dtype
        assert {policy.param_dtype, policy.reduce_dtype, last} == {DTYPES[fsdp.mixed_precision]}
