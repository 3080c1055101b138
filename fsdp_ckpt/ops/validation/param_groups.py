"""Read an optimizer's parameter groups: which parameters it holds, and how it is set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fsdp_ckpt.catalog import Encoding, ObjectEntry, Part
from fsdp_ckpt.codec.tensors import TORCH
from fsdp_ckpt.codec.torchzip import open_archive
from fsdp_ckpt.errors import CorruptCheckpoint
from fsdp_ckpt.store.local import LocalStore

__all__ = ["read_group_values"]

_BLOB = re.compile(r"param_groups(?:\.(\d{1,9})\.(params|momentum))?")
"""All groups in one object, or the options that checks ask for."""

_LIMIT_BYTES = 64 << 20


def read_group_values(part: Part, store: LocalStore) -> list[dict[str, Any]]:
    """Return what the groups say: ``params`` and ``momentum`` with their values, other options without.

    What cannot be read is left out: that an object is damaged is found by those who look at records.
    """
    groups: dict[int, dict[str, Any]] = {}
    for entry in part.objects.values():
        match = _BLOB.fullmatch(entry.name)
        if match is not None and match[1] is not None:
            groups.setdefault(int(match[1]), {})[match[2]] = _value(entry, store)
        elif match is not None:
            groups |= _numbered(_value(entry, store))
        elif len(part.objects) == 1 and not part.tensors:  # torch 2.3 and older: an optimizer without tensors
            value = _value(entry, store)
            groups |= _numbered(value.get("param_groups") if isinstance(value, Mapping) else None)
    for group in groups.values():
        if not isinstance(group.get("params"), list | tuple):
            group.pop("params", None)
    return [groups[number] for number in sorted(groups)]


def _numbered(groups: Any) -> dict[int, dict[str, Any]]:
    """Return groups that are one list, by their number."""
    found = (group for group in groups if isinstance(group, Mapping)) if isinstance(groups, list) else ()
    return {number: {str(key): item for key, item in group.items()} for number, group in enumerate(found)}


def _value(entry: ObjectEntry, store: LocalStore) -> Any:
    if entry.decoded:
        return entry.value
    if entry.encoding is not Encoding.TORCH_ZIP or entry.stop - entry.start > _LIMIT_BYTES:
        return None
    try:
        archive = open_archive(store.reader(entry.file), entry.start, entry.stop, where=entry.file)
        return archive.load(TORCH, allow_unknown=True)
    except CorruptCheckpoint:
        return None
