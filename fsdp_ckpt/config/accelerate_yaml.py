"""Accelerate's YAML: read with the line of every value, and written so that Accelerate reads it back.

Follows ``accelerate/commands/config/{config_args,cluster}.py`` and ``commands/launch.py`` of Accelerate 1.15. Unlike
there, an unknown key inside ``fsdp_config`` is an error, as is a key that is there twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from fsdp_ckpt.config.document import Document, read_document
from fsdp_ckpt.config.fsdp import FSDPConfig, read_value
from fsdp_ckpt.config.launch import LaunchConfig
from fsdp_ckpt.config.notes import notes_on
from fsdp_ckpt.config.options import MIXED_PRECISIONS, OPTIONS, Option, default_of
from fsdp_ckpt.config.values import as_boolean, as_choice, as_integer, as_text, closest, is_unset
from fsdp_ckpt.errors import UsageError

__all__ = ["read_config", "to_document", "to_yaml"]

_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
_BOOLEANS = ("same_network", "use_cpu", "debug", "enable_cpu_affinity")
_TEXTS = ("main_process_ip", "rdzv_backend", "gpu_ids", "main_training_function")
_NUMBERS = {"num_machines": 1, "machine_rank": 0, "main_process_port": 0}
_CARRIED = (
    "compute_environment", "fp8_config", "deepspeed_config", "megatron_lm_config", "mpirun_config", "downcast_bf16",
    "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env",
    "dynamo_config",
)  # fmt: skip
_OWN = ("distributed_type", "num_processes", "mixed_precision", "fsdp_config", "parallelism_config")
_TOP = (*_OWN, *_BOOLEANS, *_TEXTS, *_NUMBERS, *_CARRIED)
_PARALLELISM_OTHERS = frozenset(
    f"parallelism_config_{name}"
    for name in (
        "cp_backend", "cp_comm_strategy", "sp_size", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable",
        "sp_attn_implementation",
    )
)  # fmt: skip
# Written only where they say something, as `accelerate config` never asks for them.
_RARE = ("activation_checkpointing_offload", "ignored_modules")


def read_config(path: str | os.PathLike[str]) -> LaunchConfig:
    """Read a configuration file of Accelerate's, or of ours: the same.

    What the file does not say means what it means to ``accelerate launch``: ``fsdp_version`` 1, for one.

    Raises:
        UsageError: An unknown key, a value that is not allowed, or keys that contradict each other; says file, line,
            key, value and what is allowed.
    """
    document = read_document(path)
    _check_top(document)
    fields: dict[str, Any] = {"origins": {}, "carried": {}}
    for key, value in document.values.items():
        if key in _CARRIED:
            fields["carried"][key] = value
        elif key not in ("fsdp_config", "parallelism_config") and not is_unset(value):
            fields[key] = _top_value(document, key, value)
            fields["origins"][key] = document.place(key)
    fields.setdefault("same_network", False)
    fields.setdefault("num_processes", None if fields["distributed_type"] == "FSDP" else 1)
    fields["stated"] = frozenset(document.lines)
    try:
        _read_fsdp(document, fields)
        config = LaunchConfig(**fields)
    except UsageError as error:
        raise _placed(document, error) from None
    return _with_notes(config)


def _with_notes(config: LaunchConfig) -> LaunchConfig:
    from dataclasses import replace

    return replace(config, notes=notes_on(config))


def _check_top(document: Document) -> None:
    for key in document.values:
        if key not in _TOP:
            near = closest(str(key), _TOP)
            raise UsageError(
                f"{document.place(str(key))}: {key} is no key of a configuration"
                + (f"; did you mean {near}?" if near else ""),
                hint=f"known keys: {', '.join(_TOP)}",
            )
    if "distributed_type" not in document.values:
        raise UsageError(f"{document.name}: distributed_type is missing", hint="add distributed_type: FSDP")
    if document.values.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise UsageError(
            f"{document.place('compute_environment')}: compute_environment: "
            f"{document.values['compute_environment']} is not possible here; allowed: LOCAL_MACHINE"
        )


def _top_value(document: Document, key: str, value: Any) -> Any:
    try:
        if key in _BOOLEANS:
            return as_boolean(value)
        if key in _TEXTS:
            return as_text(str(value) if isinstance(value, int | float) and key == "gpu_ids" else value)
        if key in _NUMBERS:
            return as_integer(value, minimum=_NUMBERS[key])
        if key == "num_processes":
            return None if str(value).strip() == "-1" else as_integer(value, minimum=1)
        if key == "mixed_precision":
            return as_choice("no" if value is False else value, MIXED_PRECISIONS, first=0)
        return as_choice("NO" if value is False else value, _TYPES, first=0)
    except ValueError as error:
        raise UsageError(f"{document.place(key)}: {key}: {value!r} is not possible; {error}") from None


def _read_fsdp(document: Document, fields: dict[str, Any]) -> None:
    """Read both sections that shard the model into ``fields``."""
    if fields["distributed_type"] != "FSDP":
        for section in ("fsdp_config", "parallelism_config"):
            if document.section(section):
                raise UsageError(
                    f"{document.place(section)}: {section} has no effect with distributed_type: "
                    f"{fields['distributed_type']}",
                    hint="set distributed_type: FSDP, or leave the section out",
                )
        fields["fsdp"] = None
        return
    values: dict[str, Any] = {"mixed_precision": fields.get("mixed_precision", "no")}
    origins: dict[str, str] = fields["origins"]
    version = _version(document)
    for section in ("fsdp_config", "parallelism_config"):
        for key, value in document.section(section).items():
            label = f"{section}.{key}"
            if key in _PARALLELISM_OTHERS and section == "parallelism_config":
                fields.setdefault("parallelism", {})[key] = value
                continue
            option = _option(document, section, str(key), version)
            if is_unset(value):
                continue
            read = _read_placed(document, label, option, value)
            if option.name in values and values[option.name] != read:
                raise UsageError(
                    f"{document.place(label)}: {key}: {value} contradicts {origins[option.name]}: "
                    f"{values[option.name]}; both are {option.name}"
                )
            values[option.name] = read
            origins[option.name] = document.place(label)
    for name, option in OPTIONS.items():
        if option.file_default is not None and name not in values and version in option.versions:
            values[name] = default_of(option, version, of_file=True)
            origins[name] = "what Accelerate takes when a file does not say"
    fields["fsdp"] = FSDPConfig.of(values)


def _version(document: Document) -> int:
    section = document.section("fsdp_config")
    for key in ("fsdp_version", "version"):
        if not is_unset(section.get(key)):
            return int(_read_placed(document, f"fsdp_config.{key}", OPTIONS["fsdp_version"], section[key]))
    return int(default_of(OPTIONS["fsdp_version"], 1, of_file=True))


def _option(document: Document, section: str, key: str, version: int) -> Option:
    """Return the option that a key of a section means, with or without ``fsdp_`` before it."""
    prefix = "fsdp_" if section == "fsdp_config" else "parallelism_config_"
    full = key if key.startswith(prefix) else f"{prefix}{key}"
    fitting = [o for o in OPTIONS.values() if o.section == section and full in (o.key, *o.aliases)]
    for option in fitting:
        if version in option.versions:
            return option
    if fitting:
        return fitting[0]
    known = [key for option in OPTIONS.values() if option.section == section for key in (option.key, *option.aliases)]
    near = closest(full, known)
    raise UsageError(
        f"{document.place(f'{section}.{key}')}: {key} is no key of {section}"
        + (f"; did you mean {near}?" if near else ""),
        hint=f"known keys: {', '.join(dict.fromkeys(known))}",
    )


def _read_placed(document: Document, label: str, option: Option, value: Any) -> Any:
    try:
        return read_value(option, value)
    except ValueError as error:
        key = label.partition(".")[2]
        raise UsageError(f"{document.place(label)}: {key}: {value!r} is not possible; {error}") from None


def _placed(document: Document, error: UsageError) -> UsageError:
    """Say in which file, and where known on which line, a contradiction is."""
    message = error.message
    if message.startswith(f"{document.name}:"):
        return error
    name = message.partition(":")[0]
    option = OPTIONS.get(name)
    labels = [name, *(f"{option.section}.{key}" for key in (option.key, *option.aliases))] if option else [name]
    place = next((document.place(label) for label in labels if label in document.lines), document.name)
    return UsageError(f"{place}: {message}", hint=error.hint)


def to_document(config: LaunchConfig) -> dict[str, Any]:
    """Return a configuration as Accelerate's keys and values."""
    top = {key: getattr(config, key) for key in (*_BOOLEANS, *_TEXTS, *_NUMBERS, "num_processes", "mixed_precision")}
    top["num_processes"] = -1 if config.num_processes is None else config.num_processes
    result: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": config.distributed_type,
        **{key: value for key, value in top.items() if value is not None},
        **config.carried,
    }
    if config.fsdp is not None:
        result["fsdp_config"] = dict(_fsdp_items(config, config.fsdp))
        sizes = dict(_size_items(config, config.fsdp))
        if sizes or config.parallelism:
            result["parallelism_config"] = {**sizes, **config.parallelism}
    return result


def _fsdp_items(config: LaunchConfig, fsdp: FSDPConfig) -> Iterator[tuple[str, Any]]:
    for name, option in OPTIONS.items():
        value = getattr(fsdp, name)
        if option.section != "fsdp_config" or value is None:
            continue
        if name in _RARE and value == default_of(option, fsdp.fsdp_version):
            continue
        if name == "sharding_strategy":
            yield from _strategy_items(config, value)
        elif name == "transformer_layer_cls_to_wrap":
            if value or _is_stated(config, option.key):  # Enter in `accelerate config` writes an empty text
                yield option.key, ",".join(value)
        elif name != "min_num_params" or fsdp.auto_wrap_policy == "SIZE_BASED_WRAP":
            yield option.key, value


def _strategy_items(config: LaunchConfig, strategy: str) -> Iterator[tuple[str, str]]:
    """Name the strategy by the keys that the file had.

    A new file has both: Accelerate's launcher reads the older key alone, its ``config`` writes the newer one alone.
    """
    option = OPTIONS["sharding_strategy"]
    keys = [key for key in (option.key, *option.aliases) if _is_stated(config, key)]
    for key in keys or (option.key, *option.aliases):
        yield key, strategy


def _is_stated(config: LaunchConfig, key: str) -> bool:
    return bool({f"fsdp_config.{key}", f"fsdp_config.{key.removeprefix('fsdp_')}"} & config.stated)


def _size_items(config: LaunchConfig, fsdp: FSDPConfig) -> Iterator[tuple[str, Any]]:
    """Give all sizes, or none when none of them says anything."""
    sizes = {o.key: (getattr(fsdp, n), o) for n, o in OPTIONS.items() if o.section == "parallelism_config"}
    wanted = config.parallelism or any(
        f"parallelism_config.{key}" in config.stated or value != default_of(option, fsdp.fsdp_version)
        for key, (value, option) in sizes.items()
    )
    if wanted:
        yield from ((key, value) for key, (value, _) in sizes.items() if value is not None)


def to_yaml(config: LaunchConfig) -> str:
    """Return a configuration as the text of a file, in the order and form of ``accelerate config``."""
    import yaml

    return str(yaml.safe_dump(to_document(config)))
