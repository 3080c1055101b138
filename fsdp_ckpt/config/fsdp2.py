"""From an FSDP1 configuration to FSDP2, with a list of what changed and what could not come along.

The mapping is that of ``accelerate to-fsdp2``; unlike there, names are read in any spelling, what FSDP2 cannot do is an
error rather than a file that fails later, and HSDP keeps its two dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.config.launch import LaunchConfig
from fsdp_ckpt.config.notes import notes_on
from fsdp_ckpt.config.options import OPTIONS
from fsdp_ckpt.errors import Incompatible, UsageError

__all__ = ["Conversion", "to_fsdp2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A configuration of another kind.

    Attributes:
        config: It.
        changed: What is said in another way now, one sentence each.
        dropped: What has no counterpart, and what that means.
    """

    config: LaunchConfig
    changed: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


def to_fsdp2(config: LaunchConfig) -> Conversion:
    """Return the FSDP2 configuration that does what this one does.

    Raises:
        UsageError: There are no FSDP options in it.
        Incompatible: It asks for what FSDP2 cannot do: NO_SHARD.
    """
    if config.fsdp is None:
        raise UsageError(f"distributed_type: {config.distributed_type}: there are no FSDP options to convert")
    old = config.fsdp
    if old.fsdp_version == 2:
        return Conversion(config=config)
    if old.sharding_strategy == "NO_SHARD":
        raise Incompatible(
            "sharding_strategy: NO_SHARD has no counterpart: FSDP2 always shards",
            hint="use DistributedDataParallel: distributed_type: MULTI_GPU without fsdp_config",
        )
    changed, dropped = _differences(old)
    values = {f.name: getattr(old, f.name) for f in fields(old) if 2 in OPTIONS[f.name].versions}
    values |= {"fsdp_version": 2, "reshard_after_forward": old.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")}
    if old.state_dict_type == "LOCAL_STATE_DICT":
        values["state_dict_type"] = "SHARDED_STATE_DICT"
        changed.append("state_dict_type: LOCAL_STATE_DICT became SHARDED_STATE_DICT; FSDP2 has no flat parameters")
    if old.is_hybrid:
        values |= _sizes(config, old, changed)
    if old.mixed_precision_policy and "buffer_dtype" in old.mixed_precision_policy:
        policy = {key: value for key, value in old.mixed_precision_policy.items() if key != "buffer_dtype"}
        values["mixed_precision_policy"] = policy
        dropped.append("mixed_precision_policy: buffer_dtype: FSDP2 does not cast buffers")
    stated = frozenset(key for key in config.stated if not key.startswith("fsdp_config"))
    new = replace(config, fsdp=FSDPConfig.of(values), stated=stated)
    return Conversion(config=replace(new, notes=notes_on(new)), changed=tuple(changed), dropped=tuple(dropped))


def _differences(old: FSDPConfig) -> tuple[list[str], list[str]]:
    reshard = old.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")
    changed = [f"sharding_strategy: {old.sharding_strategy} became reshard_after_forward: {str(reshard).lower()}"]
    dropped = []
    if old.backward_prefetch != "BACKWARD_PRE":
        dropped.append(f"backward_prefetch: {old.backward_prefetch}: FSDP2 always prefetches as BACKWARD_PRE does")
    if old.forward_prefetch:
        dropped.append("forward_prefetch: true: modules of FSDP2 have set_modules_to_forward_prefetch for it")
    if not old.use_orig_params:
        dropped.append("use_orig_params: false: FSDP2 always shows the model's own parameters")
    if old.sync_module_states and not old.cpu_ram_efficient_loading:
        dropped.append(
            "sync_module_states: true: without cpu_ram_efficient_loading every rank shards its own weights: they have "
            "to be the same"
        )
    if old.limit_all_gathers is False:
        dropped.append("limit_all_gathers: false: FSDP2 has no such switch")
    return changed, dropped


def _sizes(config: LaunchConfig, old: FSDPConfig, changed: list[str]) -> dict[str, Any]:
    """Say the two dimensions that HYBRID_SHARD implies: FSDP2 has to be given them."""
    if old.dp_replicate_size > 1 and old.dp_shard_size is not None:
        return {}
    per_machine = config.processes_per_machine()
    total = per_machine * config.num_machines
    shard = old.dp_shard_size or (total // old.dp_replicate_size if old.dp_replicate_size > 1 else per_machine)
    sizes = {"dp_replicate_size": total // shard, "dp_shard_size": shard}
    changed.append(
        f"sharding_strategy: {old.sharding_strategy} became dp_replicate_size: {sizes['dp_replicate_size']} x "
        f"dp_shard_size: {shard} (whole copies x ranks of one copy)"
    )
    return sizes
