"""Stream the `.metadata` of a synthetic checkpoint, in memory that grows with ranks + tensors and not with chunks.

The result is what pickling the objects of `make_metadata.build` gives with torch 2.13, byte for byte apart from where
the frames end; `make_metadata.check_stream` holds the two together.
"""

import pickle
from pathlib import Path

from benchmarks.pickle_stream import PickleStream
from benchmarks.synthetic import Entry, Synthetic

CHECKPOINT_ID = "memory://checkpoints/llama"
SAVE_ID = "00000000-0000-4000-8000-000000000000"
VERSION = "1.0.0"

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def stream(checkpoint: Synthetic, path: Path) -> None:
    """Write the metadata of `checkpoint` to the file `path`."""
    with path.open("wb") as file:
        out = PickleStream(file)
        out.new(_METADATA, "Metadata")
        out.open_state()
        _write_tensors(out, checkpoint)
        _write_planner(out, checkpoint)
        _write_storage(out, checkpoint)
        _write_origin(out)
        out.close_state()
        out.close()


def _write_tensors(out: PickleStream, checkpoint: Synthetic) -> None:
    out.name("state_dict_metadata")
    entries = list(checkpoint.tensors())
    for position in out.dict_items(len(entries)):
        entry = entries[position]
        out.text(entry.fqn)
        out.new(_METADATA, "TensorStorageMetadata")
        out.open_state()
        out.name("properties")
        _write_properties(out)
        out.name("size")
        _write_size(out, entry.shape)
        out.name("chunks")
        for rank in out.list_items(checkpoint.num_ranks):
            out.repeat(("chunk", rank, entry.chunk), _write_chunk, out, entry, rank)
        out.close_state()


def _write_properties(out: PickleStream) -> None:
    out.new(_METADATA, "TensorProperties")
    out.put(pickle.MARK)
    out.share("bfloat16 dtype", _write_dtype, out)
    out.share("strided layout", _write_layout, out)
    out.put(pickle.NEWFALSE)
    out.share("contiguous format", _write_memory_format, out)
    out.put(pickle.NEWFALSE)
    out.remember(pickle.TUPLE)
    out.put(pickle.BUILD)


def _write_dtype(out: PickleStream) -> None:
    # The pickler finds the dtype's module by itself: its "torch" is not the string object that torch.Size carries.
    out.text("torch")
    out.text("bfloat16")
    out.remember(pickle.STACK_GLOBAL)


def _write_layout(out: PickleStream) -> None:
    out.global_name("torch.serialization", "_get_layout")
    out.text("torch.strided")
    out.remember(pickle.TUPLE1)
    out.remember(pickle.REDUCE)


def _write_memory_format(out: PickleStream) -> None:
    out.global_name(_METADATA, "_MEM_FORMAT_ENCODING")
    out.tuple_of((0,))
    out.remember(pickle.REDUCE)


def _write_size(out: PickleStream, lengths: tuple[int, ...]) -> None:
    out.global_name("torch", "Size")
    out.tuple_of(lengths)
    out.remember(pickle.TUPLE1)
    out.remember(pickle.REDUCE)


def _write_chunk(out: PickleStream, entry: Entry, rank: int) -> None:
    out.new(_METADATA, "ChunkStorageMetadata")
    out.open_state()
    out.name("offsets")
    _write_size(out, entry.offsets(rank))
    out.name("sizes")
    _write_size(out, entry.chunk)
    out.close_state()


def _write_planner(out: PickleStream, checkpoint: Synthetic) -> None:
    out.name("planner_data")
    entries = list(checkpoint.tensors())
    for position in out.dict_items(len(entries)):
        out.text(entries[position].fqn)
        out.name("model")
        out.text(entries[position].name)
        out.remember(pickle.TUPLE2)


def _write_storage(out: PickleStream, checkpoint: Synthetic) -> None:
    out.name("storage_data")
    entries = list(checkpoint.tensors())
    for place in out.dict_items(checkpoint.num_chunks):
        rank, position = divmod(place, len(entries))
        entry = entries[position]
        out.repeat(("fqn", position), _write_index_fqn, out, entry)
        out.repeat(("offset", rank, entry.chunk), _write_index_offset, out, entry, rank)
        out.repeat(("file", rank), _write_file_name, out, checkpoint.file_name(rank))
        out.repeat(("range", position), _write_range, out, entry)


def _write_index_fqn(out: PickleStream, entry: Entry) -> None:
    out.new(_METADATA, "MetadataIndex")
    out.open_state()
    out.name("fqn")
    out.text(entry.fqn)


def _write_index_offset(out: PickleStream, entry: Entry, rank: int) -> None:
    out.name("index")
    out.integer(rank)
    out.name("offset")
    _write_size(out, entry.offsets(rank))
    out.close_state()


def _write_file_name(out: PickleStream, file_name: str) -> None:
    out.new(_FILESYSTEM, "_StorageInfo")
    out.open_state()
    out.name("relative_path")
    out.name(file_name)


def _write_range(out: PickleStream, entry: Entry) -> None:
    out.name("offset")
    out.integer(entry.start)
    out.name("length")
    out.integer(entry.item_bytes)
    out.close_state()


def _write_origin(out: PickleStream) -> None:
    out.name("storage_meta")
    out.new(_METADATA, "StorageMeta")
    out.open_state()
    out.name("checkpoint_id")
    out.text(CHECKPOINT_ID)
    out.name("save_id")
    out.text(SAVE_ID)
    out.name("load_id")
    out.put(pickle.NONE)
    out.name("modules")
    out.remember(pickle.EMPTY_LIST)
    out.close_state()
    out.name("version")
    out.text(VERSION)
