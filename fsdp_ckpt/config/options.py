"""Every option of an FSDP setup, described once: reading, checking, the wizard and the reference follow this table.

Meanings and defaults follow torch 2.6 to 2.13 (``torch.distributed.fsdp``) and Accelerate 1.15
(``FullyShardedDataParallelPlugin``, ``accelerate launch``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "BACKWARD_PREFETCHES",
    "MIXED_PRECISIONS",
    "OPTIONS",
    "SHARDING_STRATEGIES",
    "STATE_DICT_TYPES",
    "WRAP_POLICIES",
    "BackwardPrefetch",
    "MixedPrecision",
    "Option",
    "ShardingStrategy",
    "StateDictType",
    "WrapPolicy",
    "default_of",
]

ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
WrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
BackwardPrefetch = Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
StateDictType = Literal["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
MixedPrecision = Literal["no", "fp16", "bf16", "fp8"]

# In the order of the numbers by which the guide, `accelerate config` and torch's enumerations call them.
SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
BACKWARD_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
STATE_DICT_TYPES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
MIXED_PRECISIONS = ("no", "fp16", "bf16", "fp8")

Kind = Literal["boolean", "integer", "choice", "names", "text", "mapping"]
Section = Literal["fsdp_config", "parallelism_config", "top"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        name: Field of ``FSDPConfig``.
        kind: How its value is read.
        meaning: What it does, in one or two sentences.
        choices: Allowed names; numbers count from 1.
        minimum: Smallest number allowed.
        section: Where Accelerate's YAML has it; None where it has no key and the option is for Python only.
        key: Its key there.
        aliases: Other keys that mean it.
        variable: Environment variable that ``accelerate launch`` sets; None where there is none.
        versions: FSDP versions that have it.
        default: Of ``FSDPConfig()``; by FSDP version where they differ.
        file_default: What a file of Accelerate's that does not mention it means; None where that is the default.
        torch: What it becomes in torch.
        deepspeed: DeepSpeed's counterpart.
    """

    name: str
    kind: Kind
    meaning: str
    choices: tuple[str, ...] = ()
    minimum: int = 0
    section: Section | None = "fsdp_config"
    key: str = ""
    aliases: tuple[str, ...] = ()
    variable: str | None = None
    versions: tuple[int, ...] = (1, 2)
    default: Any = None
    file_default: Any = None
    torch: str = ""
    deepspeed: str = "none"


OPTIONS: Mapping[str, Option] = {
    option.name: option
    for option in (
        Option(
            name="fsdp_version",
            kind="integer",
            minimum=1,
            meaning="1 is `FullyShardedDataParallel`, which wraps modules and flattens parameters; 2 is `fully_shard`, "
            "which keeps every parameter as a DTensor.",
            key="fsdp_version",
            variable="FSDP_VERSION",
            default=2,
            file_default=1,
            torch="the class or the function",
        ),
        Option(
            name="sharding_strategy",
            kind="choice",
            choices=SHARDING_STRATEGIES,
            meaning="What is cut: FULL_SHARD cuts parameters, gradients and optimizer state; SHARD_GRAD_OP keeps "
            "parameters whole between forward and backward; NO_SHARD is DDP; HYBRID_SHARD and HYBRID_SHARD_ZERO2 are "
            "the first two within a node, with a whole copy per node.",
            key="fsdp_reshard_after_forward",
            aliases=("fsdp_sharding_strategy",),
            variable="FSDP_SHARDING_STRATEGY",
            versions=(1,),
            default="FULL_SHARD",
            torch="`sharding_strategy`",
            deepspeed="`zero_optimization.stage`: FULL_SHARD 3, SHARD_GRAD_OP 2, NO_SHARD 0, HYBRID_SHARD 3 with "
            "`zero_hpz_partition_size` = GPUs per node",
        ),
        Option(
            name="reshard_after_forward",
            kind="boolean",
            meaning="Free the gathered parameters after forward and gather them again for backward: true is what "
            "FULL_SHARD does, false what SHARD_GRAD_OP does.",
            key="fsdp_reshard_after_forward",
            variable="FSDP_RESHARD_AFTER_FORWARD",
            versions=(2,),
            default=True,
            torch="`reshard_after_forward`",
            deepspeed="`zero_optimization.stage`: true 3, false 2",
        ),
        Option(
            name="offload_params",
            kind="boolean",
            meaning="Keep parameters and gradients in CPU memory while they are not in use; the optimizer step runs "
            "on the CPU.",
            key="fsdp_offload_params",
            variable="FSDP_OFFLOAD_PARAMS",
            default=False,
            torch="`CPUOffload` / `CPUOffloadPolicy`",
            deepspeed="`offload_param.device` and `offload_optimizer.device`: cpu",
        ),
        Option(
            name="auto_wrap_policy",
            kind="choice",
            choices=WRAP_POLICIES,
            meaning="Which modules become units that are gathered together: the layers of some classes, modules of "
            "some size, or only the model as a whole.",
            key="fsdp_auto_wrap_policy",
            variable="FSDP_AUTO_WRAP_POLICY",
            default="TRANSFORMER_BASED_WRAP",
            file_default="NO_WRAP",
            torch="`auto_wrap_policy`; for FSDP2 the modules that `fully_shard` is called on",
        ),
        Option(
            name="transformer_layer_cls_to_wrap",
            kind="names",
            meaning="Class names of the layers, for TRANSFORMER_BASED_WRAP; upper and lower case count. Without any, "
            "the model's `_no_split_modules`.",
            key="fsdp_transformer_layer_cls_to_wrap",
            aliases=("fsdp_transformer_cls_to_wrap", "fsdp_transformer_cls_names_to_wrap"),
            variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
            default=(),
            torch="`transformer_auto_wrap_policy(transformer_layer_cls=…)`",
        ),
        Option(
            name="min_num_params",
            kind="integer",
            meaning="Least number of parameters of a unit, for SIZE_BASED_WRAP.",
            key="fsdp_min_num_params",
            variable="FSDP_MIN_NUM_PARAMS",
            default=100_000_000,
            torch="`size_based_auto_wrap_policy(min_num_params=…)`",
        ),
        Option(
            name="backward_prefetch",
            kind="choice",
            choices=BACKWARD_PREFETCHES,
            meaning="When the next unit is gathered in backward: before the current one's gradients (fastest, most "
            "memory), after them, or not ahead at all.",
            key="fsdp_backward_prefetch",
            aliases=("fsdp_backward_prefetch_policy",),
            variable="FSDP_BACKWARD_PREFETCH",
            versions=(1,),
            default="BACKWARD_PRE",
            file_default="NO_PREFETCH",
            torch="`backward_prefetch`; FSDP2 always does what BACKWARD_PRE does",
        ),
        Option(
            name="forward_prefetch",
            kind="boolean",
            meaning="Gather the next unit while the current one runs forward; only for models that run their modules "
            "in the same order every time.",
            key="fsdp_forward_prefetch",
            variable="FSDP_FORWARD_PREFETCH",
            versions=(1,),
            default=False,
            torch="`forward_prefetch`",
        ),
        Option(
            name="state_dict_type",
            kind="choice",
            choices=STATE_DICT_TYPES,
            meaning="What `save_state` writes: one whole file, FSDP1's flat parameters, or a file per rank.",
            key="fsdp_state_dict_type",
            variable="FSDP_STATE_DICT_TYPE",
            default="SHARDED_STATE_DICT",
            file_default={1: "FULL_STATE_DICT", 2: "SHARDED_STATE_DICT"},
            torch="`state_dict_type=` of `save_state`",
            deepspeed="FULL_STATE_DICT: `stage3_gather_16bit_weights_on_model_save`; otherwise DeepSpeed's own shards",
        ),
        Option(
            name="use_orig_params",
            kind="boolean",
            meaning="Show the model's own parameters instead of flat ones: needed for param groups and for frozen "
            "beside trained parameters. FSDP2 always does.",
            key="fsdp_use_orig_params",
            variable="FSDP_USE_ORIG_PARAMS",
            versions=(1,),
            default=True,
            torch="`use_orig_params`",
        ),
        Option(
            name="cpu_ram_efficient_loading",
            kind="boolean",
            meaning="Only rank 0 has to hold the initial weights; the other ranks may have them on the meta device, "
            "and get their shards from rank 0. FSDP1 needs `sync_module_states` for it.",
            key="fsdp_cpu_ram_efficient_loading",
            variable="FSDP_CPU_RAM_EFFICIENT_LOADING",
            default=True,
            torch="`sync_module_states` and `param_init_fn`; for FSDP2 a scatter from rank 0",
            deepspeed="`zero3_init_flag` of Accelerate (`zero.Init`)",
        ),
        Option(
            name="sync_module_states",
            kind="boolean",
            meaning="Broadcast rank 0's parameters and buffers while wrapping, so that all ranks begin alike.",
            key="fsdp_sync_module_states",
            variable="FSDP_SYNC_MODULE_STATES",
            versions=(1,),
            default=True,
            torch="`sync_module_states`",
        ),
        Option(
            name="activation_checkpointing",
            kind="boolean",
            meaning="Keep only the inputs of each unit in forward, and compute the rest again in backward: less "
            "memory, about a third more time.",
            key="fsdp_activation_checkpointing",
            variable="FSDP_ACTIVATION_CHECKPOINTING",
            default=False,
            torch="`checkpoint_wrapper` around every unit",
            deepspeed="`activation_checkpointing` (needs the model's cooperation)",
        ),
        Option(
            name="activation_checkpointing_offload",
            kind="boolean",
            meaning="Keep those inputs in CPU memory. Needs `activation_checkpointing`.",
            key="fsdp_activation_checkpointing_offload",
            variable="FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
            versions=(2,),
            default=False,
            torch="`save_on_cpu` around the inputs of every unit",
            deepspeed="`activation_checkpointing.cpu_checkpointing`",
        ),
        Option(
            name="ignored_modules",
            kind="text",
            meaning="Modules that are left whole on every rank: a regular expression that matches their full names. "
            "FSDP does not reduce their gradients: freeze them, or reduce these in the training loop.",
            key="fsdp_ignored_modules",
            variable="FSDP_IGNORED_MODULES",
            torch="`ignored_states` / `ignored_params`",
        ),
        Option(
            name="limit_all_gathers",
            kind="boolean",
            meaning="Let the CPU wait rather than gather many units ahead; fewer memory retries.",
            section=None,
            versions=(1,),
            default=True,
            torch="`limit_all_gathers`",
        ),
        Option(
            name="mixed_precision",
            kind="choice",
            choices=MIXED_PRECISIONS,
            meaning="Data type of computation and of reduced gradients. Parameters that are trained are kept, and "
            "saved, in float32.",
            section="top",
            key="mixed_precision",
            variable="ACCELERATE_MIXED_PRECISION",
            default="no",
            torch="`MixedPrecision` / `MixedPrecisionPolicy`",
            deepspeed="`bf16.enabled`, `fp16.enabled`",
        ),
        Option(
            name="mixed_precision_policy",
            kind="mapping",
            meaning="Data types one by one: `param_dtype`, `reduce_dtype`, `buffer_dtype` (FSDP1), `output_dtype` "
            "(FSDP2). Replaces `mixed_precision`; what is not named is left as it is.",
            section=None,
            torch="`MixedPrecision` / `MixedPrecisionPolicy`",
        ),
        Option(
            name="dp_replicate_size",
            kind="integer",
            minimum=1,
            meaning="Number of whole copies of the model (HSDP); more than 1 needs HYBRID_SHARD under FSDP1.",
            section="parallelism_config",
            key="parallelism_config_dp_replicate_size",
            variable="PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
            default=1,
            torch="first dimension of the device mesh",
            deepspeed="HYBRID_SHARD: world size / `zero_hpz_partition_size`",
        ),
        Option(
            name="dp_shard_size",
            kind="integer",
            minimum=1,
            meaning="Number of ranks that one copy is cut over; when not given, what the other sizes leave.",
            section="parallelism_config",
            key="parallelism_config_dp_shard_size",
            variable="PARALLELISM_CONFIG_DP_SHARD_SIZE",
            torch="second dimension of the device mesh",
            deepspeed="HYBRID_SHARD: `zero_hpz_partition_size`",
        ),
        Option(
            name="tp_size",
            kind="integer",
            minimum=1,
            meaning="Ranks of tensor parallelism. The model's code applies it; `wrap` shards over the other ranks.",
            section="parallelism_config",
            key="parallelism_config_tp_size",
            variable="PARALLELISM_CONFIG_TP_SIZE",
            versions=(2,),
            default=1,
            torch="a dimension of the device mesh",
            deepspeed="`tensor_parallel.autotp_size`",
        ),
        Option(
            name="cp_size",
            kind="integer",
            minimum=1,
            meaning="Ranks of context parallelism; likewise.",
            section="parallelism_config",
            key="parallelism_config_cp_size",
            variable="PARALLELISM_CONFIG_CP_SIZE",
            versions=(2,),
            default=1,
            torch="a dimension of the device mesh",
            deepspeed="`sequence_parallel_size`",
        ),
    )
}


def default_of(option: Option, version: int, *, of_file: bool = False) -> Any:
    """Return what an option is when nobody says anything.

    Args:
        option: The option.
        version: FSDP version; an option that it does not have is None.
        of_file: What a file of Accelerate's means, rather than ``FSDPConfig()``.
    """
    if version not in option.versions:
        return None
    value = option.file_default if of_file and option.file_default is not None else option.default
    return value[version] if isinstance(value, dict) else value
