"""Which torch can read which ``.metadata``: what stands in the way, and what rewriting cannot help.

The versions are those in which torch's ``distributed/checkpoint`` changed: 2.3 its own TensorProperties, 2.4
StorageMeta, 2.7 transforms, 2.9 a file per rank, 2.15 six fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fsdp_ckpt.codec.dcp_metadata import DcpMetadata
from fsdp_ckpt.codec.dcp_metadata_facts import MetadataFacts
from fsdp_ckpt.errors import Incompatible, UsageError

__all__ = ["Version", "obstacles", "parse_version", "refusals"]

Version = tuple[int, int]

_OLDEST: Version = (2, 3)
_STORAGE_META: Version = (2, 4)
_TRANSFORMS: Version = (2, 7)
_SIX_FIELDS: Version = (2, 15)
_DTYPES: dict[str, Version] = {"float8_e8m0fnu": (2, 7), "float4_e2m1fn_x2": (2, 8)}
_FOREIGN = {"megatron": "Megatron-core", "olmo_core": "OLMo-core", "bytecheckpoint": "ByteCheckpoint"}


def parse_version(text: str) -> Version:
    """Return the version of torch that a text names.

    Raises:
        UsageError: It names none.
        Incompatible: One that our files are of no use to.

    Example:
        >>> parse_version("2.9.1")
        (2, 9)
    """
    match = re.fullmatch(r"v?(\d{1,3})\.(\d{1,3})(\.\d+)?([+.a-z]\S*)?", text.strip())
    if match is None:
        raise UsageError(f"`{text}` is no version of torch", hint="write it as --for-torch 2.9")
    version = int(match[1]), int(match[2])
    if version < _OLDEST:
        raise Incompatible(
            f"torch {text} cannot be served: before 2.3 the classes in `.metadata` had other names and no safe form",
            hint="install torch 2.3 or newer there, or use fsdp-ckpt merge: any torch reads its files",
        )
    return version


def obstacles(facts: MetadataFacts, version: Version) -> Iterator[str]:
    """Yield what keeps a torch, or some Python, from reading a ``.metadata`` file, and that rewriting mends."""
    if facts.fields > 5 and version < _SIX_FIELDS:
        yield "tensor properties of six fields, as torch 2.15 writes them"
    modules = {name.partition(".")[0] for name in facts.globals}
    for module, name in _FOREIGN.items():
        if module in modules:
            yield f"classes of {name}, which torch alone lacks"
    if any(name.startswith("pathlib._local.") for name in facts.globals):
        yield "a path of Python 3.13, which older Python cannot load"
    if "pathlib.WindowsPath" in facts.globals:
        yield "a path of Windows, which other systems cannot load"
    if any(name.endswith(".getattr") for name in facts.globals):
        yield "calls of getattr, as Python 3.11.2 writes them, which careful loaders refuse"
    if version < _STORAGE_META and any(name.endswith(".StorageMeta") for name in facts.globals):
        yield "the class StorageMeta, which came with torch 2.4"


def refusals(metadata: DcpMetadata, version: Version) -> Iterator[str]:
    """Yield why a torch cannot read the items themselves, which no ``.metadata`` can help."""
    shown = ".".join(map(str, version))
    for name in sorted({tensor.dtype.name for tensor in metadata.tensors.values()} & _DTYPES.keys()):
        if version < _DTYPES[name]:
            yield f"torch {shown} has no {name}"
    if version < _TRANSFORMS and any(info[3] for info in metadata.storage.values()):
        yield f"items are compressed, which torch {shown} cannot undo (2.7 and newer can)"
    if metadata.writer == "ByteCheckpoint":
        yield "items are bare bytes of ByteCheckpoint, which no torch reads"
    elif _has_blobs(metadata):
        yield "items are safetensors, which no torch reads back from .distcp files"


def _has_blobs(metadata: DcpMetadata) -> bool:
    for key, tensor in metadata.tensors.items():
        for offsets, lengths in tensor.chunks:
            num_bytes = tensor.dtype.itemsize
            for length in lengths:
                num_bytes *= length
            info = metadata.storage.get((key, offsets))
            if info is not None and num_bytes and info[2] == num_bytes and not info[3]:
                return True
    return False
