"""The environment of a launched job: what Accelerate's launcher sets, written and read.

Follows ``prepare_multi_gpu_env`` of ``accelerate/utils/launch.py`` (1.15), so that scripts made for
``accelerate launch`` find what they expect. One thing is mended: the sharding strategy of FSDP1 is exported whatever
key named it, where Accelerate exports FULL_SHARD for the key that its own ``config`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fsdp_ckpt.config.fsdp import FSDPConfig, read_value
from fsdp_ckpt.config.launch import LaunchConfig
from fsdp_ckpt.config.options import OPTIONS, default_of
from fsdp_ckpt.config.values import is_unset
from fsdp_ckpt.errors import UsageError

__all__ = ["environment_of", "fsdp_of_environment"]

# The launcher sets these whether or not the version has them.
_ALWAYS_SET: Mapping[str, str] = {
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
_DYNAMO: Mapping[str, tuple[str, str]] = {
    "ACCELERATE_DYNAMO_BACKEND": ("dynamo_backend", "NO"),
    "ACCELERATE_DYNAMO_MODE": ("dynamo_mode", "default"),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": ("dynamo_use_fullgraph", "False"),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": ("dynamo_use_dynamic", "False"),
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": ("dynamo_use_regional_compilation", "False"),
}
_FP8: Mapping[str, Any] = {
    "fp8_use_autocast_during_eval": False,
    "fp8_margin": 0,
    "fp8_interval": 1,
    "fp8_format": "HYBRID",
    "fp8_amax_history_len": 1024,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_override_linear_precision": (False, False, False),
    "fp8_opt_level": "O2",
    "fp8_enable_fsdp_float8_all_gather": 1,
    "fp8_pad_inner_dim": 1,
}
_PARALLELISM: Mapping[str, Any] = {"cp_backend": "torch", "sp_size": 1, "sp_backend": "deepspeed"}


def environment_of(config: LaunchConfig, *, threads: str = "1") -> dict[str, str]:
    """Return the variables that a job is started with.

    Args:
        config: The job.
        threads: Value of ``OMP_NUM_THREADS``.

    Raises:
        UsageError: Sizes of the device mesh do not fit the number of processes.
    """
    config.check_sizes()
    result = {"ACCELERATE_MIXED_PRECISION": config.mixed_precision, "OMP_NUM_THREADS": threads}
    dynamo = _section(config, "dynamo_config", "dynamo_")
    for variable, (key, default) in _DYNAMO.items():
        result[variable] = str(dynamo.get(key, default))
    result["ACCELERATE_DYNAMO_BACKEND"] = result["ACCELERATE_DYNAMO_BACKEND"].upper()
    if config.debug:
        result["ACCELERATE_DEBUG_MODE"] = "true"
    if config.enable_cpu_affinity:
        result["ACCELERATE_CPU_AFFINITY"] = "1"
    if config.use_cpu or config.distributed_type == "MULTI_CPU":
        result["ACCELERATE_USE_CPU"] = "True"
    if config.gpu_ids not in (None, "all"):
        result["CUDA_VISIBLE_DEVICES"] = str(config.gpu_ids)
    if config.mixed_precision == "fp8":
        result |= dict(_fp8(_section(config, "fp8_config", "fp8_")))
    if config.fsdp is not None:
        result |= dict(_fsdp(config.fsdp))
        if _uses_parallelism(config, config.fsdp):
            result |= dict(_parallelism(config, config.fsdp))
    return result


def _section(config: LaunchConfig, name: str, prefix: str) -> dict[str, Any]:
    section = config.carried.get(name) or {}
    return {key if key.startswith(prefix) else f"{prefix}{key}": value for key, value in section.items()}


def _fp8(section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in {**_FP8, **section}.items():
        if key == "fp8_override_linear_precision":
            for name, item in zip(("FPROP", "DGRAD", "WGRAD"), value, strict=True):
                yield f"ACCELERATE_FP8_OVERRIDE_{name}", str(item)
        elif value is not None:
            yield f"ACCELERATE_{key.upper()}", str(value)


def _fsdp(fsdp: FSDPConfig) -> Iterator[tuple[str, str]]:
    yield "ACCELERATE_USE_FSDP", "true"
    yield from _ALWAYS_SET.items()
    for name, option in OPTIONS.items():
        value = getattr(fsdp, name)
        if option.section != "fsdp_config" or option.variable is None or value in (None, ()):
            continue
        if isinstance(value, tuple):
            yield option.variable, ",".join(value)
        else:
            yield option.variable, str(value).lower() if isinstance(value, bool) else str(value)
    if fsdp.sharding_strategy is not None:
        yield "FSDP_RESHARD_AFTER_FORWARD", fsdp.sharding_strategy.lower()


def _uses_parallelism(config: LaunchConfig, fsdp: FSDPConfig) -> bool:
    stated = any(key.startswith("parallelism_config.") for key in config.stated)
    sizes = (fsdp.dp_replicate_size, fsdp.tp_size or 1, fsdp.cp_size or 1)
    return stated or bool(config.parallelism) or fsdp.dp_shard_size is not None or any(size > 1 for size in sizes)


def _parallelism(config: LaunchConfig, fsdp: FSDPConfig) -> Iterator[tuple[str, str]]:
    others = {key.removeprefix("parallelism_config_"): value for key, value in config.parallelism.items()}
    values = {**_PARALLELISM, **others}
    sizes = {"dp_replicate_size": fsdp.dp_replicate_size, "tp_size": fsdp.tp_size or 1, "cp_size": fsdp.cp_size or 1}
    rest = int(values["sp_size"])
    for size in sizes.values():
        rest *= size
    sizes["dp_shard_size"] = fsdp.dp_shard_size or max((config.num_processes or 1) // rest, 1)
    yield "ACCELERATE_USE_PARALLELISM_CONFIG", "true"
    if sizes["cp_size"] > 1:
        values.setdefault("cp_comm_strategy", "allgather")
    else:
        values.pop("cp_comm_strategy", None)
    if int(values["sp_size"]) > 1:
        values = {"sp_seq_length": None, "sp_seq_length_is_variable": True, "sp_attn_implementation": "sdpa", **values}
    else:
        values = {key: value for key, value in values.items() if not key.startswith(("sp_seq", "sp_attn"))}
    for key, value in (sizes | values).items():
        yield f"PARALLELISM_CONFIG_{key.upper()}", str(value)


def fsdp_of_environment(environ: Mapping[str, str]) -> FSDPConfig:
    """Return what the environment of a launched job says about sharding.

    What the launcher sets in any case, such as ``FSDP_FORWARD_PREFETCH=false`` with FSDP2, says nothing.

    Raises:
        UsageError: There is nothing about FSDP in it, or something that is not allowed or contradicts itself.
    """
    if not any(option.variable in environ for option in OPTIONS.values() if option.section == "fsdp_config"):
        raise UsageError(
            "no FSDP_* variable is set: this process was not started by a launcher with an FSDP configuration",
            hint="fsdp-ckpt launch --config FILE SCRIPT; or in Python: FSDPConfig.from_file(FILE)",
        )
    option = OPTIONS["fsdp_version"]
    version = int(_read("fsdp_version", environ)) if "FSDP_VERSION" in environ else default_of(option, 1, of_file=True)
    values: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        text = environ.get(option.variable) if option.variable else None
        if (
            text is None
            or is_unset(text)
            or (version not in option.versions and text == _ALWAYS_SET.get(option.variable or ""))
        ):
            if option.file_default is not None and version in option.versions:
                values[name] = default_of(option, version, of_file=True)
            continue
        if name == "reshard_after_forward" and version == 1:
            continue
        values[name] = _read(name, environ)
    _strategy_of_either(values, environ, version)
    return FSDPConfig.of(values)


def _strategy_of_either(values: dict[str, Any], environ: Mapping[str, str], version: int) -> None:
    """Under FSDP1 take the strategy from the variable that does not have the launcher's own value."""
    text = environ.get("FSDP_RESHARD_AFTER_FORWARD", "")
    if version != 1 or text.lower() in ("", "true"):
        return
    try:
        newer = read_value(OPTIONS["sharding_strategy"], text)
    except ValueError as error:
        raise UsageError(f"FSDP_RESHARD_AFTER_FORWARD={text} is not possible with FSDP_VERSION=1; {error}") from None
    older = values.get("sharding_strategy", "FULL_SHARD")
    if older not in ("FULL_SHARD", newer):
        raise UsageError(f"FSDP_RESHARD_AFTER_FORWARD={text} contradicts FSDP_SHARDING_STRATEGY={older}")
    values["sharding_strategy"] = newer


def _read(name: str, environ: Mapping[str, str]) -> Any:
    option = OPTIONS[name]
    assert option.variable is not None
    text = environ[option.variable]
    try:
        return read_value(option, text)
    except ValueError as error:
        raise UsageError(f"{option.variable}={text} is not possible; {error}") from None
