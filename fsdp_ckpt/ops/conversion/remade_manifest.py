"""Give a result the manifest of the checkpoint that it was made from: new files, the same step, values and members."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fsdp_ckpt.errors import ChecksumMismatch
from fsdp_ckpt.layouts.manifest import MANIFEST, Manifest, write_manifest
from fsdp_ckpt.ops.conversion.layouts import Laid
from fsdp_ckpt.plan.reshard import Sharding
from fsdp_ckpt.run.checksum import checksum_range, combine_crc, crc32
from fsdp_ckpt.run.engine import OutputSpec
from fsdp_ckpt.store.local import LocalFile, LocalStore
from fsdp_ckpt.store.publish import WHOLE_FILE
from fsdp_ckpt.store.remote.mirrors import materialise

__all__ = ["add_manifest", "check_carried", "new_save_id", "what_is_lost"]


def new_save_id(manifest: Manifest, sharding: Sharding | None) -> str:
    """Return what the files of the result say: the same in a run that resumes, and in every process that shares it.

    Args:
        manifest: Of the source.
        sharding: Of the result; None where it is not sharded.
    """
    form: object = "full"
    if sharding is not None:
        form = sharding.mesh.shape, [(one.pattern, one.dims) for one in sharding.placements]
    return hashlib.sha256(json.dumps([manifest.save_id, form]).encode()).hexdigest()[:32]


def what_is_lost(manifest: Manifest) -> str:
    """Return what a result without the manifest no longer tells."""
    step = [] if manifest.step is None else [f"step {manifest.step}"]
    values = [f"values ({', '.join(manifest.values)})"] if manifest.values else []
    return ", ".join([*step, *values, "the list of files"])


def check_carried(laid: Laid, manifest: Manifest, store: LocalStore) -> None:
    """Compare the files that are copied as they are with what their manifest says of them.

    Args:
        laid: The result; its files that are paths are copied.
        manifest: Of the source.
        store: The source.

    Raises:
        ChecksumMismatch: One is not what was saved.
    """
    for name, content in laid.files.items():
        if not isinstance(content, Path) or name not in manifest.files:
            continue
        size, crc = manifest.files[name]
        path = materialise(content)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            have = os.fstat(fd).st_size
            found = checksum_range(LocalFile(fd), 0, have) if have == size else None
        finally:
            os.close(fd)
        if found != int(crc, 16):
            what = f"{have} bytes" if found is None else f"CRC-32 {found:08x}"
            said = f"{size} bytes" if found is None else f"CRC-32 {int(crc, 16):08x}"
            raise ChecksumMismatch(
                f"`{name}` is damaged: it has {what}, {store.root / MANIFEST} says {said}; nothing was written"
            )


def add_manifest(laid: Laid, manifest: Manifest, save_id: str) -> None:
    """Add a manifest for the files as they will be; what it says about the training job stays.

    Args:
        laid: The result, complete but for this.
        manifest: Of the source.
        save_id: What the first bytes of the result's data files say.
    """
    specs = {spec.name: spec for spec in laid.specs}
    metadata = {name: content for name, content in laid.files.items() if isinstance(content, bytes)}
    carried = {path: facts for path, facts in manifest.files.items() if path in laid.files and path not in metadata}

    def content(folder: Path, crcs: Mapping[str, Mapping[str, int]]) -> bytes:
        files = carried | {name: (len(data), f"{crc32(data, 0):08x}") for name, data in metadata.items()}
        for name, spec in specs.items():
            files[name] = (spec.size, f"{_file_crc(folder / name, spec, crcs[name]):08x}")
        return write_manifest(replace(manifest, save_id=save_id, files=files))

    laid.files[MANIFEST] = content


def _file_crc(path: Path, spec: OutputSpec, crcs: Mapping[str, int]) -> int:
    """Return the CRC-32 of a whole file from those of its tensors and of what lies around them."""
    if WHOLE_FILE in crcs:  # worked out before the file went to a store
        return crcs[WHOLE_FILE]
    pieces = [(start, stop - start, crcs[name]) for name, (start, stop) in spec.ranges.items()]
    around = [(0, spec.head), *(spec.seal(crcs) if spec.seal is not None else ())]
    pieces += [(start, len(data), crc32(data, 0)) for start, data in around]
    found: int | None = 0
    position = 0
    for start, length, crc in sorted(pieces):
        if not length:
            continue
        gap = bytes(start - position)
        for more, num_bytes in ((crc32(gap, 0), len(gap)), (crc, length)):
            if num_bytes and found is not None:
                found = combine_crc(found, more, num_bytes)
        position = start + length
    if found is not None and position == spec.size:
        return found
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # no library that combines checksums
    try:
        return checksum_range(LocalFile(fd), 0, spec.size)
    finally:
        os.close(fd)
