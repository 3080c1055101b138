"""``FSDPConfig``: how a model is sharded, checked as a whole when it is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from fsdp_ckpt.config.options import (
    OPTIONS,
    BackwardPrefetch,
    MixedPrecision,
    Option,
    ShardingStrategy,
    StateDictType,
    WrapPolicy,
    default_of,
)
from fsdp_ckpt.config.rules import check_rules, check_version
from fsdp_ckpt.config.values import as_boolean, as_choice, as_integer, as_names, as_text, closest, is_unset
from fsdp_ckpt.errors import UsageError

__all__ = ["FSDPConfig", "read_value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPConfig:
    """How a model is sharded, free of contradictions: what is wrong is raised here, not at the first save.

    Values are given as names in any case, as the numbers of Accelerate's guide, or as torch's enumeration members; what
    is not given gets a default. An option that the FSDP version lacks is None; giving it is an error, unless it says
    what that version does anyway.

    ``docs/configuration.md`` lists every option with its meaning, default, YAML key and environment variable.

    Raises:
        UsageError: A value that is not allowed, or options that contradict each other; says what is allowed.

    Example:
        >>> config = FSDPConfig(fsdp_version=1, sharding_strategy="shard_grad_op", min_num_params="1e6")
        >>> config.sharding_strategy, config.min_num_params, config.reshard_after_forward
        ('SHARD_GRAD_OP', 1000000, None)
    """

    fsdp_version: int = 2
    sharding_strategy: ShardingStrategy | None = None
    reshard_after_forward: bool | None = None
    offload_params: bool = False
    auto_wrap_policy: WrapPolicy = "TRANSFORMER_BASED_WRAP"
    transformer_layer_cls_to_wrap: tuple[str, ...] = ()
    min_num_params: int = 100_000_000
    backward_prefetch: BackwardPrefetch | None = None
    forward_prefetch: bool | None = None
    state_dict_type: StateDictType = "SHARDED_STATE_DICT"
    use_orig_params: bool | None = None
    cpu_ram_efficient_loading: bool = True
    sync_module_states: bool | None = None
    activation_checkpointing: bool = False
    activation_checkpointing_offload: bool | None = None
    ignored_modules: str | None = None
    limit_all_gathers: bool | None = None
    mixed_precision: MixedPrecision = "no"
    mixed_precision_policy: Mapping[str, str] | None = None
    dp_replicate_size: int = 1
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None

    def __post_init__(self) -> None:
        version = check_version(_parse(OPTIONS["fsdp_version"], self.fsdp_version))
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if version == 1:
            _strategy_of_one_field(given)
        values = {}
        for name, option in OPTIONS.items():
            value = given[name]
            values[name] = default_of(option, version) if is_unset(value) else _parse(option, value)
        for name, value in check_rules(values, given).items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Make one from a dictionary by field names; a name that is not known is an error.

        Raises:
            UsageError: An unknown name, with the closest known one; or as ``FSDPConfig``.
        """
        for name in values:
            if name not in OPTIONS:
                near = closest(name, OPTIONS)
                raise UsageError(f"there is no option `{name}`" + (f"; did you mean `{near}`?" if near else ""))
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> FSDPConfig:
        """Read Accelerate's YAML; ``fsdp_ckpt.config.accelerate_yaml.read_config`` gives the whole job.

        Raises:
            UsageError: It is not there, wrong, or has no ``fsdp_config``; says where.
        """
        from fsdp_ckpt.config.accelerate_yaml import read_config

        config = read_config(path)
        if config.fsdp is None:
            raise UsageError(f"{path}: distributed_type: {config.distributed_type}: there is no fsdp_config")
        return config.fsdp

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> FSDPConfig:
        """Read what ``fsdp-ckpt launch`` or ``accelerate launch`` has set.

        Args:
            environ: Variables; those of the process when None.

        Raises:
            UsageError: There are none, or they are wrong.
        """
        from fsdp_ckpt.config.environment import fsdp_of_environment

        return fsdp_of_environment(os.environ if environ is None else environ)

    @property
    def is_hybrid(self) -> bool:
        """Whether there are several whole copies, each of them sharded (HSDP)."""
        return self.dp_replicate_size > 1 or (self.sharding_strategy or "").startswith("HYBRID")


def _strategy_of_one_field(given: dict[str, Any]) -> None:
    """Under FSDP1 ``reshard_after_forward`` is the newer name of the strategy; Accelerate reads it and ignores it."""
    newer, older = given["reshard_after_forward"], given["sharding_strategy"]
    if is_unset(newer):
        return
    strategy = _parse(OPTIONS["sharding_strategy"], newer, key="reshard_after_forward (fsdp_version 1)")
    if not is_unset(older) and _parse(OPTIONS["sharding_strategy"], older) != strategy:
        raise UsageError(
            f"reshard_after_forward is {newer} and sharding_strategy is {older}: under FSDP1 both name the strategy",
            hint="give one of them",
        )
    given["sharding_strategy"], given["reshard_after_forward"] = strategy, None


def _parse(option: Option, value: Any, *, key: str | None = None) -> Any:
    try:
        return read_value(option, value)
    except ValueError as error:
        raise UsageError(f"{key or option.name}: {value!r} is not possible; {error}") from None


def read_value(option: Option, value: Any) -> Any:
    """Read the value of an option.

    Raises:
        ValueError: It is not allowed; the text says what is.
    """
    if option.name == "mixed_precision" and value is False:
        value = "no"  # what YAML makes of an unquoted `no`
    match option.kind:
        case "boolean":
            return as_boolean(value)
        case "integer":
            return as_integer(value, minimum=option.minimum)
        case "choice":
            return as_choice(value, option.choices, first=0 if option.name == "mixed_precision" else 1)
        case "names":
            return as_names(value)
        case "text":
            return as_text(value)
        case "mapping":
            if not isinstance(value, Mapping):
                raise ValueError("allowed: a dictionary of data types by name")  # noqa: TRY004  # as for all kinds
            return dict(value)
