"""Changes that nobody can find, as the writer recorded nothing that they contradict: told from the files alone.

Whatever ``validate`` misses has to be of one of these kinds; they are computed with the standard library and torch,
from the files before and after the change.
"""

from __future__ import annotations

import json
import pickle
import re
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any

import zstandard

from tests.hostile.corruption import Change
from tests.hostile.loader_judge import ERROR
from tests.hostile.operations import Tree
from tests.hostile.regions import NO_CRC, regions_of

__all__ = ["BYTES", "kind_of"]

SAFETENSORS = "bytes of tensors in safetensors files, which have no checksums"
WITHOUT_CRC = "bytes of archives whose writer computed no checksums"
BYTES = frozenset({SAFETENSORS, WITHOUT_CRC})
"""Kinds that are about bytes: a note has to say that these have no checksum."""
HEADER = "names and types in a safetensors header that no index contradicts"
UNLISTED = "a file deleted that nothing lists"
STATE_FILE = "state files of ranks exchanged, which do not say whose they are"
EQUAL_FILES = "files exchanged whose items are equal in every header"
EXCHANGED = "places of items exchanged in .metadata that look alike"
RENAMED = "an item renamed wherever its name stands"

_STATE_FILE = re.compile(r"(random_states|extra_state|rng_state|sampler|dl_state_dict).*")
_NUMBERED = re.compile(r"[^/]*(rank_?\d+|random_states_\d+|^__\d+|(?<!model)-\d+-of-\d+)\.\w+")


def kind_of(change: Change, before: Tree, after: Tree, parts: Mapping[str, str]) -> str | None:
    """Return the kind of a change that cannot be found, None for one that can.

    Args:
        change: What was done.
        before: All files before.
        after: All files after.
        parts: What the judge says of the changed ones.
    """
    file = change.files[0]
    match change.kind:
        case "flip" if change.region in ("safetensors data", "blob data"):
            return SAFETENSORS
        case "flip" if change.region.endswith(NO_CRC) and "directory" not in change.region:
            return WITHOUT_CRC
        case "flip" if change.region == "safetensors header":
            return HEADER if _header_agrees(file, before, after) else None
        case "delete":
            return None if _is_listed(file, before) else UNLISTED
        case "swap" | "copy":
            if all(_STATE_FILE.fullmatch(name.rpartition("/")[2]) for name in change.files):
                return STATE_FILE
            first, second = (_skeleton(name, before[name]) for name in change.files)
            return EQUAL_FILES if first == second else None
        case "flip" | "edit" if file.endswith(".metadata") and ERROR not in parts.values():
            return _metadata_kind(file, before, after)
    return None


def _header_agrees(file: str, before: Tree, after: Tree) -> bool:
    """Tell whether a header still describes the same bytes, with names that an index does not contradict."""
    old, new = (_header(tree[file]) for tree in (before, after))
    if new is None or old is None or sorted(_places(old)) != sorted(_places(new)):
        return False
    folder = file.rpartition("/")[0]
    index = next((name for name in before if name.endswith(".index.json") and name.rpartition("/")[0] == folder), None)
    return index is None or old.keys() == new.keys()


def _header(data: bytes) -> dict[str, Any] | None:
    try:
        (size,) = struct.unpack_from("<Q", data)
        header: dict[str, Any] = json.loads(data[8 : 8 + size])
    except (ValueError, struct.error):
        return None
    return header


def _places(header: Mapping[str, Any]) -> list[list[int]]:
    return [item.get("data_offsets", []) for name, item in header.items() if name != "__metadata__"]


def _is_listed(file: str, tree: Tree) -> bool:
    name = file.rpartition("/")[2]
    folder = file.rpartition("/")[0]
    if any(name.encode() in content for other, content in tree.items() if other != file):
        return True
    others = [other for other in tree if other != file and other.rpartition("/")[0] == folder]
    alike = re.sub(r"\d+", "#", name)
    has_siblings = any(re.sub(r"\d+", "#", other.rpartition("/")[2]) == alike for other in others)
    return name == ".metadata" or (bool(_NUMBERED.fullmatch(name)) and has_siblings)


def _skeleton(file: str, data: bytes) -> list[Any]:
    """Return what the headers of a file's archives say, without elements and their checksums."""
    return [
        (
            region.name,
            region.stop - region.start,
            data[region.start : region.stop] if "data.pkl" in region.name else b"",
        )
        for region in regions_of(file, data)
    ]


def _metadata_kind(file: str, before: Tree, after: Tree) -> str | None:
    old, new = (pickle.loads(tree[file]) for tree in (before, after))
    if _facts(old) == _facts(new):
        return EXCHANGED if _look_alike(file[: file.rfind("/") + 1], old, new, before) else None
    return RENAMED if _is_renamed(old, new) else None


def _facts(metadata: Any) -> Any:
    items = {key: _item(item) for key, item in metadata.state_dict_metadata.items()}
    places = Counter((info.relative_path, info.offset, info.length) for info in metadata.storage_data.values())
    return items, places, metadata.planner_data


def _item(item: Any) -> Any:
    if not hasattr(item, "chunks"):
        return None
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in item.chunks]
    return tuple(item.size), str(item.properties.dtype), chunks


def _look_alike(folder: str, old: Any, new: Any, tree: Tree) -> bool:
    for index, place in new.storage_data.items():
        have = old.storage_data.get(index)
        if have is None:
            return False
        if have != place and index.offset is not None:
            first, second = (
                _skeleton(".distcp", _item_bytes(tree[folder + info.relative_path], info)) for info in (have, place)
            )
            if first != second:
                return False
    return True


def _item_bytes(data: bytes, info: Any) -> bytes:
    item = data[info.offset : info.offset + info.length]
    if item[:4] != b"\x28\xb5\x2f\xfd":
        return item
    with zstandard.ZstdDecompressor().stream_reader(item) as stream:
        return bytes(stream.read())


def _is_renamed(old: Any, new: Any) -> bool:
    """Tell whether all is the same but for one name, which stands at its old place nowhere."""
    items = [list(map(_item, metadata.state_dict_metadata.values())) for metadata in (old, new)]
    places = [
        [(index.offset, info.relative_path, info.offset, info.length) for index, info in metadata.storage_data.items()]
        for metadata in (old, new)
    ]
    keys = new.state_dict_metadata.keys()
    paths = new.planner_data or {}
    agrees = all(".".join(map(str, paths[key])) == key for key in keys if key in paths) and (
        not paths or keys <= paths.keys()
    )
    return items[0] == items[1] and places[0] == places[1] and {i.fqn for i in new.storage_data} <= keys and agrees
