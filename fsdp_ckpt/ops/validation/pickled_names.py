"""Look for the names of modules in pickles, without reading these: what they are made of tells who can load them."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_ckpt.catalog import Part
from fsdp_ckpt.store.local import LocalStore

__all__ = ["NEW_PATHS", "foreign_packages", "names_module", "oldest_for_dtensor"]

NEW_PATHS = b"pathlib._local"
"""Where Python 3.13 has the classes of paths."""

_FOREIGN = {
    "Megatron-core": b"megatron.core.dist_checkpointing.strategies.torch",
    "OLMo-core": b"olmo_core.distributed.checkpoint.filesystem",
    "ByteCheckpoint": b"bytecheckpoint.checkpointer.meta_type",
}
_DTENSOR_MODULES: tuple[tuple[tuple[int, int], bytes], ...] = (
    ((2, 9), b"ctorch.distributed._mesh_layout\n"),
    ((2, 5), b"ctorch.distributed.tensor._dtensor_spec\n"),
    ((2, 2), b"ctorch.distributed.device_mesh\n"),
    ((2, 1), b"ctorch.distributed._tensor"),
)
"""Where DTensor came to stand, as pickles of ``torch.save`` name it; the newest first."""

_WINDOW_BYTES = 1 << 20


def foreign_packages(store: LocalStore, files: list[str]) -> Iterator[str]:
    """Yield packages whose classes metadata name."""
    for package, module in _FOREIGN.items():
        if any(names_module(store, file, module) for file in files):
            yield package


def names_module(store: LocalStore, file: str, module: bytes) -> bool:
    """Tell whether a pickle has a module's name as a short text of its own, as torch's pickles name their globals."""
    return _holds(store, file, b"\x8c" + bytes([len(module)]) + module)


def oldest_for_dtensor(part: Part, store: LocalStore) -> tuple[int, int] | None:
    """Return since when torch has the modules of the DTensors in files of ranks; None where there are none.

    The first file is looked at: all ranks have the same torch.
    """
    if all(entry.placements in (None, "ShardedTensor") for entry in part.tensors.values()):
        return None
    file = next(iter(part.files))
    return next((since for since, module in _DTENSOR_MODULES if _holds(store, file, module)), None)


def _holds(store: LocalStore, file: str, needle: bytes) -> bool:
    read, size = store.reader(file), store.size(file) or 0
    return any(
        needle in read(start, min(_WINDOW_BYTES + len(needle), size - start)) for start in range(0, size, _WINDOW_BYTES)
    )
