"""Metadata from ``.distcp`` files that hold safetensors: their headers name the tensors and the places of the pieces.

``SerializationFormat.SAFETENSORS`` (torch 2.8 and newer) writes one such blob per file. The whole shape of a tensor is
not in it; as torch's own reader of sharded safetensors does, the furthest corner is taken.
"""

from __future__ import annotations

import json

from fsdp_ckpt.catalog import DType, Shape
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, DcpTensor, StorageInfo
from fsdp_ckpt.codec.safetensors import Header, read_header
from fsdp_ckpt.errors import Incompatible, MalformedFile
from fsdp_ckpt.layouts.elsewhere import rank_of
from fsdp_ckpt.plan.boxes import check_coverage
from fsdp_ckpt.store.local import Folder

__all__ = ["is_blob", "metadata_of_blobs"]


def is_blob(folder: Folder, file: str) -> bool:
    """Tell whether a file begins like safetensors."""
    size = folder.files[file]
    return size > 9 and folder.store.reader(folder.prefix + file)(8, 1) == b"{"


def metadata_of_blobs(folder: Folder) -> DcpMetadata:
    """Return the metadata of a folder in which every data file is one blob.

    Raises:
        Incompatible: One is not; or ranks, pieces or shapes are missing.
        MalformedFile: A header is broken.
    """
    files = [file for file, size in folder.files.items() if file.endswith(".distcp") and size]
    _demand_all_ranks(files)
    boxes: dict[str, dict[Shape, tuple[Shape, DType]]] = {}
    storage: dict[tuple[str, Shape | None], StorageInfo] = {}
    for file in files:
        path = folder.prefix + file
        if not is_blob(folder, file):
            raise Incompatible(f"{path} holds values that are no tensors, whose names are nowhere")
        header = read_header(folder.store.reader(path), 0, folder.files[file], where=path)
        places = _offsets(header, path)
        for item in header.tensors:
            offsets = places.get(item.name)
            if offsets is None or len(offsets) != len(item.shape):
                raise Incompatible(f"{path} does not say where its piece of `{item.name}` belongs")
            known = boxes.setdefault(item.name, {})
            if offsets in known and known[offsets] != (item.shape, item.dtype):
                raise Incompatible(f"`{item.name}` has two different pieces at one place")
            if offsets not in known:
                known[offsets] = item.shape, item.dtype
                storage[item.name, offsets] = (file, 0, item.stop - item.start, ())
    tensors = {key: _tensor(key, pieces) for key, pieces in boxes.items()}
    return DcpMetadata(
        tensors=tensors,
        objects=[],
        paths={},  # a dot may be part of a key
        storage=storage,
        writer="torch 2.9-2.14",
    )


def _demand_all_ranks(files: list[str]) -> None:
    ranks = {rank_of(file) for file in files}
    known = {rank for rank in ranks if rank is not None}
    if not files or None in ranks or known != set(range(len(known))):
        raise Incompatible("files of some ranks are missing")


def _offsets(header: Header, path: str) -> dict[str, Shape]:
    text = header.metadata.get("DCP_SHARDING_INFO")
    if text is None:
        raise Incompatible(f"{path} does not say where its pieces belong (no DCP_SHARDING_INFO)")
    try:
        found = {key: tuple(item["saved_offsets"]) for key, item in json.loads(text).items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedFile(f"{path}: DCP_SHARDING_INFO is broken: {error}") from None
    if not all(type(n) is int and 0 <= n < 2**62 for place in found.values() for n in place):
        raise MalformedFile(f"{path}: DCP_SHARDING_INFO has impossible offsets")
    return found


def _tensor(key: str, pieces: dict[Shape, tuple[Shape, DType]]) -> DcpTensor:
    dtypes = {dtype.name: dtype for _, dtype in pieces.values()}
    ranks = {len(offsets) for offsets in pieces}
    if len(dtypes) > 1 or len(ranks) > 1:
        raise Incompatible(f"the pieces of `{key}` differ in dtype or number of dimensions")
    chunks = [(offsets, lengths) for offsets, (lengths, _) in pieces.items()]
    shape = tuple(max(offsets[dim] + lengths[dim] for offsets, lengths in chunks) for dim in range(ranks.pop()))
    if not check_coverage(shape, chunks).is_exact:
        raise Incompatible(f"pieces of `{key}` are missing")
    return DcpTensor(dtype=next(iter(dtypes.values())), shape=shape, chunks=chunks)
