"""``fsdp-ckpt launch``."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated

import typer

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.guard import guard
from fsdp_ckpt.errors import UsageError

EXAMPLES = """\b
Examples:
  fsdp-ckpt launch --config fsdp.yaml train.py --epochs 3
  fsdp-ckpt launch -n 2 --set offload_params=true train.py
  fsdp-ckpt launch --num-machines 2 --machine-rank 1 --main-process-ip 10.0.0.1 -n 16 train.py
  fsdp-ckpt launch --dry-run train.py
"""

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="FSDP option; goes before the file. Repeatable.")
]
ConfigFile = Annotated[
    str | None, typer.Option("--config", "--config_file", metavar="FILE", help="YAML of `config init` or Accelerate.")
]
Processes = Annotated[
    int | None, typer.Option("-n", "--num-processes", "--num_processes", min=1, help="Ranks on all machines together.")
]


@guard
def launch(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python file; with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None,
    config: ConfigFile = None,
    num_processes: Processes = None,
    num_machines: Annotated[
        int | None, typer.Option("--num-machines", "--num_machines", min=1, help="Machines.")
    ] = None,
    machine_rank: Annotated[
        int | None, typer.Option("--machine-rank", "--machine_rank", min=0, help="Number of this machine, from 0.")
    ] = None,
    main_process_ip: Annotated[
        str | None, typer.Option("--main-process-ip", "--main_process_ip", help="Address of machine 0.")
    ] = None,
    main_process_port: Annotated[
        int | None, typer.Option("--main-process-port", "--main_process_port", min=0, help="Its port; 0: a free one.")
    ] = None,
    mixed_precision: Annotated[
        str | None, typer.Option("--mixed-precision", "--mixed_precision", help="no, fp16, bf16, fp8.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run on CPUs whatever devices there are.")] = False,
    set_: Settings = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print command and environment, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print them as JSON.")] = False,
) -> None:
    """Start a script on every rank, by torchrun, with the environment that Accelerate's launcher sets.

    A script made for `accelerate launch` finds what it expects. Without --config the file is fsdp.yaml here, or the one
    that `accelerate config` wrote, or there are defaults: FSDP2, one rank per GPU.
    """
    from fsdp_ckpt.config.find import find_config
    from fsdp_ckpt.config.override import override, read_settings
    from fsdp_ckpt.ops.launch import plan_launch

    found, name = find_config(config, os.environ)
    settings = read_settings([*(set_ or ()), *([f"mixed_precision={mixed_precision}"] if mixed_precision else ())])
    job = {
        "num_processes": num_processes,
        "num_machines": num_machines,
        "machine_rank": machine_rank,
        "main_process_ip": main_process_ip,
        "main_process_port": main_process_port,
        "use_cpu": True if cpu else None,
    }
    plan = plan_launch(override(found, settings, job), script, arguments or (), module=module)
    if as_json:
        if not dry_run:
            raise UsageError("--json shows what would be started", hint="add --dry-run")
        out.json_report("launch", plan)
        return
    if config is None:
        out.note(f"configuration: {name}")
    for text in plan.notes:
        out.note(text)
    if plan.num_machines > 1 and machine_rank is None:
        out.note(f"this is machine {found.machine_rank} of {plan.num_machines}: --machine-rank says otherwise")
    if dry_run:
        for variable, value in sorted(plan.environment.items()):
            print(f"{variable}={shlex.quote(value)} \\")
        print(shlex.join(plan.command))
        return
    sys.stdout.flush()
    os.execve(plan.command[0], plan.command, {**os.environ, **plan.environment})
