"""Say how the inputs are made: the commands that run the two generators, each in a process of its own."""

import sys
from pathlib import Path

from benchmarks.llama import Llama
from benchmarks.measure import Command
from benchmarks.synthetic import Synthetic

FOLDER_NAME = "pytorch_model_fsdp_0"
"""What Accelerate calls the model's part of a checkpoint."""

MOST_CHUNKS_BY_TORCH = 1_000_000
"""Larger metadata is streamed: torch's classes take 2 KB of memory per chunk."""


def checkpoint_input(folder: Path, model: Llama, dtype: str, *, num_ranks: int = 2, ours: bool = False) -> Command:
    """Return the command that writes an FSDP2 checkpoint into `folder`/`FOLDER_NAME`, by torch or by `ours`."""
    sizes = ("--hidden", str(model.hidden), "--layers", str(model.num_layers), "--vocab", str(model.vocab))
    writer = ("--ranks", str(num_ranks), *(("--ours",) if ours else ()))
    argv = (sys.executable, "-m", "benchmarks.make_checkpoint", str(folder), "--dtype", dtype, *sizes, *writer)
    return Command(name=f"write {folder.name}", argv=argv, output=folder)


def metadata_input(folder: Path, checkpoint: Synthetic) -> Command:
    """Return the command that writes the metadata and sparse shard files of a synthetic checkpoint into `folder`."""
    sizes = ("--ranks", str(checkpoint.num_ranks), "--tensors", str(checkpoint.num_tensors))
    chunk = ("--rows", str(checkpoint.rows), "--columns", str(checkpoint.columns))
    by_stream = ("--stream",) if checkpoint.num_chunks > MOST_CHUNKS_BY_TORCH else ()
    argv = (sys.executable, "-m", "benchmarks.make_metadata", str(folder), *sizes, *chunk, *by_stream)
    return Command(name=f"write {folder.name}", argv=argv, output=folder)
