"""Data types of computation, of reduced gradients, and of what is kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _BatchNorm

from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.sharding.units import Unit, unit_of_modules

__all__ = ["dtypes", "for_fsdp1", "for_fsdp2", "keep_full_precision", "set_norms_apart"]

_log = logging.getLogger("fsdp_ckpt")

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def dtypes(config: FSDPConfig) -> Mapping[str, torch.dtype]:
    """Return data types by the name that torch has for them (``param_dtype``, …); none without mixed precision.

    ``mixed_precision`` sets all of them, as Accelerate does; a ``mixed_precision_policy`` replaces it.

    Raises:
        UsageError: fp8.
    """
    if config.mixed_precision_policy is not None:
        return {name: getattr(torch, value) for name, value in config.mixed_precision_policy.items()}
    if config.mixed_precision == "no":
        return {}
    if config.mixed_precision == "fp8":
        raise UsageError(
            "mixed_precision: fp8 is not something that FSDP does: it is a property of the model's layers",
            hint="convert the layers with torchao (convert_to_float8_training) before wrap, and set "
            "mixed_precision: bf16",
        )
    names = ("param_dtype", "reduce_dtype", "buffer_dtype" if config.fsdp_version == 1 else "output_dtype")
    return dict.fromkeys(names, _DTYPES[config.mixed_precision])


def for_fsdp1(config: FSDPConfig) -> MixedPrecision | None:
    """Return the policy of ``FullyShardedDataParallel``; None without mixed precision."""
    chosen: Mapping[str, Any] = dtypes(config)
    return MixedPrecision(**chosen) if chosen else None


def for_fsdp2(config: FSDPConfig) -> MixedPrecisionPolicy:
    """Return the policy of ``fully_shard``."""
    chosen: Mapping[str, Any] = dtypes(config)
    return MixedPrecisionPolicy(**chosen)


def keep_full_precision(
    model: nn.Module, config: FSDPConfig, units: Sequence[Unit], ignored: Sequence[nn.Module] = ()
) -> list[str]:
    """Make parameters that are trained float32 when computation is not; return the names of those that were less.

    Updates that are small beside their weights are lost in 16 bits; what is saved is float32, too. Under FSDP1
    parameters that are not trained follow those of their unit that are, as a unit has one dtype. Modules that are
    ignored stay as they are: nothing would cast them for computation.
    """
    if dtypes(config).get("param_dtype") not in _DTYPES.values():
        return []
    owner = unit_of_modules(model, units)
    left_out = set(ignored)
    own = [(name, module, param) for name, module, param in _params(model) if module not in left_out]
    trained = {owner[module] for _, module, param in own if param.requires_grad}
    raised = []
    for name, module, param in own:
        follows = config.fsdp_version == 1 and owner[module] in trained
        if (param.requires_grad or follows) and param.dtype in _DTYPES.values():
            param.data = param.data.to(torch.float32)
            raised.append(name)
    if raised:
        _log.info(
            "%d parameters, `%s` the first of them, are kept and saved in float32 (mixed precision)",
            len(raised),
            raised[0],
        )
    return raised


def set_norms_apart(
    model: nn.Module, config: FSDPConfig, units: Sequence[Unit], ignored: Sequence[nn.Module] = ()
) -> list[Unit]:
    """Make batch norms units that compute in float32, as torch's own policies do; return all units.

    Their running statistics would be rounded away in 16 bits.
    """
    if not any(dtype in _DTYPES.values() for dtype in dtypes(config).values()):
        return list(units)
    left_out = set(ignored)
    found = [
        Unit(name=name, module=module, full_precision=True)
        for name, module in model.named_modules()
        if name and isinstance(module, _BatchNorm) and module not in left_out
    ]
    for unit in found:
        _compute_in_float32(unit.module)
    modules = {unit.module for unit in found}
    return found + [unit for unit in units if unit.module not in modules]


def _compute_in_float32(module: nn.Module) -> None:
    """Cast what goes into a module, and what comes out back to what went in."""
    given: list[torch.dtype] = []

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        given[:] = [arg.dtype for arg in args if isinstance(arg, Tensor)]
        return tuple(arg.float() if isinstance(arg, Tensor) else arg for arg in args)

    def after(_: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return output.to(given[0]) if given and isinstance(output, Tensor) else output

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _params(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    for module_name, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            yield f"{module_name}.{name}" if module_name else name, module, param
