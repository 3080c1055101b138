"""What is given on the command line goes before what a file says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from fsdp_ckpt.config.fsdp import FSDPConfig, read_value
from fsdp_ckpt.config.fsdp2 import to_fsdp2
from fsdp_ckpt.config.launch import LaunchConfig
from fsdp_ckpt.config.notes import notes_on
from fsdp_ckpt.config.options import OPTIONS, Option
from fsdp_ckpt.config.values import closest
from fsdp_ckpt.errors import UsageError

__all__ = ["override", "read_settings"]


def read_settings(texts: Sequence[str], *, in_process: bool = False) -> dict[str, Any]:
    """Read ``NAME=VALUE`` texts into values of ``FSDPConfig`` by field name.

    A name may have Accelerate's prefix: ``fsdp_offload_params`` is ``offload_params``.

    Args:
        texts: They.
        in_process: Allow options that neither files nor variables can carry, such as ``limit_all_gathers``.

    Raises:
        UsageError: A text of another form, an unknown name, or a value that is not allowed.
    """
    result = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"--set {text}: allowed: NAME=VALUE", hint="--set offload_params=true")
        option = _option(name.strip())
        if option.section is None and not in_process:
            raise UsageError(
                f"--set {option.name}: neither a file nor a variable carries it to a script",
                hint=f"in the script: FSDPConfig({option.name}=…)",
            )
        try:
            result[option.name] = read_value(option, value.strip())
        except ValueError as error:
            raise UsageError(f"--set {name}: {value!r} is not possible; {error}") from None
    return result


def _option(name: str) -> Option:
    by_name = {known: option for option in OPTIONS.values() for known in (option.key, *option.aliases) if known}
    by_name |= {known.removeprefix("fsdp_"): option for known, option in by_name.items()} | dict(OPTIONS)
    if name in by_name and by_name[name].kind != "mapping":
        return by_name[name]
    known = [option.name for option in OPTIONS.values() if option.kind != "mapping"]
    near = closest(name, known)
    raise UsageError(
        f"--set {name}: there is no such option" + (f"; did you mean {near}?" if near else ""),
        hint=f"known options: {', '.join(known)}",
    )


def override(config: LaunchConfig, settings: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> LaunchConfig:
    """Return a configuration with some values replaced.

    Args:
        config: What a file says.
        settings: Values of ``FSDPConfig`` by field name, ``mixed_precision`` among them; another
            ``fsdp_version`` converts the rest as ``to_fsdp2`` does.
        job: Other values of ``LaunchConfig`` by field name; None says nothing.

    Raises:
        UsageError: The result contradicts itself, or there is no FSDP in it to set.
    """
    given = {name: value for name, value in (job or {}).items() if value is not None}
    settings = dict(settings)
    origins = dict(config.origins)
    origins |= dict.fromkeys(settings, "--set") | {name: f"--{name.replace('_', '-')}" for name in given}
    if config.fsdp is None:
        precision = settings.pop("mixed_precision", config.mixed_precision)
        if settings:
            raise UsageError(
                f"--set {next(iter(settings))}: distributed_type is {config.distributed_type}, there is no FSDP to set"
            )
        return replace(config, **{**given, "mixed_precision": precision}, origins=origins)
    fsdp = _replaced(_of_version(config, settings.get("fsdp_version")), settings)
    new = replace(config, **{**given, "mixed_precision": fsdp.mixed_precision, "fsdp": fsdp}, origins=origins)
    return replace(new, notes=notes_on(new))


def _of_version(config: LaunchConfig, version: int | None) -> FSDPConfig:
    """Return the FSDP options as another version has them: with the same sharding, not with its defaults."""
    assert config.fsdp is not None
    if version in (None, config.fsdp.fsdp_version):
        return config.fsdp
    if version == 2:
        converted = to_fsdp2(config).config.fsdp
        assert converted is not None
        return converted
    old = config.fsdp
    names = [name for name, option in OPTIONS.items() if 1 in option.versions and 2 in option.versions]
    strategy = (
        ("HYBRID_SHARD" if old.reshard_after_forward else "HYBRID_SHARD_ZERO2")
        if old.is_hybrid
        else ("FULL_SHARD" if old.reshard_after_forward else "SHARD_GRAD_OP")
    )
    return FSDPConfig.of(
        {name: getattr(old, name) for name in names}
        | {"fsdp_version": 1, "sharding_strategy": strategy, "tp_size": old.tp_size, "cp_size": old.cp_size}
    )


def _replaced(old: FSDPConfig, settings: Mapping[str, Any]) -> FSDPConfig:
    """Replace values; what is given together with another version is that version's."""
    return FSDPConfig.of({**{field.name: getattr(old, field.name) for field in fields(old)}, **settings})
