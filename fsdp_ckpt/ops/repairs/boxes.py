"""Damaged bytes, and whole copies of them: by the checksums that were recorded when they were written.

A box that several ranks have stored (files per rank, HSDP, metadata per rank) is mended from any of them whose bytes
are right and whose recorded checksums say that it was written with the very same bytes. Whole files are mended from
another copy of the checkpoint, see ``replica``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_ckpt.catalog import Checkpoint, Chunk, Encoding, ObjectEntry, Part, TensorEntry
from fsdp_ckpt.errors import CorruptCheckpoint, FsdpCkptError, Incompatible
from fsdp_ckpt.ops.repairs.actions import Kind, Patch
from fsdp_ckpt.ops.repairs.look import Look
from fsdp_ckpt.ops.repairs.records import check_records, is_zip, table
from fsdp_ckpt.ops.repairs.replica import Extents, restore_file
from fsdp_ckpt.run.checksum import checksum_range, verify_record
from fsdp_ckpt.run.sources import Sources

__all__ = ["mend_boxes"]

_SHOWN = 3

_Range = tuple[int, Path, int, int]
"""Position in the damaged file; the file to take from, and its bytes [start, stop)."""


@dataclass(slots=True)
class _Damage:
    """What is wrong with one file: what mends it, as far as copies of its boxes are at hand, and what none mends."""

    ranges: list[_Range] = field(default_factory=list)
    copies: set[str] = field(default_factory=set)
    mended: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def mend_boxes(look: Look, checkpoint: Checkpoint, gone: Mapping[str, str]) -> None:
    """Compare all checksums and plan to replace what is damaged.

    Args:
        look: The look at the checkpoint.
        checkpoint: As far as it can be read.
        gone: Files that are known to be missing, cut off or unreadable, and why.
    """
    planned = look.findings.written | {fault.where for fault in look.findings.faults}
    gone = {file: why for file, why in gone.items() if file not in planned}
    suspect, sound = _by_manifest(look, gone)
    scan = _Scan(look=look, gone=gone, sound=sound)
    with Sources(look.root.store.roots) as sources:
        for part in checkpoint.parts:
            scan.part(part, sources)
    damages = {file: _Damage(left=[why]) for file, why in gone.items()}
    damages |= {file: _Damage(left=[why]) for file, why in suspect.items() if file not in scan.damages}
    damages |= {file: damage for file, damage in scan.damages.items() if file not in gone}
    for file, damage in sorted(damages.items()):
        if file not in planned:
            _mend_file(look, file, damage, scan.extents)


def _mend_file(look: Look, file: str, damage: _Damage, extents: Extents) -> None:
    hint = _hint(look)
    if look.is_link(file):
        look.findings.fault(
            file, f"{[*damage.left, *damage.mended][0]}; it is a link, which is not written through", hint
        )
        return
    if damage.left and look.replica is not None:
        refusal = restore_file(look, file, damage.left[0], extents)
        if refusal is None:
            return
        damage.left[0] = f"{damage.left[0]}; {refusal.why}"
        if refusal.is_open:
            source, target = shlex.quote(str(look.replica / file)), shlex.quote(f"{look.shown}/{file}")
            hint = f"if you know better: cp -a {source} {target}"
    for why in damage.left[:_SHOWN]:
        look.findings.fault(file, why, hint)
    if len(damage.left) > _SHOWN:
        look.findings.fault(file, f"and {len(damage.left) - _SHOWN} more places in it", hint)
    if not damage.ranges:
        return
    path = Path(look.root.store.path(file))
    listed = look.manifest.files.get(file) if look.manifest is not None and not damage.left else None
    number = len(damage.ranges)
    more = f", and {number - 1} more" if number > 1 else ""
    look.findings.write(
        Kind.RESTORE_BOX,
        file,
        Patch(base=path, size=path.stat().st_size, ranges=sorted(damage.ranges)),
        damage.mended[0] + more,
        source=f"{', '.join(sorted(damage.copies)[:_SHOWN])}, which has {'them' if number > 1 else 'it'} whole",
        crc32=int(listed[1], 16) if listed is not None else None,
    )


def _hint(look: Look) -> str:
    older = f"; or take an older checkpoint: fsdp-ckpt list {shlex.quote(look.run)}" if look.replica is None else ""
    return f"fsdp-ckpt repair {shlex.quote(look.shown)} --replica BACKUP    (another copy of it){older}"


def _by_manifest(look: Look, gone: dict[str, str]) -> tuple[dict[str, str], set[str]]:
    """Compare every file with our manifest; return those whose bytes are wrong, and those that are right.

    Those that are missing, cut off or cannot be read are put into ``gone``.
    """
    suspect: dict[str, str] = {}
    sound: set[str] = set()
    for file, (size, crc) in look.manifest.files.items() if look.manifest is not None else ():
        if file in gone:
            continue
        try:
            have = look.root.store.size(file)
            if have is None or have != size:
                gone[file] = "missing" if have is None else f"has {have} bytes, the manifest says {size}"
            elif look.verify or file.endswith(".metadata"):
                with look.root.store.opened(file) as source:
                    found = checksum_range(source, 0, size)
                look.count(size)
                if found == int(crc, 16):
                    sound.add(file)
                else:
                    suspect[file] = f"its CRC-32 is {found:08x}, the manifest says {crc}"
        except FsdpCkptError as error:
            gone[file] = error.message
        except OSError as error:  # a bad sector: not to be tried again for every tensor
            gone[file] = f"cannot be read: {error.strerror}"
    return suspect, sound


@dataclass(slots=True)
class _Scan:
    """Compares what records are with the checksums that they carry, but for files that are known to be right."""

    look: Look
    gone: Mapping[str, str]
    sound: set[str]
    damages: dict[str, _Damage] = field(default_factory=dict)
    extents: Extents = field(default_factory=dict)
    seen: dict[tuple[str, int, int], str | None] = field(default_factory=dict)
    unverified: int = 0

    def part(self, part: Part, sources: Sources) -> None:
        for tensor in part.tensors.values():
            self._tensor(tensor, sources)
        for entry in part.objects.values():
            self._object(entry)
        if self.unverified:
            text = f"{part.name}: {self.unverified} pieces carry no checksum, so that damage in them cannot be seen"
            self.look.findings.note(text)
            self.unverified = 0

    def _tensor(self, tensor: TensorEntry, sources: Sources) -> None:
        copies = [chunk for chunk in (*tensor.chunks, *tensor.replicas) if chunk.numel]
        if self.look.replica is not None:
            for chunk in copies:
                if chunk.encoding is Encoding.TORCH_ZIP:
                    self.extents.setdefault(chunk.file, set()).add((chunk.start, chunk.stop))
        if not self.look.verify:
            return
        faults = [self._fault(tensor, chunk, sources) for chunk in copies]
        for chunk, why in zip(copies, faults, strict=True):
            if why is None or chunk.file in self.gone:
                continue
            whole = [
                other
                for other, fault in zip(copies, faults, strict=True)
                if fault is None and (other.offsets, other.lengths) == (chunk.offsets, chunk.lengths)
            ]
            self._note(chunk, why, whole)

    def _fault(self, tensor: TensorEntry, chunk: Chunk, sources: Sources) -> str | None:
        """Return what is wrong with a copy of a box; None when nothing is."""
        if chunk.file in self.gone:
            return self.gone[chunk.file]
        if chunk.file in self.sound:
            return None
        place = (chunk.file, *(chunk.crc_range or (chunk.start, chunk.stop)))
        if chunk.crc_range is not None and place in self.seen:  # several tensors in one storage
            return self.seen[place]
        why: str | None = None
        try:
            store, raw = sources.resolve(tensor, chunk)
            self.look.count(verify_record(store, raw, key=tensor.key))
            self.unverified += raw.crc32 is None
        except CorruptCheckpoint as error:
            why = error.message
        except Incompatible as error:
            self.look.findings.note(f"not looked at: {error.message}")
        except OSError as error:
            why = f"`{tensor.key}` cannot be read: {error.strerror}"
        if chunk.crc_range is not None:
            self.seen[place] = why
        return why

    def _note(self, chunk: Chunk, why: str, whole: Sequence[Chunk]) -> None:
        damage = self.damages.setdefault(chunk.file, _Damage())
        for other in whole:
            found = self._range(chunk, other)
            if found is not None:
                if found not in damage.ranges:
                    damage.ranges.append(found)
                    damage.mended.append(why)
                damage.copies.add(other.file)
                return
        if whole:
            why += f"; {whole[0].file} has this box, but nothing tells any more whether with the same numbers"
        damage.left.append(why)

    def _range(self, chunk: Chunk, other: Chunk) -> _Range | None:
        """Return what to copy where; None when the copy was not, for sure, written with the same bytes."""
        store = self.look.root.store
        path = Path(store.path(other.file))
        if chunk.encoding is not other.encoding or chunk.file == other.file:
            return None
        if chunk.encoding is Encoding.TORCH_ZIP:
            tables = [table(store.reader(one.file), one.start, one.stop, where=one.file) for one in (chunk, other)]
            same = (
                tables[0] is not None
                and tables[0] == tables[1]
                and chunk.stop - chunk.start == other.stop - other.start
            )
            return (chunk.start, path, other.start, other.stop) if same else None
        begin, end = chunk.crc_range or (chunk.start, chunk.stop)
        first, last = other.crc_range or (other.start, other.stop)
        facts = [
            (one.crc32, one.strides, one.conj, one.neg, one.start - start, stop - start)
            for one, start, stop in ((chunk, begin, end), (other, first, last))
        ]
        return (begin, path, first, last) if chunk.crc32 is not None and facts[0] == facts[1] else None

    def _object(self, entry: ObjectEntry) -> None:
        """Check a value that is no tensor; there is one copy of it only."""
        reader, file = self.look.root.store.reader(entry.file), entry.file
        if file in self.gone or entry.encoding is not Encoding.TORCH_ZIP:
            return
        try:
            if not is_zip(reader, entry.start, entry.stop):
                return
            if self.look.replica is not None:
                self.extents.setdefault(file, set()).add((entry.start, entry.stop))
            if file in self.sound or entry.decoded or not self.look.verify:
                return
            self.look.count(check_records(self.look.root.store, file, entry.start, entry.stop, what=f"`{entry.key}`"))
        except CorruptCheckpoint as error:
            self.damages.setdefault(file, _Damage()).left.append(error.message)
        except OSError as error:
            self.damages.setdefault(file, _Damage()).left.append(f"`{entry.key}` cannot be read: {error.strerror}")
