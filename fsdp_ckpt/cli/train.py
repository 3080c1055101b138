"""``fsdp-ckpt train`` and ``generate``."""

from __future__ import annotations

import os
import signal
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.guard import guard
from fsdp_ckpt.cli.launch import ConfigFile, Settings
from fsdp_ckpt.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsdp_ckpt.config.launch import LaunchConfig

TRAIN_EXAMPLES = """\b
Examples:
  fsdp-ckpt train run --kill-at 200                train on 2 ranks, and die while step 200 is saved
  fsdp-ckpt train run --resume auto --nproc 1      go on from the newest whole checkpoint, on 1 rank
  fsdp-ckpt train run2 --config fsdp.yaml --steps 1000 --save-every 200 --keep 2
  fsdp-ckpt train run3 --set fsdp_version=1 --set sharding_strategy=SHARD_GRAD_OP
"""
GENERATE_EXAMPLES = """\b
Examples:
  fsdp-ckpt generate merged 31415926 27182818
  fsdp-ckpt generate merged --held-out 200 --json
"""


@guard
def train(
    folder: Annotated[str, typer.Argument(metavar="[RUN]", help="Folder of the run: step-N, log.jsonl.")] = "run",
    config: ConfigFile = None,
    nproc: Annotated[
        int | None, typer.Option("-n", "--nproc", min=1, help="Ranks. [default: the file's, or 2]")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Last step.", show_default="400")] = None,
    save_every: Annotated[int | None, typer.Option(min=1, help="Steps between saves.", show_default="100")] = None,
    resume: Annotated[str | None, typer.Option(metavar="auto|PATH", help="Go on from a checkpoint.")] = None,
    keep: Annotated[int | None, typer.Option(min=1, help="Checkpoints to keep.", show_default="all")] = None,
    async_save: Annotated[bool, typer.Option("--async", help="Train on while files are written.")] = False,
    kill_at: Annotated[int | None, typer.Option(min=1, help="Kill every rank in this step, or in its save.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples a step, all ranks.", show_default="64")] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate.", show_default="0.003")] = None,
    digits: Annotated[int | None, typer.Option(min=1, help="Length of the numbers.", show_default="8")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of weights and samples.", show_default="0")] = None,
    model: Annotated[str | None, typer.Option(metavar="config.json", help="A model of transformers instead.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run on CPUs whatever devices there are.")] = False,
    set_: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the last checkpoint only.")] = False,
) -> None:
    """Train a small decoder to sort digits, saving as it goes: to see saving, dying and resuming work.

    The decoder has Llama's shape and names. Every batch follows from seed and step, so any number of ranks goes on
    where any other stopped. With --resume, what is not given is as it was.
    """
    from fsdp_ckpt.cli.train_view import TrainView
    from fsdp_ckpt.ops.launch import plan_launch
    from fsdp_ckpt.ops.run_job import run_job
    from fsdp_ckpt.train.driver.events import LogReader, Started
    from fsdp_ckpt.train.driver.start import keep_options, options_before, settle_options

    before = options_before(folder) if resume is not None else None
    job = _job(config, nproc, cpu=cpu, settings=set_, fsdp=before.fsdp if before else None)
    assert job.fsdp is not None
    given = {
        "steps": steps, "save_every": save_every, "resume": resume, "keep": keep, "kill_at": kill_at,
        "batch_size": batch_size, "lr": lr, "digits": digits, "seed": seed, "model": model,
        "async_save": async_save or None,
        "fsdp": {field.name: getattr(job.fsdp, field.name) for field in fields(job.fsdp)},
    }  # fmt: skip
    options = settle_options(folder, given)
    attempt = os.urandom(4).hex()
    file = Path(folder) / f".train-{attempt}.json"
    if job.num_processes is not None:
        options.check_ranks(job.num_processes)
    plan = plan_launch(job, "fsdp_ckpt.train.driver", [str(file), attempt], module=True)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        options.write(file)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written to: {error.strerror}", hint="name another folder") from None
    reader, view = LogReader(folder, attempt), TrainView(options, quiet=quiet or as_json)

    def follow() -> None:
        events = reader.poll()
        if any(isinstance(event, Started) for event in events):
            keep_options(file, folder)  # not before: options that ranks refuse are no options of the run
        view.show(events)

    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))  # a closed terminal stops the ranks, too
    try:
        end = run_job(plan, poll=follow)
    except KeyboardInterrupt:
        view.close()
        view.say_next()
        raise
    finally:
        file.unlink(missing_ok=True)
    view.close()
    view.finish(end, as_json=as_json)
    if end.exit_code:
        raise typer.Exit(end.exit_code)


def _job(
    config: str | None,
    nproc: int | None,
    *,
    cpu: bool,
    settings: list[str] | None,
    fsdp: Mapping[str, Any] | None = None,
) -> LaunchConfig:
    """Return the job: of the file, else sharded as the run was before, else FSDP2; a rank per GPU, or 2 on the CPU."""
    from fsdp_ckpt.config.accelerate_yaml import read_config
    from fsdp_ckpt.config.find import visible_devices
    from fsdp_ckpt.config.fsdp import FSDPConfig
    from fsdp_ckpt.config.launch import LaunchConfig
    from fsdp_ckpt.config.override import override, read_settings

    if config is not None:
        base = read_config(config)
        if base.fsdp is None:
            raise UsageError(f"{config}: there is no fsdp_config in it", hint="fsdp-ckpt config init")
    else:
        kept = FSDPConfig.of(fsdp or {})
        ranks = 2 if cpu else visible_devices(os.environ) or 2
        base = LaunchConfig(num_processes=ranks, fsdp=kept, mixed_precision=kept.mixed_precision)
    changes: dict[str, Any] = {"num_processes": nproc, "use_cpu": cpu or None}
    if cpu:
        changes["gpu_ids"] = ""
    return override(base, read_settings(settings or (), in_process=True), changes)


@guard
def generate(
    path: Annotated[str, typer.Argument(metavar="MODEL", help="Merged model, or a checkpoint.")],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[DIGITS]...", help="Numbers to sort.")] = None,
    held_out: Annotated[int, typer.Option(min=0, help="Ask this many held-out numbers, too.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Let a model that `train` trained sort digits: merged by `merge`, or a step-N as it is."""
    from fsdp_ckpt.train.driver.generate import generate as run

    if not prompts and not held_out:
        raise UsageError(
            "there is nothing to ask",
            hint=f"add numbers such as 31415926, or: fsdp-ckpt generate {path} --held-out 200",
        )
    report = run(path, prompts or (), num_samples=held_out)
    if as_json:
        out.json_report("generate", report)
        return
    for prompt, answer, is_right in report.answers:
        print(f"{prompt} > {answer}  {'right' if is_right else 'wrong'}")
    if report.accuracy is not None:
        print(f"{report.accuracy:.1%} of {report.num_samples} held-out numbers right")
