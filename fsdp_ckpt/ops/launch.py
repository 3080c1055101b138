"""Plan the start of a job: torchrun's arguments and the environment that Accelerate's launcher would set."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_ckpt.config.environment import environment_of
from fsdp_ckpt.config.find import with_processes
from fsdp_ckpt.config.launch import LaunchConfig
from fsdp_ckpt.errors import UsageError

__all__ = ["LaunchPlan", "check_startable", "plan_launch"]

_DEFAULT_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """How a job is started.

    Attributes:
        command: Program and arguments: torchrun, in a process that ends with the exit code of the script.
        environment: Variables that are set beside those of this process.
        num_processes: Ranks on all machines together.
        num_machines: Machines.
        notes: What is worth knowing about the configuration.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    num_processes: int
    num_machines: int
    notes: tuple[str, ...] = ()


def plan_launch(
    config: LaunchConfig,
    script: str,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    environ: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """Plan to run a script on every rank.

    Args:
        config: The job.
        script: A Python file, or with ``module`` the name of a module.
        arguments: Arguments of the script.
        module: Run it as ``python -m`` does.
        environ: Variables of this process; None for ``os.environ``.

    Raises:
        UsageError: There is no such file, a port that is taken, a job that torchrun cannot start.
    """
    environ = os.environ if environ is None else environ
    check_startable(config)
    if not module and not os.path.isfile(script):
        raise UsageError(f"{script}: there is no such file", hint="a module is started with -m NAME")
    config = with_processes(config, environ)
    command = [
        sys.executable, "-m", "fsdp_ckpt.train.elastic",
        "--nproc-per-node", str(config.processes_per_machine()), *_rendezvous(config),
        *(["--module"] if module else []), script, *arguments,
    ]  # fmt: skip
    assert config.num_processes is not None
    return LaunchPlan(
        command=tuple(command),
        environment=environment_of(config, threads=environ.get("OMP_NUM_THREADS", "1")),
        num_processes=config.num_processes,
        num_machines=config.num_machines,
        notes=config.notes,
    )


def check_startable(config: LaunchConfig) -> None:
    """Make sure that torchrun can start a job.

    Raises:
        UsageError: It needs another launcher, or its sizes do not fit.
    """
    if config.distributed_type == "DEEPSPEED":
        raise UsageError(
            "distributed_type: DEEPSPEED: fsdp-ckpt starts FSDP and plain jobs only",
            hint="accelerate launch, or fsdp-ckpt config from-deepspeed FILE OUT",
        )
    if config.carried.get("mpirun_config"):
        raise UsageError("mpirun_config: fsdp-ckpt starts processes by torchrun only", hint="accelerate launch")
    config.check_sizes()
    if config.num_processes is not None:
        config.processes_per_machine()


def _rendezvous(config: LaunchConfig) -> list[str]:
    """Say where ranks find each other: a free port on one machine, machine 0 on several."""
    port = config.main_process_port
    if config.num_machines == 1:
        if not port:
            return ["--standalone"]
        _demand_free(port)
        return ["--master-addr", config.main_process_ip or "127.0.0.1", "--master-port", str(port)]
    if config.main_process_ip is None:
        raise UsageError(
            f"num_machines: {config.num_machines} needs main_process_ip, the address of machine 0",
            hint="add --main-process-ip ADDRESS, the same on every machine",
        )
    if config.machine_rank == 0 and port:
        _demand_free(port)
    nodes = ["--nnodes", str(config.num_machines), "--node-rank", str(config.machine_rank)]
    port = port or _DEFAULT_PORT
    if config.same_network:
        return [*nodes, "--master-addr", config.main_process_ip, "--master-port", str(port)]
    endpoint = f"{config.main_process_ip}:{port}"
    return [*nodes, "--rdzv-backend", config.rdzv_backend, "--rdzv-endpoint", endpoint]


def _demand_free(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise UsageError(
                f"main_process_port: {port} is in use by another process",
                hint="add --main-process-port 0 to take a free one",
            )
