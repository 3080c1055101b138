"""FSDP and DeepSpeed ZeRO: from one configuration to the other, with a list of what has no counterpart.

The table of Accelerate's guide: FULL_SHARD is ZeRO-3, SHARD_GRAD_OP ZeRO-2, NO_SHARD ZeRO-0, HYBRID_SHARD ZeRO-3 with
``zero_hpz_partition_size`` (ZeRO++). DeepSpeed's own keys follow its "DeepSpeed Configuration JSON" reference.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdp_ckpt.config.document import Document, read_document
from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.config.fsdp2 import Conversion
from fsdp_ckpt.config.launch import LaunchConfig
from fsdp_ckpt.config.options import MixedPrecision
from fsdp_ckpt.config.rules import shown
from fsdp_ckpt.config.values import as_boolean, as_integer
from fsdp_ckpt.errors import Incompatible, UsageError

__all__ = ["DeepSpeedConversion", "from_deepspeed", "to_deepspeed", "to_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedConversion:
    """A DeepSpeed configuration.

    Attributes:
        document: What goes into its JSON file.
        changed: How each option was said in DeepSpeed's terms.
        dropped: Options without a counterpart, and what that means.
    """

    document: Mapping[str, Any]
    changed: tuple[str, ...]
    dropped: tuple[str, ...]


def to_deepspeed(config: LaunchConfig) -> DeepSpeedConversion:
    """Return the DeepSpeed configuration that does what this one does.

    Raises:
        UsageError: There are no FSDP options in it.
        Incompatible: HYBRID_SHARD_ZERO2, which no stage of ZeRO does.
    """
    if config.fsdp is None:
        raise UsageError(f"distributed_type: {config.distributed_type}: there are no FSDP options to convert")
    fsdp = config.fsdp
    changed: list[str] = []
    zero: dict[str, Any] = {"stage": _stage(fsdp, changed)}
    if fsdp.is_hybrid:
        per_machine = config.processes_per_machine()
        total = per_machine * config.num_machines
        size = fsdp.dp_shard_size or (total // fsdp.dp_replicate_size if fsdp.dp_replicate_size > 1 else per_machine)
        zero["zero_hpz_partition_size"] = size
        changed.append(f"whole copies over {size} ranks each: zero_hpz_partition_size: {size} (ZeRO++)")
    if fsdp.offload_params:
        if zero["stage"] == 3:
            zero["offload_param"] = {"device": "cpu"}
        if zero["stage"] > 0:
            zero["offload_optimizer"] = {"device": "cpu"}
            changed.append(
                "offload_params: true: offload_optimizer"
                + (", offload_param" if zero["stage"] == 3 else "")
                + " on cpu"
            )
    if fsdp.state_dict_type == "FULL_STATE_DICT" and zero["stage"] == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        changed.append(
            "state_dict_type: FULL_STATE_DICT: stage3_gather_16bit_weights_on_model_save: true (16 bit, not float32)"
        )
    document: dict[str, Any] = {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    if config.mixed_precision in ("bf16", "fp16"):
        document[config.mixed_precision] = {"enabled": True}
        changed.append(f"mixed_precision: {config.mixed_precision}: {config.mixed_precision}.enabled: true")
    return DeepSpeedConversion(
        document=document, changed=tuple(changed), dropped=tuple(_without_counterpart(fsdp, zero["stage"]))
    )


def _stage(fsdp: FSDPConfig, changed: list[str]) -> int:
    if fsdp.sharding_strategy == "HYBRID_SHARD_ZERO2" or (
        fsdp.fsdp_version == 2 and fsdp.is_hybrid and not fsdp.reshard_after_forward
    ):
        raise Incompatible(
            "HYBRID_SHARD_ZERO2 (whole copies, and parameters that stay whole after forward) has no counterpart: "
            "ZeRO++ cuts within a node only in stage 3",
            hint="use SHARD_GRAD_OP (stage 2) or HYBRID_SHARD (stage 3 with zero_hpz_partition_size)",
        )
    if fsdp.fsdp_version == 2:
        stage = 3 if fsdp.reshard_after_forward else 2
        changed.append(f"reshard_after_forward: {shown(fsdp.reshard_after_forward)}: ZeRO stage {stage}")
        return stage
    stage = {"FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}[str(fsdp.sharding_strategy)]
    changed.append(f"sharding_strategy: {fsdp.sharding_strategy}: ZeRO stage {stage}")
    return stage


def _without_counterpart(fsdp: FSDPConfig, stage: int) -> list[str]:
    dropped = []
    if fsdp.offload_params and stage == 0:
        dropped.append("offload_params: true: ZeRO stage 0 offloads nothing")
    if fsdp.offload_params and stage == 2:
        dropped.append(
            "offload_params: true: in ZeRO stage 2 parameters stay on the device; optimizer state is offloaded"
        )
    if fsdp.auto_wrap_policy != "NO_WRAP":
        dropped.append(f"auto_wrap_policy: {fsdp.auto_wrap_policy}: DeepSpeed chooses what is gathered together itself")
    for name in ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states"):
        value = getattr(fsdp, name)
        if value not in (None, False, "NO_PREFETCH"):
            dropped.append(f"{name}: {shown(value)}: DeepSpeed has no such switch")
    if fsdp.cpu_ram_efficient_loading:
        dropped.append(
            "cpu_ram_efficient_loading: true: in DeepSpeed this is zero.Init around making the model; Accelerate's "
            "YAML has zero3_init_flag"
        )
    if fsdp.activation_checkpointing:
        dropped.append(
            "activation_checkpointing: true: DeepSpeed needs the model's code to call its checkpoint function"
        )
    dropped += _without_key(fsdp)
    if fsdp.ignored_modules:
        dropped.append("ignored_modules: DeepSpeed shards every parameter")
    return dropped


def _without_key(fsdp: FSDPConfig) -> list[str]:
    dropped = []
    if fsdp.activation_checkpointing_offload:
        dropped.append(
            "activation_checkpointing_offload: true: cpu_checkpointing of DeepSpeed's own checkpoint function"
        )
    sizes = {name: getattr(fsdp, name) or 1 for name in ("tp_size", "cp_size")}
    dropped += [
        f"{n}: {size}: set up in the script or by DeepSpeed's own options" for n, size in sizes.items() if size > 1
    ]
    if fsdp.mixed_precision == "fp8":
        dropped.append("mixed_precision: fp8: DeepSpeed's file has bf16 and fp16 only")
    if fsdp.mixed_precision_policy:
        dropped.append("mixed_precision_policy: DeepSpeed's file has one precision for all")
    if fsdp.limit_all_gathers is False:
        dropped.append("limit_all_gathers: false: DeepSpeed has no such switch")
    return dropped


def to_json(conversion: DeepSpeedConversion) -> str:
    """Return the text of DeepSpeed's JSON file."""
    return json.dumps(dict(conversion.document), indent=2) + "\n"


def from_deepspeed(path: str | os.PathLike[str], *, num_processes: int | None = None) -> Conversion:
    """Return the FSDP configuration that does what a DeepSpeed configuration does: FSDP2, but for ZeRO stage 0.

    Args:
        path: DeepSpeed's JSON, or Accelerate's YAML with ``deepspeed_config``.
        num_processes: Ranks of the job, where the file does not say.

    Raises:
        UsageError: It is neither, or a value in it is not allowed.
        Incompatible: ZeRO stage 1, which no strategy of FSDP does.
    """
    document = read_document(path)
    dropped: list[str] = []
    if "distributed_type" in document.values:
        base, zero, precision = _of_accelerate(document, dropped)
    else:
        base, zero, precision = _of_json(document, dropped)
    if num_processes is not None:
        base = replace(base, num_processes=num_processes)
    changed: list[str] = []
    values: dict[str, Any] = {"mixed_precision": precision, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    values |= _of_stage(zero, document, changed)
    _offload(zero, values, changed, dropped)
    if _flag(zero, "stage3_gather_16bit_weights_on_model_save", document):
        values["state_dict_type"] = "FULL_STATE_DICT"
        changed.append("16-bit weights gathered when saving: state_dict_type: FULL_STATE_DICT (float32)")
    hpz = zero.get("zero_hpz_partition_size", 1)
    if hpz != 1:
        values |= _copies(as_integer(hpz, minimum=1), base, changed)
    known = {
        "stage",
        "offload_param",
        "offload_optimizer",
        "stage3_gather_16bit_weights_on_model_save",
        "zero_hpz_partition_size",
    }
    dropped += [f"zero_optimization.{key}: FSDP2 has no such switch" for key in zero if key not in known]
    config = replace(base, distributed_type="FSDP", mixed_precision=precision, fsdp=FSDPConfig.of(values))
    changed.append(
        "auto_wrap_policy: TRANSFORMER_BASED_WRAP with the model's _no_split_modules: DeepSpeed needs no such choice, "
        "FSDP does"
    )
    return Conversion(config=config, changed=tuple(changed), dropped=tuple(dropped))


def _of_json(document: Document, dropped: list[str]) -> tuple[LaunchConfig, dict[str, Any], MixedPrecision]:
    zero = document.section("zero_optimization")
    if not zero:
        raise UsageError(
            f"{document.name}: this is no DeepSpeed configuration: there is no zero_optimization in it",
            hint="give DeepSpeed's JSON, or Accelerate's YAML with distributed_type: DEEPSPEED",
        )
    names: tuple[MixedPrecision, ...] = ("bf16", "fp16")
    precision: MixedPrecision = next(
        (name for name in names if _flag(document.section(name), "enabled", document)), "no"
    )
    known = ("zero_optimization", "bf16", "fp16")
    for name in ("bf16", "fp16"):
        section = document.section(name)
        if section.get("enabled") == "auto":
            dropped.append(f"{name}.enabled: auto: the Trainer decides it; set mixed_precision here")
        dropped += [
            f"{name}.{key}: FSDP has no such option"
            for key, value in section.items()
            if key != "enabled" and value != "auto"
        ]
    if zero.get("stage3_gather_16bit_weights_on_model_save") == "auto":
        dropped.append(
            "stage3_gather_16bit_weights_on_model_save: auto: read as false, state_dict_type: SHARDED_STATE_DICT"
        )
    others = [key for key, value in document.values.items() if key not in known and value != "auto"]
    dropped += [f"{key}: set it in the training script; FSDP has no such option" for key in others]
    return LaunchConfig(distributed_type="FSDP", num_processes=None), zero, precision


def _of_accelerate(document: Document, dropped: list[str]) -> tuple[LaunchConfig, dict[str, Any], MixedPrecision]:
    from fsdp_ckpt.config.accelerate_yaml import read_config

    base = read_config(document.name)
    section = dict(base.carried.get("deepspeed_config") or {})
    if base.distributed_type != "DEEPSPEED" or not section:
        raise UsageError(
            f"{document.name}: this is no DeepSpeed configuration: distributed_type is {base.distributed_type}"
        )
    if "deepspeed_config_file" in section:
        raise UsageError(
            f"{document.name}: the settings are in {section['deepspeed_config_file']}",
            hint=f"fsdp-ckpt config from-deepspeed {section['deepspeed_config_file']} OUT",
        )
    zero: dict[str, Any] = {"stage": section.pop("zero_stage", 2)}
    for name in ("offload_param", "offload_optimizer"):
        device = section.pop(f"{name}_device", "none")
        if device != "none":
            zero[name] = {"device": device}
        if section.pop(f"{name}_nvme_path", None) is not None:
            dropped.append(f"{name}_nvme_path: FSDP offloads to CPU memory only")
    if section.pop("zero3_save_16bit_model", False):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    section.pop("zero3_init_flag", None)  # cpu_ram_efficient_loading, which is on by default
    dropped += [f"{key}: set it in the training script; FSDP has no such option" for key in section]
    carried = {key: value for key, value in base.carried.items() if key != "deepspeed_config"}
    return (
        replace(
            base,
            distributed_type="FSDP",
            fsdp=FSDPConfig(mixed_precision=base.mixed_precision),
            carried=carried,
            stated=frozenset(),
        ),
        zero,
        base.mixed_precision,
    )


def _flag(section: Mapping[str, Any], key: str, document: Document) -> bool:
    value = section.get(key, False)
    try:
        return False if value == "auto" else as_boolean(value)
    except ValueError as error:
        raise UsageError(f"{document.name}: {key}: {value!r} is not possible; {error}") from None


def _of_stage(zero: Mapping[str, Any], document: Document, changed: list[str]) -> dict[str, Any]:
    try:
        stage = as_integer(zero.get("stage", 0))
    except ValueError:
        stage = -1
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"{document.name}: stage: {zero.get('stage')!r} is not possible; allowed: 0, 1, 2, 3")
    if stage == 1:
        raise Incompatible(
            "ZeRO stage 1 has no counterpart: FSDP cuts gradients whenever it cuts optimizer state",
            hint="use stage 2, or DistributedDataParallel with ZeroRedundancyOptimizer",
        )
    if stage == 0:
        changed.append("ZeRO stage 0: sharding_strategy: NO_SHARD (FSDP1; FSDP2 always shards)")
        return {"fsdp_version": 1, "sharding_strategy": "NO_SHARD"}
    changed.append(f"ZeRO stage {stage}: reshard_after_forward: {shown(stage == 3)}")
    return {"reshard_after_forward": stage == 3}


def _offload(zero: Mapping[str, Any], values: dict[str, Any], changed: list[str], dropped: list[str]) -> None:
    """FSDP offloads parameters, gradients and optimizer state together, or nothing."""
    devices = {
        name: str((zero.get(name) or {}).get("device", "none")) for name in ("offload_param", "offload_optimizer")
    }
    used = {name: device for name, device in devices.items() if device != "none"}
    if not used:
        return
    values["offload_params"] = True
    named = ", ".join(f"{name} on {device}" for name, device in used.items())
    changed.append(f"{named}: offload_params: true (all of it, to CPU memory)")
    dropped += [f"{name}: nvme: FSDP offloads to CPU memory only" for name, device in used.items() if device == "nvme"]


def _copies(size: int, base: LaunchConfig, changed: list[str]) -> dict[str, Any]:
    if base.num_processes is None:
        raise UsageError(
            f"zero_hpz_partition_size: {size}: the number of copies follows from the number of processes, which is not "
            "known",
            hint="add --num-processes N",
        )
    if base.num_processes % size:
        raise UsageError(f"num_processes: {base.num_processes} does not divide by zero_hpz_partition_size: {size}")
    sizes = {"dp_replicate_size": base.num_processes // size, "dp_shard_size": size}
    changed.append(
        f"zero_hpz_partition_size: {size}: dp_replicate_size: {sizes['dp_replicate_size']} x dp_shard_size: {size}"
    )
    return sizes
