"""Convert and reshard, beside a copy of the same bytes."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from benchmarks.cases import CP, CP_SYNC, TOOL, Case, Settings
from benchmarks.inputs import FOLDER_NAME, checkpoint_input
from benchmarks.llama import Llama
from benchmarks.measure import Command
from fsdp_ckpt.units import format_size

FROM, TO = 8, 6
RESHARD = f"fsdp-ckpt reshard --world-size {TO}"
RESHARD_NO_FSYNC, RESHARD_NO_VERIFY = f"{RESHARD} --no-fsync", f"{RESHARD} --no-fsync --no-verify"
CONVERT = "fsdp-ckpt convert --to accelerate --world-size 8"
CONVERT_NO_FSYNC = f"{CONVERT} --no-fsync"


def reshard_case(settings: Settings) -> Case:
    """Write the checkpoint of eight ranks for six: most shards are cut."""
    model = Llama.fit(settings.size_bytes // 2)
    folder, out = settings.work / "eight", settings.work / "out"
    source, target, payload = str(folder / FOLDER_NAME), str(out / "resharded"), 2 * model.num_elements

    def writes(name: str, *argv: str) -> Command:
        return Command(name=name, argv=argv, output=out, min_output_bytes=payload)

    reshard = (TOOL, "reshard", source, target, "--world-size", str(TO))
    copy_and_sync = 'cp -r "$1" "$2" && sync -f "$2"'
    return Case(
        title=f"Reshard {format_size(payload)} of bfloat16 in {model.num_tensors} tensors from {FROM} ranks to {TO}",
        inputs=(checkpoint_input(folder, model, "bfloat16", num_ranks=FROM),),
        commands=(
            writes(CP, "cp", "-r", source, target),
            writes(CP_SYNC, "sh", "-c", copy_and_sync, "sh", source, target),
            writes(RESHARD_NO_FSYNC, *reshard, "--no-fsync"),
            writes(RESHARD_NO_VERIFY, *reshard, "--no-fsync", "--no-verify"),
            writes(RESHARD, *reshard),
        ),
        ratios=((RESHARD_NO_FSYNC, CP), (RESHARD_NO_VERIFY, CP), (RESHARD, CP_SYNC)),
        rounds=settings.rounds,
        payload_bytes=payload,
    )


def convert_case(settings: Settings) -> Case:
    """Shard a whole safetensors model for eight ranks, so that a job starts without one rank holding it."""
    model = Llama.fit(settings.size_bytes // 2)
    folder, full, out = settings.work / "whole", settings.work / "full", settings.work / "out"
    target, payload = str(out / "sharded"), 2 * model.num_elements

    def writes(name: str, *argv: str) -> Command:
        return Command(name=name, argv=argv, output=out, min_output_bytes=payload)

    convert = (TOOL, "convert", str(full), target, "--to", "accelerate", "--world-size", "8")
    return Case(
        title=f"Shard a safetensors model of {format_size(payload)} for eight ranks",
        inputs=(
            checkpoint_input(folder, model, "bfloat16"),
            Command(name="merge it", argv=(TOOL, "merge", str(folder / FOLDER_NAME), str(full)), output=full),
        ),
        commands=(
            writes(CP, "cp", "-r", str(full), target),
            writes(CONVERT_NO_FSYNC, *convert, "--no-fsync"),
            writes(CONVERT, *convert),
        ),
        ratios=((CONVERT_NO_FSYNC, CP), (CONVERT, CP)),
        rounds=settings.rounds,
        payload_bytes=payload,
    )


CASES: Mapping[str, Callable[[Settings], Case]] = MappingProxyType({"reshard": reshard_case, "convert": convert_case})
