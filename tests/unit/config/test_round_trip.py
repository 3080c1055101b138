"""Any configuration comes back from a file and from an environment as it was."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ckpt.config.accelerate_yaml import read_config, to_yaml
from fsdp_ckpt.config.environment import environment_of, fsdp_of_environment
from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.config.launch import LaunchConfig
from fsdp_ckpt.config.options import BACKWARD_PREFETCHES, MIXED_PRECISIONS, SHARDING_STRATEGIES, WRAP_POLICIES

NAMES = st.lists(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), unique=True, max_size=3).filter(
    lambda names: not {name.lower() for name in names} & {"none", "null"}
)


@st.composite
def configs(draw: st.DrawFn) -> LaunchConfig:
    version = draw(st.sampled_from([1, 2]))
    values: dict[str, Any] = {
        "fsdp_version": version,
        "offload_params": draw(st.booleans()),
        "auto_wrap_policy": draw(st.sampled_from(WRAP_POLICIES)),
        "mixed_precision": draw(st.sampled_from(MIXED_PRECISIONS)),
        "activation_checkpointing": draw(st.booleans()),
        "ignored_modules": draw(st.sampled_from([None, r".*\.router", "1", "no", "head"])),
    }
    if values["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP":
        values["transformer_layer_cls_to_wrap"] = tuple(draw(NAMES))
    if values["auto_wrap_policy"] == "SIZE_BASED_WRAP":
        values["min_num_params"] = draw(st.integers(0, 10**15))
    processes = 8
    if version == 1:
        values["sharding_strategy"] = draw(st.sampled_from(SHARDING_STRATEGIES))
        values["backward_prefetch"] = draw(st.sampled_from(BACKWARD_PREFETCHES))
        values["state_dict_type"] = draw(st.sampled_from(["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]))
        values["forward_prefetch"] = draw(st.booleans())
        values["use_orig_params"] = draw(st.booleans())
        values["sync_module_states"] = draw(st.booleans())
        values["cpu_ram_efficient_loading"] = values["sync_module_states"] and draw(st.booleans())
    else:
        values["reshard_after_forward"] = draw(st.booleans())
        values["state_dict_type"] = draw(st.sampled_from(["FULL_STATE_DICT", "SHARDED_STATE_DICT"]))
        values["cpu_ram_efficient_loading"] = draw(st.booleans())
        values["activation_checkpointing_offload"] = values["activation_checkpointing"] and draw(st.booleans())
        if draw(st.booleans()):
            sizes = {f"{name}_size": draw(st.integers(1, 3)) for name in ("dp_replicate", "dp_shard", "tp", "cp")}
            values |= sizes
            processes = math.prod(sizes.values())
    fsdp = FSDPConfig.of(values)
    # Nothing that was given is lost on the way in.
    assert {name: getattr(fsdp, name) for name in values} == values
    return LaunchConfig(num_processes=processes, mixed_precision=values["mixed_precision"], fsdp=fsdp)


@settings(max_examples=150, deadline=None)
@given(configs())
def test_a_configuration_comes_back_from_its_file(config: LaunchConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_text(to_yaml(config), encoding="utf-8")
        back = read_config(path)
    assert back.fsdp == config.fsdp
    assert (back.num_processes, back.mixed_precision) == (config.num_processes, config.mixed_precision)
    assert to_yaml(back) == to_yaml(config)
    assert environment_of(back) == environment_of(config)


@settings(max_examples=150, deadline=None)
@given(configs())
def test_a_configuration_comes_back_from_its_environment(config: LaunchConfig) -> None:
    back = fsdp_of_environment(environment_of(config))
    assert config.fsdp is not None
    assert back == config.fsdp
