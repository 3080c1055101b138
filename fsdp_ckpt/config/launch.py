"""``LaunchConfig``: how many processes run on which machines, and how they shard their model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.config.options import MixedPrecision
from fsdp_ckpt.errors import UsageError

__all__ = ["CARRIED_BY_DEFAULT", "DISTRIBUTED_TYPES", "DistributedType", "LaunchConfig"]

DistributedType = Literal["NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED"]
# What we start. Accelerate knows more: other accelerators than CUDA's, TPUs, Megatron-LM.
DISTRIBUTED_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")
# What `accelerate config` writes into every file beside the fields below, whether or not there is a TPU.
CARRIED_BY_DEFAULT: Mapping[str, Any] = {
    "downcast_bf16": "no",
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """A job. The fields are the top-level keys of Accelerate's YAML.

    Attributes:
        distributed_type: ``FSDP``, or how processes run without it.
        num_processes: Ranks on all machines together; None when the file leaves it open.
        num_machines: Machines.
        machine_rank: Number of this machine, from 0.
        main_process_ip: Address of machine 0.
        main_process_port: Its port; 0 to take a free one.
        rdzv_backend: How processes find each other: ``static`` or a backend of torchrun's.
        same_network: Whether machines reach ``main_process_ip`` directly.
        gpu_ids: Devices to use, such as ``0,2``; None or ``all`` for all.
        mixed_precision: As in ``fsdp``; kept here for jobs without FSDP.
        use_cpu: Run on CPUs whatever devices there are.
        debug: Let Accelerate check the shapes of what ranks exchange.
        enable_cpu_affinity: Bind ranks to the cores near their device.
        main_training_function: Carried for Accelerate.
        fsdp: How the model is sharded; None for jobs without FSDP.
        parallelism: Further keys of ``parallelism_config``, as they were.
        carried: Other keys and sections, as they were: ``dynamo_config``, ``fp8_config`` …
        stated: Keys that the file had: ``fsdp_config.fsdp_version``; empty for a new configuration.
        origins: Where the value of each field comes from: ``fsdp.yaml:7``, ``$FSDP_VERSION``.
        notes: What is right but worth knowing, such as what Accelerate would make of it.
    """

    distributed_type: DistributedType = "FSDP"
    num_processes: int | None = 1
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str = "static"
    same_network: bool = True
    gpu_ids: str | None = None
    mixed_precision: MixedPrecision = "no"
    use_cpu: bool = False
    debug: bool = False
    enable_cpu_affinity: bool = False
    main_training_function: str = "main"
    fsdp: FSDPConfig | None = field(default_factory=FSDPConfig)
    parallelism: Mapping[str, Any] = field(default_factory=dict)
    carried: Mapping[str, Any] = field(default_factory=lambda: dict(CARRIED_BY_DEFAULT))
    stated: frozenset[str] = frozenset()
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if (self.fsdp is not None) != (self.distributed_type == "FSDP"):
            raise UsageError(
                f"distributed_type: {self.distributed_type} "
                + ("has no use for fsdp_config" if self.fsdp is not None else "needs fsdp_config"),
                hint="set distributed_type: FSDP, or leave fsdp_config out" if self.fsdp is not None else None,
            )
        if self.fsdp is not None and self.fsdp.mixed_precision != self.mixed_precision:
            raise UsageError(
                f"mixed_precision: {self.mixed_precision} contradicts that of the FSDP options, "
                f"{self.fsdp.mixed_precision}"
            )
        if not 0 <= self.machine_rank < self.num_machines:
            raise UsageError(
                f"machine_rank: {self.machine_rank} is not possible with num_machines: {self.num_machines}; allowed: "
                f"0 to {self.num_machines - 1}"
            )

    def processes_per_machine(self) -> int:
        """Return the number of ranks on each machine.

        Raises:
            UsageError: The number of ranks is open, or does not divide by the number of machines.
        """
        if self.num_processes is None:
            raise UsageError("num_processes is not given", hint="add --num-processes N")
        if self.num_processes % self.num_machines:
            raise UsageError(
                f"num_processes: {self.num_processes} does not divide by num_machines: {self.num_machines}",
                hint="num_processes counts the ranks of all machines together",
            )
        return self.num_processes // self.num_machines

    def check_sizes(self) -> None:
        """Make sure that the sizes of the device mesh give the number of processes.

        Raises:
            UsageError: They do not.
        """
        if self.fsdp is None or self.num_processes is None:
            return
        known = {
            "dp_replicate_size": self.fsdp.dp_replicate_size,
            "dp_shard_size": self.fsdp.dp_shard_size,
            "tp_size": self.fsdp.tp_size,
            "cp_size": self.fsdp.cp_size,
            "sp_size": self.parallelism.get("parallelism_config_sp_size"),
        }
        product = 1
        for size in known.values():
            product *= int(size or 1)
        fits = (
            self.num_processes == product if self.fsdp.dp_shard_size is not None else self.num_processes % product == 0
        )
        if not fits:
            shown = " x ".join(f"{name} {size}" for name, size in known.items() if size not in (None, 1)) or "1"
            raise UsageError(
                f"{shown}{f' = {product}' if ' x ' in shown else ''} does not fit num_processes: {self.num_processes}",
                hint="the product of the sizes has to be the number of processes, or to divide it",
            )
