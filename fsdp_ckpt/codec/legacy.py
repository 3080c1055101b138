"""Read files of ``torch.save`` before 1.6: pickles in a row, then each storage as eight bytes of length and its bytes.

Follows ``_legacy_load`` in ``torch/serialization.py``: magic number, protocol version, system facts, the object, the
storage keys. The result looks like an archive, so that readers need no second way; there are no checksums.
"""

from __future__ import annotations

from typing import Any

from fsdp_ckpt.codec import ReadAt
from fsdp_ckpt.codec.known import PLAIN
from fsdp_ckpt.codec.pickles import Machine
from fsdp_ckpt.codec.tensors import TORCH, StorageRef, storage_from_pid
from fsdp_ckpt.codec.torchzip import Archive, ZipRecord
from fsdp_ckpt.errors import Incompatible, MalformedFile

__all__ = ["is_legacy", "load_legacy"]

_MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC_PICKLE = b"\x80\x02\x8a\x0a" + _MAGIC.to_bytes(10, "little")
_FIRST_BYTES = 1 << 20
_MAX_PICKLES_BYTES = 1 << 28


def is_legacy(magic: bytes) -> bool:
    """Tell whether a file that begins with these 16 bytes is one."""
    return magic.startswith(_MAGIC_PICKLE)


def load_legacy(read_at: ReadAt, size: int, *, where: str, allow_unknown: bool = False) -> tuple[Archive, Any]:
    """Return the storages, as an archive, and the value; tensors are ``TensorRef``.

    Raises:
        MalformedFile: The file is damaged.
        Incompatible: It comes from a big-endian machine, or uses views between storages (torch before 0.4).
        UnsafePickle: It refers to a global that is not allowed.
    """
    storages: dict[str, StorageRef] = {}

    def persistent(pid: Any) -> StorageRef:
        storage = storage_from_pid(pid)
        return storages.setdefault(storage.key, storage)

    value, keys, position = _read_pickles(read_at, size, persistent, where, allow_unknown)
    records: dict[str, ZipRecord] = {}
    for key in keys:
        storage = storages.get(key)
        if storage is None or position + 8 > size:
            raise MalformedFile(f"{where}: the storages do not fit the pickle")
        elements = int.from_bytes(read_at(position, 8), "little")
        position += 8
        length = elements * (storage.dtype.itemsize if storage.dtype else 1)
        if elements < storage.size or position + length > size:
            raise MalformedFile(f"{where}: ends within storage `{key}`")
        records[f"data/{key}"] = ZipRecord(name=f"data/{key}", start=position, size=length, crc32=0)
        position += length
    if set(storages) - set(keys):
        raise MalformedFile(f"{where}: storages are missing")
    return Archive(where, read_at, 0, size, records, has_crc=False), value


def _read_pickles(
    read_at: ReadAt, size: int, persistent: Any, where: str, allow_unknown: bool
) -> tuple[Any, list[str], int]:
    """Run the pickles; how long they are shows only then, so more is read when they did not end."""
    num_bytes = min(_FIRST_BYTES, size)
    while True:
        try:
            return _pickles(read_at(0, num_bytes), persistent, where, allow_unknown)
        except MalformedFile:
            if num_bytes == size or num_bytes >= _MAX_PICKLES_BYTES:
                raise
            num_bytes = min(4 * num_bytes, size)


def _pickles(data: bytes, persistent: Any, where: str, allow_unknown: bool) -> tuple[Any, list[str], int]:
    position = 0
    values = []
    for known in (PLAIN, PLAIN, PLAIN, TORCH, PLAIN):
        machine = Machine(
            data, known, where=where, persistent=persistent, allow_unknown=allow_unknown, position=position
        )
        values.append(machine.run())
        position = machine.position
    magic, version, facts, value, keys = values
    if magic != _MAGIC or version != 1001 or not isinstance(facts, dict):
        raise MalformedFile(f"{where}: not a file that torch.save wrote")
    if facts.get("little_endian") is False:
        raise Incompatible(f"{where}: written on a big-endian machine, which is not supported")
    if not isinstance(keys, list) or not all(type(key) is str for key in keys):
        raise MalformedFile(f"{where}: no list of storages")
    return value, keys, position
