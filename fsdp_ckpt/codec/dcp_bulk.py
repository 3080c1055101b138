"""Read long runs of alike records in a ``.metadata`` pickle at once.

A checkpoint of thousands of ranks has millions of chunks, whose records are alike to the byte but for the numbers in
them. The first record shows which memo slots all of them refer to; a regular expression made from it then matches one
record after the other. What does not match (the first record, the edge of a pickle frame, an unusual form) is left to
the ordinary machine, opcode by opcode. The result is the same, five times sooner.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.codec.pickles import Machine

__all__ = ["BulkMachine", "BulkReader", "NeedsPlainRunError"]

_SIZE_CLASS = "torch.Size"
_INFO_CLASS = "torch.distributed.checkpoint.filesystem._StorageInfo"
_CACHE_LIMIT = 1 << 20
_MAX_FILE_BYTES = 1 << 62


class _Skipped:
    """Fills memo slots of records that were matched in bulk."""


_SKIPPED = _Skipped()


class NeedsPlainRunError(Exception):
    """An opcode refers to a memo slot that bulk matching left empty: read again without it."""


class BulkMachine(Machine):
    """A machine that notices references into records which were matched in bulk."""

    def get(self, index: int, width: int) -> None:
        """Push from the memo.

        Raises:
            NeedsPlainRunError: The slot was skipped.
        """
        if self.memo[index] is _SKIPPED:
            raise NeedsPlainRunError
        super().get(index, width)


# Opcodes: K M J \x8a push integers, h and j push from the memo, \x8c a short text; ) \x81 \x94 } \x94 ( begin an
# object and its state, u b end it; \x85-\x87 make a tuple, R calls, \x94 memoizes.
_NEW = rb"\)\x81\x94\}\x94\("
_GET = rb"h.|j.{4}"
_LONG = rb"\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8}"
_INT = rb"K.|M..|J.{4}|" + _LONG
_INT_WIDTHS = {ord("K"): 2, ord("M"): 3, ord("J"): 5}
_INLINE_TEXT = rb"\x8c(.[^\x94]*)\x94"
_UNMATCHED = re.compile(rb"(?!)")

_Form = tuple[bool, bool, bool]

_CHUNK_KEYS = {"key_offsets": "offsets", "key_sizes": "sizes"}
_STORAGE_KEYS = {
    "key_fqn": "fqn",
    "key_index": "index",
    "key_offset": "offset",
    "key_path": "relative_path",
    "key_start": "offset",
    "key_length": "length",
}


def _get(name: str, fixed: Mapping[str, bytes]) -> bytes:
    """Return the pattern of a push from the memo: any one, as a named group, or exactly the known one."""
    return re.escape(fixed[name]) if name in fixed else b"(?P<%s>%s)" % (name.encode(), _GET)


def _size(name: str, fixed: Mapping[str, bytes]) -> bytes:
    dims = rb"(?P<%s>(?:%s)+)" % (name.encode(), _INT)
    return _get(f"{name}_class", fixed) + dims + rb"[\x85\x86\x87]\x94\x85\x94R\x94"


def _chunk_pattern(fixed: Mapping[str, bytes]) -> re.Pattern[bytes]:
    parts = (
        _get("cls", fixed) + _NEW,
        _get("key_offsets", fixed) + _size("offsets", fixed),
        _get("key_sizes", fixed) + _size("sizes", fixed) + rb"ub",
    )
    return re.compile(b"".join(parts), re.DOTALL)


def _storage_pattern(fixed: Mapping[str, bytes], inline: _Form) -> re.Pattern[bytes]:
    """Return the pattern of an index and its storage info.

    Args:
        fixed: Pushes from the memo that are the same in every record.
        inline: Whether the key, the chunk's offsets and the file name stand in the record, rather than in the memo.
    """
    get = b"(%s)" % _GET
    parts = (
        _get("cls", fixed) + _NEW,
        _get("key_fqn", fixed) + (_INLINE_TEXT if inline[0] else get),
        _get("key_index", fixed) + rb"(?:K.|M..|J.{4}|N)",
        _get("key_offset", fixed) + (_size("place", fixed) if inline[1] else get) + rb"ub",
        _get("info_cls", fixed) + _NEW,
        _get("key_path", fixed) + (_INLINE_TEXT if inline[2] else get),
        _get("key_start", fixed) + b"(%s)" % _INT,
        _get("key_length", fixed) + b"(%s)" % _INT + rb"ub",
    )
    return re.compile(b"".join(parts), re.DOTALL)


_FORMS = [(fqn, place, path) for fqn in (True, False) for place in (True, False) for path in (False, True)]


class BulkReader:
    """The shortcuts for one pickle: ``chunks`` and ``storage`` are ``Constructor.bulk`` of two classes."""

    def __init__(self) -> None:
        self._dims: dict[bytes, Shape] = {}
        self._lengths: dict[bytes, int] = {}
        self._texts: dict[bytes, str] = {}
        self._any_chunk = _chunk_pattern({})
        self._any_storage = {form: _storage_pattern({}, form) for form in _FORMS}
        self._chunk = _UNMATCHED
        self._storages: dict[_Form, re.Pattern[bytes]] = {}

    def chunks(self, m: Machine, position: int) -> None:
        """Replace the ChunkStorageMetadata class on top of the stack by as many (offsets, lengths) as follow."""
        match = self._chunk.match(m.data, position)
        if match is None:
            fixed = _learn(m, self._any_chunk.match(m.data, position), _CHUNK_KEYS)
            if fixed is None:
                return
            self._chunk = _chunk_pattern(fixed)
            match = self._chunk.match(m.data, position)
        dims, pattern, skip, found = self._dims, self._chunk, _SKIPPED, []
        while match is not None:
            first, second = match.groups()
            offsets = dims.get(first) or self._parse_dims(first)
            lengths = dims.get(second) or self._parse_dims(second)
            found.append((offsets, lengths))
            m.memo += (skip, skip, skip, skip, offsets, skip, skip, lengths)
            position = match.end()
            match = pattern.match(m.data, position)
        _accept(m, found, position)

    def storage(self, m: Machine, position: int) -> None:
        """Replace the MetadataIndex class on top of the stack by as many (index, info) pairs as follow."""
        form, pattern = self._storage_form(m, position)
        match = pattern.match(m.data, position)
        dims, lengths, texts, data = self._dims, self._lengths, self._texts, m.data
        inline_fqn, inline_place, inline_path = form
        found: list[tuple[Any, ...]] = []
        while match is not None:
            fqn_bytes, place_bytes, path_bytes, start, length = match.groups()
            fqn = texts.get(fqn_bytes) or self._text(m, fqn_bytes, inline=inline_fqn)
            path = texts.get(path_bytes) or self._text(m, path_bytes, inline=inline_path)
            place = (dims.get(place_bytes) or self._parse_dims(place_bytes)) if inline_place else _fetch(m, place_bytes)
            if not fqn or not path or type(place) is not tuple:
                break
            num_bytes = lengths.get(length)
            if num_bytes is None:
                num_bytes = lengths[length] = _integer(length)
            first = _integer(start)
            if first < 0 or num_bytes < 0 or first + num_bytes >= _MAX_FILE_BYTES:
                raise ValueError("an impossible offset or length")
            found += ((fqn, place), (path, first, num_bytes, ()))
            position = match.end()
            match = pattern.match(data, position)
        # Object and state of both records; one more for a text, three for a size. Later records refer to file names.
        skipped = [_SKIPPED] * (4 + inline_fqn + 3 * inline_place)
        if inline_path:
            m.memo += [slot for info in found[1::2] for slot in (*skipped, info[0])]
        else:
            m.memo += skipped * (len(found) // 2)
        _accept(m, found, position)

    def _storage_form(self, m: Machine, position: int) -> tuple[_Form, re.Pattern[bytes]]:
        """Return the form of the record here, learning it at first sight."""
        for form, pattern in self._storages.items():
            if pattern.match(m.data, position):
                return form, pattern
        for form, pattern in self._any_storage.items():
            fixed = None if form in self._storages else _learn(m, pattern.match(m.data, position), _STORAGE_KEYS)
            if fixed is not None:
                self._storages[form] = _storage_pattern(fixed, form)
                return form, self._storages[form]
        return _FORMS[0], _UNMATCHED

    def _text(self, m: Machine, raw: bytes, *, inline: bool) -> str:
        """Return a text; empty when the match is not one after all (it contains the byte of MEMOIZE)."""
        if inline:
            if raw[0] != len(raw) - 1:
                return ""
            text = raw[1:].decode()
        else:
            text = _fetch(m, raw)
            if type(text) is not str:
                return ""
        if len(self._texts) < _CACHE_LIMIT:
            self._texts[raw] = text
        return text

    def _parse_dims(self, raw: bytes) -> Shape:
        sizes, position = [], 0
        while position < len(raw):
            width = _INT_WIDTHS.get(raw[position]) or 2 + raw[position + 1]
            sizes.append(_integer(raw[position : position + width]))
            position += width
        if min(sizes) < 0:
            raise ValueError("a negative size")
        shape = tuple(sizes)
        if len(self._dims) < _CACHE_LIMIT:
            self._dims[raw] = shape
        return shape


def _learn(m: Machine, match: re.Match[bytes] | None, keys: Mapping[str, str]) -> dict[str, bytes] | None:
    """Return the pushes that are the same in every record, or None when this is not the expected record."""
    if match is None or any(_fetch(m, match[group]) != text for group, text in keys.items()):
        return None
    fixed = {group: match[group] for group in (*keys, "cls")}
    groups = match.groupdict()
    classes = dict.fromkeys(("offsets_class", "sizes_class", "place_class"), _SIZE_CLASS) | {"info_cls": _INFO_CLASS}
    for group, name in classes.items():
        if group in groups:
            if getattr(_fetch(m, groups[group]), "name", None) != name:
                return None
            fixed[group] = groups[group]
    return fixed


def _accept(m: Machine, found: list[Any], position: int) -> None:
    if found:
        m.stack[-1:] = found
        m.position = position


def _fetch(m: Machine, get: bytes) -> Any:
    value = m.memo[int.from_bytes(get[1:], "little")]
    if value is _SKIPPED:
        raise NeedsPlainRunError
    return value


def _integer(raw: bytes) -> int:
    """Return the number of a BININT1, BININT2, BININT or LONG1 opcode; only the last two have a sign."""
    code = raw[0]
    if code == 0x8A:
        return int.from_bytes(raw[2:], "little", signed=True)
    return int.from_bytes(raw[1:], "little", signed=code == 0x4A)
