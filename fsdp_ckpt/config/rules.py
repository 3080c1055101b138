"""Which options go together: the contradictions that other tools drop in silence or find at the first save."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fsdp_ckpt.config.options import OPTIONS
from fsdp_ckpt.config.values import as_boolean, is_unset
from fsdp_ckpt.errors import UsageError

__all__ = ["DTYPES", "check_rules", "check_version", "shown"]

DTYPES = ("float32", "bfloat16", "float16")
_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"} | {name: name for name in DTYPES}
# What FSDP2 does anyway, so that saying so contradicts nothing.
_FSDP2_ALWAYS: Mapping[str, Any] = {
    "backward_prefetch": "BACKWARD_PRE",
    "forward_prefetch": False,
    "use_orig_params": True,
    "limit_all_gathers": True,
}
_FSDP1_ALWAYS: Mapping[str, Any] = {"activation_checkpointing_offload": False, "tp_size": 1, "cp_size": 1}


def check_version(version: int) -> int:
    """Return the version.

    Raises:
        UsageError: There is no such version of FSDP.
    """
    if version not in (1, 2):
        raise UsageError(f"fsdp_version: {version} is not possible; allowed: 1, 2")
    return version


def check_rules(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all options, without those that the FSDP version lacks.

    Args:
        values: What every option is, read, with defaults.
        given: What was given, by option; unset where nothing was.

    Raises:
        UsageError: Two of them contradict each other.
    """
    result = dict(values)
    _leave_out_other_version(result, given)
    _check_loading(result, given)
    _check_wrapping(result, given)
    _check_recomputation(result)
    _check_sizes(result)
    result["mixed_precision_policy"] = _policy(result)
    return result


def _leave_out_other_version(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    version = values["fsdp_version"]
    always = _FSDP2_ALWAYS if version == 2 else _FSDP1_ALWAYS
    for name, option in OPTIONS.items():
        if version in option.versions:
            continue
        value = values[name]
        values[name] = None
        if is_unset(given[name]) or name == "sync_module_states" or (name in always and value == always[name]):
            continue
        raise UsageError(f"{name}: {shown(value)} is not possible with fsdp_version 2; {_instead(name, value)}"
                         if version == 2 else
                         f"{name}: {shown(value)} needs fsdp_version 2", hint=_hint(name, version))  # fmt: skip
    _check_synchronization(values, given)


def _instead(name: str, value: Any) -> str:
    match name:
        case "sharding_strategy":
            known = {"FULL_SHARD": "true", "SHARD_GRAD_OP": "false"}
            return f"use reshard_after_forward: {known[value]}" if value in known else _FSDP2_STRATEGIES[value]
        case "backward_prefetch":
            return "FSDP2 always prefetches as BACKWARD_PRE does"
        case "forward_prefetch":
            return "FSDP2 has no such switch; modules have set_modules_to_forward_prefetch"
        case "use_orig_params":
            return "FSDP2 always shows the model's own parameters"
        case _:
            return "FSDP2 has no such switch"


_FSDP2_STRATEGIES = {
    "NO_SHARD": "FSDP2 always shards; for whole copies use DistributedDataParallel",
    "HYBRID_SHARD": "use dp_replicate_size and dp_shard_size with reshard_after_forward: true",
    "HYBRID_SHARD_ZERO2": "use dp_replicate_size and dp_shard_size with reshard_after_forward: false",
}


def _hint(name: str, version: int) -> str:
    return "fsdp-ckpt config to-fsdp2 FILE rewrites a whole file" if version == 2 else f"leave {name} out"


def _check_synchronization(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """FSDP2 has no ``sync_module_states``: rank 0's weights are sent when loading is RAM efficient, and only then."""
    if values["fsdp_version"] != 2 or is_unset(given["sync_module_states"]):
        return
    if as_boolean(given["sync_module_states"]) != values["cpu_ram_efficient_loading"]:
        raise UsageError(
            f"sync_module_states: {shown(as_boolean(given['sync_module_states']))} contradicts "
            f"cpu_ram_efficient_loading: {shown(values['cpu_ram_efficient_loading'])}; with fsdp_version 2 the "
            "weights of rank 0 are sent exactly when the latter is true",
            hint="leave sync_module_states out",
        )


def _check_loading(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    if values["fsdp_version"] == 1 and values["cpu_ram_efficient_loading"] and not values["sync_module_states"]:
        if not is_unset(given["cpu_ram_efficient_loading"]):
            raise UsageError(
                "cpu_ram_efficient_loading: true needs sync_module_states: true, or all ranks but the first would "
                "train on random weights",
                hint="set sync_module_states: true, or cpu_ram_efficient_loading: false",
            )
        values["cpu_ram_efficient_loading"] = False
    if values["fsdp_version"] == 2 and values["state_dict_type"] == "LOCAL_STATE_DICT":
        raise UsageError(
            "state_dict_type: LOCAL_STATE_DICT is not possible with fsdp_version 2; allowed: SHARDED_STATE_DICT, "
            "FULL_STATE_DICT"
        )


def _check_wrapping(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    policy = values["auto_wrap_policy"]
    if values["transformer_layer_cls_to_wrap"] and policy != "TRANSFORMER_BASED_WRAP":
        raise UsageError(
            f"transformer_layer_cls_to_wrap: {','.join(values['transformer_layer_cls_to_wrap'])} has no effect with "
            f"auto_wrap_policy: {policy}",
            hint="set auto_wrap_policy: TRANSFORMER_BASED_WRAP, or leave the class names out",
        )
    if not is_unset(given["ignored_modules"]):
        try:
            re.compile(values["ignored_modules"])
        except re.error as error:
            raise UsageError(
                f"ignored_modules: {values['ignored_modules']!r} is not possible; allowed: a regular expression, and "
                f"this is none: {error}"
            ) from None


def _check_recomputation(values: dict[str, Any]) -> None:
    if values["activation_checkpointing_offload"] and not values["activation_checkpointing"]:
        raise UsageError("activation_checkpointing_offload: true needs activation_checkpointing: true")


def _check_sizes(values: dict[str, Any]) -> None:
    strategy, copies = values["sharding_strategy"], values["dp_replicate_size"]
    if values["fsdp_version"] == 1 and copies > 1 and not strategy.startswith("HYBRID"):
        raise UsageError(
            f"dp_replicate_size: {copies} contradicts sharding_strategy: {strategy}; allowed with it: 1",
            hint="several copies that are sharded themselves are HYBRID_SHARD",
        )


def _policy(values: Mapping[str, Any]) -> dict[str, str] | None:
    policy = values["mixed_precision_policy"]
    if policy is None:
        return None
    extra = "buffer_dtype" if values["fsdp_version"] == 1 else "output_dtype"
    allowed = ("param_dtype", "reduce_dtype", extra)
    result = {}
    for key, value in policy.items():
        name = _DTYPE_NAMES.get(str(value).removeprefix("torch."))
        if key not in allowed or name is None:
            raise UsageError(
                f"mixed_precision_policy: {key}: {value} is not possible with fsdp_version {values['fsdp_version']}; "
                f"allowed: {', '.join(allowed)}, each one of {', '.join(DTYPES)}"
            )
        result[key] = name
    return result


def shown(value: Any) -> str:
    """Return a value as YAML spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
