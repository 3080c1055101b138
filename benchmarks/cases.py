"""Say what is measured: for each case its inputs, its commands and the ratios between them. Nothing runs here."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.inputs import FOLDER_NAME, MOST_CHUNKS_BY_TORCH, checkpoint_input, metadata_input
from benchmarks.llama import Llama
from benchmarks.measure import Command
from benchmarks.synthetic import Synthetic
from fsdp_ckpt.units import format_size

REFUSED = 6
"""Exit code of fsdp-ckpt: not enough memory or disk. A refusal before the work is a right answer at 5 TB."""

CP, CP_SYNC = "cp -r", "cp -r && sync"
MERGE, MERGE_NO_FSYNC, MERGE_NO_VERIFY = "fsdp-ckpt merge", "fsdp-ckpt merge --no-fsync", "fsdp-ckpt merge --no-verify"
CAST, CAST_NO_FSYNC = "fsdp-ckpt merge --dtype bfloat16", "fsdp-ckpt merge --dtype bfloat16 --no-fsync"
ACCELERATE, DCP_TO_TORCH = "accelerate merge-weights", "torch format_utils dcp_to_torch"
HELP, INSPECT = "fsdp-ckpt --help", "fsdp-ckpt inspect"
MERGE_SMALL, MERGE_LARGE = "fsdp-ckpt merge, small", "fsdp-ckpt merge, large"

SPARSE = Synthetic(num_ranks=512, num_tensors=3411, rows=118, columns=16_384)
DRY_RUN = f"fsdp-ckpt merge --dry-run, {SPARSE.num_chunks:,} chunks"
_START_UP_MODEL = Llama(hidden=64, num_layers=17, vocab=256)

_BIN = Path(sys.executable).parent
TOOL = str(_BIN / "fsdp-ckpt")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user chose.

    Attributes:
        work: Scratch folder, this run's own.
        size_bytes: Size of the generated checkpoint.
        rounds: Counted rounds.
        chunks: Sizes of the synthetic metadata, chunks.
    """

    work: Path
    size_bytes: int
    rounds: int
    chunks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Commands that are compared with each other.

    Attributes:
        title: One line for the report.
        inputs: Commands that make the inputs, each into its `output`; run once, not measured.
        commands: What is measured, in this order in every round.
        ratios: Pairs of command names, wall time of the first over that of the second.
        rounds: Counted rounds.
        warm_ups: Rounds before them.
        payload_bytes: Bytes of tensors that each command moves, for the rate; 0 when none.
    """

    title: str
    inputs: tuple[Command, ...]
    commands: tuple[Command, ...]
    ratios: tuple[tuple[str, str], ...] = ()
    rounds: int
    warm_ups: int = 1
    payload_bytes: int = 0


def inspect_name(num_chunks: int) -> str:
    """Name the command that inspects synthetic metadata of this many chunks."""
    return f"fsdp-ckpt inspect, {num_chunks:,} chunks"


def merge_case(settings: Settings) -> Case:
    """Merge beside a copy of the same bytes and beside the two converters people use today."""
    model = Llama.fit(settings.size_bytes // 2)
    folder, out = settings.work / "bf16", settings.work / "out"
    source, target, payload = str(folder / FOLDER_NAME), str(out / "merged"), 2 * model.num_elements

    def writes(name: str, *argv: str) -> Command:
        return Command(name=name, argv=argv, output=out, min_output_bytes=payload)

    converter = ("-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch")
    copy_and_sync = 'cp -r "$1" "$2" && sync -f "$2"'
    return Case(
        title=f"Merge a checkpoint of 2 ranks, {format_size(payload)} of bfloat16 in {model.num_tensors} tensors",
        inputs=(checkpoint_input(folder, model, "bfloat16"),),
        commands=(
            writes(CP, "cp", "-r", source, target),
            writes(CP_SYNC, "sh", "-c", copy_and_sync, "sh", source, target),
            writes(MERGE_NO_FSYNC, TOOL, "merge", source, target, "--no-fsync"),
            writes(MERGE, TOOL, "merge", source, target),
            writes(MERGE_NO_VERIFY, TOOL, "merge", source, target, "--no-verify"),
            writes(ACCELERATE, str(_BIN / "accelerate"), "merge-weights", source, target),
            writes(DCP_TO_TORCH, sys.executable, *converter, source, f"{target}.pt"),
        ),
        ratios=(
            (MERGE_NO_FSYNC, CP),
            (MERGE, CP_SYNC),
            (MERGE, MERGE_NO_VERIFY),
            (ACCELERATE, MERGE),
            (ACCELERATE, MERGE_NO_FSYNC),
            (DCP_TO_TORCH, MERGE),
        ),
        rounds=settings.rounds,
        payload_bytes=payload,
    )


def cast_case(settings: Settings) -> Case:
    """Cast while merging, beside a copy of the source."""
    model = Llama.fit(settings.size_bytes // 4)
    folder, out = settings.work / "fp32", settings.work / "out"
    source, target, payload = str(folder / FOLDER_NAME), str(out / "merged"), 4 * model.num_elements
    cast = (TOOL, "merge", source, target, "--dtype", "bfloat16")
    return Case(
        title=f"Merge {format_size(payload)} of float32 to bfloat16",
        inputs=(checkpoint_input(folder, model, "float32"),),
        commands=(
            Command(name=CP, argv=("cp", "-r", source, target), output=out, min_output_bytes=payload),
            Command(name=CAST_NO_FSYNC, argv=(*cast, "--no-fsync"), output=out, min_output_bytes=payload // 2),
            Command(name=CAST, argv=cast, output=out, min_output_bytes=payload // 2),
        ),
        ratios=((CAST_NO_FSYNC, CP), (CAST, CP)),
        rounds=settings.rounds,
        payload_bytes=payload,
    )


def start_up_case(settings: Settings) -> Case:
    """Start the tool to answer small questions."""
    folder = settings.work / "small"
    return Case(
        title=f"Start-up; the checkpoint has {_START_UP_MODEL.num_tensors} tensors",
        inputs=(checkpoint_input(folder, _START_UP_MODEL, "bfloat16"),),
        commands=(
            Command(name="python -c pass", argv=(sys.executable, "-c", "pass")),
            Command(name="fsdp-ckpt --version", argv=(TOOL, "--version")),
            Command(name=HELP, argv=(TOOL, "--help")),
            Command(name=INSPECT, argv=(TOOL, "inspect", str(folder / FOLDER_NAME))),
        ),
        rounds=max(10, settings.rounds),
    )


def scale_case(settings: Settings) -> Case:
    """Read metadata of very many chunks; plan a merge of terabytes."""
    inputs, commands = [], []
    for num_chunks in settings.chunks:
        checkpoint = Synthetic.of_chunks(num_chunks)
        folder = settings.work / f"chunks-{checkpoint.num_chunks}"
        inputs.append(metadata_input(folder, checkpoint))
        allowed = frozenset({0, REFUSED} if checkpoint.num_chunks > MOST_CHUNKS_BY_TORCH else {0})
        name, argv = inspect_name(checkpoint.num_chunks), (TOOL, "inspect", str(folder))
        commands.append(Command(name=name, argv=argv, exit_codes=allowed))
    folder, out = settings.work / "sparse", settings.work / "planned"
    inputs.append(metadata_input(folder, SPARSE))
    plan = (TOOL, "merge", str(folder), str(out), "--dry-run")
    commands.append(Command(name=DRY_RUN, argv=plan, exit_codes=frozenset({0, REFUSED})))
    apparent = format_size(SPARSE.num_ranks * SPARSE.file_bytes)
    return Case(
        title=f"Metadata of 4,096 ranks; plan of a merge of {apparent} (sparse files) from {SPARSE.num_ranks} ranks",
        inputs=tuple(inputs),
        commands=tuple(commands),
        rounds=min(3, settings.rounds),
        warm_ups=0,
    )


def memory_case(settings: Settings) -> Case:
    """Merge a small and an eight times larger checkpoint, for the peak RSS of both."""
    out = settings.work / "out"
    inputs: list[Command] = []
    commands, sizes = [], []
    for name, size_bytes in ((MERGE_SMALL, settings.size_bytes // 4), (MERGE_LARGE, 2 * settings.size_bytes)):
        model = Llama.fit(size_bytes // 2)
        folder = settings.work / f"memory-{len(inputs)}"
        inputs.append(checkpoint_input(folder, model, "bfloat16"))
        argv = (TOOL, "merge", str(folder / FOLDER_NAME), str(out / "merged"))
        commands.append(Command(name=name, argv=argv, output=out, min_output_bytes=2 * model.num_elements))
        sizes.append(format_size(2 * model.num_elements))
    title = f"Peak memory of a merge: small is {sizes[0]}, large {sizes[1]}"
    return Case(title=title, inputs=tuple(inputs), commands=tuple(commands), rounds=min(3, settings.rounds), warm_ups=0)


CASES: Mapping[str, Callable[[Settings], Case]] = MappingProxyType(
    {
        "merge": merge_case,
        "cast": cast_case,
        "inspect": start_up_case,
        "scale": scale_case,
        "memory": memory_case,
    }
)
