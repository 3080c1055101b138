"""What stock loaders return for a checkpoint folder, as digests: the judge of the corruption sweep. No code of ours.

``.metadata`` folders go through ``torch.distributed.checkpoint`` as torch's own ``dcp_to_torch_save`` does it, files of
``torch.save`` through ``torch.load``, safetensors files through their library, by the index where there is one, as
transformers reads them; and of a manifest of ours the step, the world size and the caller's values are taken.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load as load_blob
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["ERROR", "judge"]

ERROR = "error"
"""What a part is where its loader raised."""

_FILL = 0xA5
"""What uninitialised memory is full of: the same in every run, and no value of a checkpoint."""
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_RANK_FILE = re.compile(r".*?(?:_world_size_(\d+))?[._-]rank[_-]?(\d+)\.(?:pt|pth|bin)")
_OTHERS = ("expected", "layout.json")
_NUMPY: Any = np._core.multiarray  # type: ignore[attr-defined]  # where its pickles say that they come from
_SAFE = [
    np.ndarray, np.dtype, np.dtypes.UInt32DType, np.dtypes.Int64DType, np.dtypes.Float64DType, _NUMPY._reconstruct,
    _NUMPY.scalar,
]  # fmt: skip
_EMPTY = torch.empty


def judge(folder: Path) -> dict[str, str]:
    """Return a digest of what is loaded, or ``error``, for each part of a folder."""
    found: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, load in _parts(folder):
            found[name] = _digest(load)
    return found


def _parts(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    for below, folders, files in os.walk(folder):
        folders.sort()
        place = Path(below)
        name = str(place.relative_to(folder))
        names = sorted(file for file in files if not file.startswith(_OTHERS))
        if ".metadata" in names:
            yield f"{name}: dcp", lambda place=place: _dcp(place)  # type: ignore[misc]
        elif any(_RANK_METADATA.fullmatch(file) for file in names):
            ranks = [int(match[1]) for file in names if (match := _RANK_METADATA.fullmatch(file))]
            for rank in ranks:
                yield f"{name}: rank {rank}", lambda place=place, rank=rank: _dcp_of_rank(place, rank)  # type: ignore[misc]
        if any(file.endswith(".safetensors") for file in names):
            yield f"{name}: safetensors", lambda place=place, names=names: _safetensors(place, names)  # type: ignore[misc]
        for file in names:
            path = place / file
            if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"):
                yield f"{name}: {file}", lambda path=path: _torch_file(path)  # type: ignore[misc]
            elif file == "fsdp_ckpt.json":
                yield f"{name}: {file}", lambda path=path: _manifest(path)  # type: ignore[misc]


def _digest(load: Callable[[], Any]) -> str:
    try:
        found = hashlib.sha256()
        for line in _lines("", load()):
            found.update(line)
            found.update(b"\0")
        return found.hexdigest()
    except (Exception, CheckpointException):  # noqa: BLE001  # whatever a loader raises is its answer
        return ERROR


def _dcp(folder: Path) -> Any:
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    state: dict[str, Any] = {}
    try:
        with _deterministic_memory():
            _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    except (Exception, CheckpointException):  # the latter is no Exception
        if not _holds_blobs(folder):
            raise
        state = {name: load_blob((folder / name).read_bytes()) for name in _files_of(metadata)}
    keys = {key: _facts(item) for key, item in metadata.state_dict_metadata.items()}
    return {"state": state, "keys": keys}


def _facts(item: Any) -> Any:
    """What loading by key goes by."""
    return [tuple(item.size), str(item.properties.dtype)] if hasattr(item, "size") else None


def _files_of(metadata: Any) -> list[str]:
    return sorted({info.relative_path for info in metadata.storage_data.values()})


def _holds_blobs(folder: Path) -> bool:
    """Tell whether data files hold safetensors blobs, which torch 2.13 writes into ``.distcp`` and cannot read."""
    file = next(iter(sorted(folder.glob("*.distcp"))), None)
    return file is not None and file.read_bytes()[8:9] == b"{"


def _dcp_of_rank(folder: Path, rank: int) -> Any:
    """Read one rank's metadata as if they were all."""
    with tempfile.TemporaryDirectory(prefix="judge-") as place:
        for path in folder.iterdir():
            if path.suffix == ".distcp":
                (Path(place) / path.name).symlink_to(path)
        (Path(place) / ".metadata").symlink_to(folder / f"__{rank}.metadata")
        return _dcp(Path(place))


@contextmanager
def _deterministic_memory() -> Iterator[None]:
    def filled(*arguments: Any, **options: Any) -> Tensor:
        tensor = _EMPTY(*arguments, **options)
        storage: Any = tensor.untyped_storage()
        storage.fill_(_FILL)
        return tensor

    torch.empty = filled
    try:
        yield
    finally:
        torch.empty = _EMPTY


def _safetensors(folder: Path, names: list[str]) -> Any:
    if any(name.startswith("shard-") for name in names):
        state: dict[str, Any] = {}
        reader = HuggingFaceStorageReader(str(folder))
        with _deterministic_memory():
            _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        return state
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = {name: load_file(folder / name) for name in sorted(set(weight_map.values()))}
        return {key: files[name][key] for key, name in weight_map.items()}
    return {name: load_file(folder / name) for name in names if name.endswith(".safetensors")}


def _torch_file(path: Path) -> Any:
    match = _RANK_FILE.fullmatch(path.name)
    if match is None:
        with torch.serialization.safe_globals(list(_SAFE)):
            return torch.load(path, weights_only=True, map_location="cpu")
    world_size = int(match[1]) if match[1] else 1 + max(
        int(other[2]) for file in os.listdir(path.parent) if (other := _RANK_FILE.fullmatch(file))
    )  # fmt: skip
    dist.init_process_group("fake", rank=int(match[2]), world_size=world_size, store=FakeStore())
    try:
        return list(_lines("", torch.load(path, weights_only=False, map_location="cpu")))
    finally:
        dist.destroy_process_group()


def _manifest(path: Path) -> Any:
    data = json.loads(path.read_bytes())
    return [repr(data["step"]), repr(data["world_size"]), json.dumps(data["values"], sort_keys=True)]


def _lines(place: str, value: Any) -> Iterator[bytes]:
    """Yield everything in a value, in an order that does not depend on how it is stored."""
    if isinstance(value, Mapping):
        yield f"{place}{{{len(value)}".encode()
        for key in sorted(value, key=repr):
            yield from _lines(f"{place}/{key!r}", value[key])
    elif isinstance(value, list | tuple):
        yield f"{place}[{len(value)}".encode()
        for number, item in enumerate(value):
            yield from _lines(f"{place}/{number}", item)
    elif isinstance(value, ShardedTensor):
        metadata = value.metadata()
        yield f"{place} {tuple(metadata.size)} {metadata.tensor_properties.dtype}".encode()
        for shard in value.local_shards():
            yield from _lines(f"{place}@{shard.metadata.shard_offsets} {shard.metadata.shard_sizes}", shard.tensor)
    elif isinstance(value, DTensor):
        yield f"{place} {tuple(value.shape)} {value.placements} {value.device_mesh.mesh.tolist()}".encode()
        yield from _lines(f"{place}@", value._local_tensor)
    elif isinstance(value, Tensor):
        yield f"{place} {value.dtype} {tuple(value.shape)}".encode()
        plain = value.detach().resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
        yield bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""
    elif isinstance(value, np.ndarray):
        yield f"{place} {value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, bytes):
        yield place.encode()
        yield value
    elif isinstance(value, random.Random):
        yield from _lines(place, value.getstate())
    else:
        yield f"{place} {type(value).__qualname__} {re.sub('0x[0-9a-f]+', '', repr(value))}".encode()
