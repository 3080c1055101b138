"""Write the `.metadata` of a checkpoint of thousands of ranks, and sparse shard files of the right length.

Run as a process of its own (`python -m benchmarks.make_metadata`). Without `--stream` torch's own classes are pickled,
which takes 2 KB of memory per chunk; with it the pickle is streamed, after some small ones were found equal to torch's.
"""

import argparse
import gc
import os
import pickle
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from benchmarks.stream_metadata import CHECKPOINT_ID, SAVE_ID, VERSION, stream
from benchmarks.synthetic import Synthetic


def build(checkpoint: Synthetic) -> Metadata:
    """Build the metadata from torch's classes, with objects shared and copied as after a save on many ranks.

    `dcp.save` gathers the plans and the write results of the ranks by pickle. Hence every index has its own copy of the
    fqn and of the offsets, the entries are ordered by rank, and one rank's entries share one path object.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    planner: dict[str, tuple[str, str]] = {}
    for entry in checkpoint.tensors():
        chunks = [
            ChunkStorageMetadata(torch.Size(entry.offsets(rank)), torch.Size(entry.chunk))
            for rank in range(checkpoint.num_ranks)
        ]
        properties = TensorProperties(dtype=torch.bfloat16)
        tensors[entry.fqn] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        planner[_copy(entry.fqn)] = ("model", _copy(entry.name))
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for rank in range(checkpoint.num_ranks):
        path = checkpoint.file_name(rank)
        for entry in checkpoint.tensors():
            index = MetadataIndex(_copy(entry.fqn), entry.offsets(rank), rank)
            storage[index] = _StorageInfo(path, entry.start, entry.item_bytes)
    origin = StorageMeta(checkpoint_id=CHECKPOINT_ID, save_id=SAVE_ID)
    return Metadata({**tensors}, planner, storage, origin, VERSION)


def _copy(text: str) -> str:
    return text.encode().decode()


def write_shards(checkpoint: Synthetic, folder: Path) -> None:
    """Make one all-hole shard file per rank, as long as the byte ranges in the metadata demand."""
    file_bytes = checkpoint.file_bytes
    for rank in range(checkpoint.num_ranks):
        path = folder / checkpoint.file_name(rank)
        path.touch()
        os.truncate(path, file_bytes)


def check_stream(folder: Path) -> None:
    """Compare small streamed metadata with torch's own, byte for byte, and let torch's reader read it.

    Args:
        folder: An existing folder without `.metadata`; it is left so.

    Raises:
        ValueError: The streamed pickle differs from torch's.
    """
    path = folder / ".metadata"
    # 1,000 and 1,500 items reach and cross the pickler's batches, 1,000 ranks need memo numbers of every width, and
    # chunks of 2.3 GB integers of every width.
    for num_ranks, num_tensors in ((1, 1), (2, 5), (3, 1000), (2, 1500), (1000, 12)):
        checkpoint = Synthetic(num_ranks=num_ranks, num_tensors=num_tensors, rows=70_000, columns=16_384)
        expected = build(checkpoint)
        stream(checkpoint, path)
        same_bytes = _without_frames(path.read_bytes()) == _without_frames(pickle.dumps(expected, protocol=4))
        read = FileSystemReader(folder).read_metadata()
        path.unlink()
        if read.storage_meta is not None:
            read.storage_meta.load_id = None  # the reader's own mark, not in the file
        if not same_bytes or read != expected:
            raise ValueError(f"the streamed metadata of {num_ranks} x {num_tensors} chunks is not what torch writes")


def _without_frames(data: bytes) -> bytes:
    """Remove the frame headers: where they stand is the pickler's choice and no part of the content."""
    parts, place = [data[:2]], 2
    while data[place : place + 1] == pickle.FRAME:
        start = place + 9
        place = start + int.from_bytes(data[place + 1 : start], "little")
        parts.append(data[start:place])
    return b"".join([*parts, data[place:]])


def main() -> int:
    """Parse the command line, write one metadata file with its shards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True, help="rows of every chunk")
    parser.add_argument("--columns", type=int, required=True, help="columns of the matrices")
    parser.add_argument("--stream", action="store_true", help="hold nothing in memory; for more than a million chunks")
    args = parser.parse_args()
    checkpoint = Synthetic(num_ranks=args.ranks, num_tensors=args.tensors, rows=args.rows, columns=args.columns)
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    if args.stream:
        check_stream(folder)
        stream(checkpoint, folder / ".metadata")
    else:
        gc.disable()  # a million live objects, each collection walks them all
        with (folder / ".metadata").open("wb") as file:
            pickle.dump(build(checkpoint), file, protocol=4)
    write_shards(checkpoint, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
