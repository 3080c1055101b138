"""What is allowed in a configuration, and yet may surprise: above all, what Accelerate would make of it."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_ckpt.config.launch import LaunchConfig

__all__ = ["notes_on"]

_POLICY_KEYS = ("fsdp_config.fsdp_backward_prefetch_policy", "fsdp_config.backward_prefetch_policy")


def notes_on(config: LaunchConfig) -> tuple[str, ...]:
    """Return sentences on what is worth knowing about a configuration."""
    return tuple(_notes(config))


def _notes(config: LaunchConfig) -> Iterator[str]:
    fsdp = config.fsdp
    if fsdp is None:
        return
    older = {"fsdp_config.fsdp_sharding_strategy", "fsdp_config.sharding_strategy"} & config.stated
    if fsdp.fsdp_version == 1 and fsdp.sharding_strategy != "FULL_SHARD" and config.stated and not older:
        yield (
            f"Accelerate 1.15 ignores fsdp_reshard_after_forward: {fsdp.sharding_strategy} with fsdp_version 1 and "
            f"shards fully; `fsdp-ckpt launch` does what the file says. For `accelerate launch` add "
            f"fsdp_sharding_strategy: {fsdp.sharding_strategy}"
        )
    if config.stated & set(_POLICY_KEYS):
        yield (
            "Accelerate ignores fsdp_backward_prefetch_policy, the spelling of its guide; the key that it reads is "
            "fsdp_backward_prefetch"
        )
    if "fsdp_config.fsdp_min_num_params" in config.stated and fsdp.auto_wrap_policy != "SIZE_BASED_WRAP":
        yield f"min_num_params has no effect with auto_wrap_policy: {fsdp.auto_wrap_policy}"
    if fsdp.auto_wrap_policy == "NO_WRAP" and fsdp.sharding_strategy != "NO_SHARD":
        yield (
            "auto_wrap_policy: NO_WRAP gathers the whole model at once on every rank, so sharding saves little memory"
        )
    if fsdp.state_dict_type == "LOCAL_STATE_DICT":
        yield (
            "state_dict_type: LOCAL_STATE_DICT can be loaded only on the same number of ranks, wrapped alike, and not "
            "by Accelerate at all"
        )
    if config.use_cpu:
        yield "use_cpu: Accelerate 1.15 never shards on CPUs: scripts that use it run DDP there, `wrap` shards"
        if fsdp.sync_module_states:
            yield "sync_module_states: true: Accelerate 1.15 refuses it without a GPU"
    if fsdp.fsdp_version == 1:
        yield "FSDP1 is deprecated in torch; `fsdp-ckpt config to-fsdp2` rewrites this file"
