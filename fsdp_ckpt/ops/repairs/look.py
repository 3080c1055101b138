"""What a repair has to go by: the checkpoint, what was asked for, and where else to look."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, read_metadata
from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.layouts.dcp import looks_like_dcp
from fsdp_ckpt.layouts.manifest import Manifest
from fsdp_ckpt.ops.repairs.actions import Findings
from fsdp_ckpt.ops.repairs.torch_versions import Version
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.memory import no_gc

if TYPE_CHECKING:
    from fsdp_ckpt.ops.repairs.replica import Refusal

__all__ = ["Look", "Read", "counterpart", "load_metadata", "real_folders"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at a checkpoint.

    Attributes:
        root: The checkpoint's folder.
        shown: What to call it in commands.
        findings: Collects what is found.
        manifest: Ours, where the checkpoint has one that can be read.
        for_torch: The torch that is to read it.
        like: A checkpoint of the same model, whose metadata may be taken.
        replica: Another copy of this checkpoint.
        verify: Compare the checksums of tensors, which reads them.
        count: Told about bytes that were read.
        doubts: What was found out about the other copy, so that it is looked at once.
        saves: Data files by the save that their stamps tell, once they were looked at.
    """

    root: Folder
    shown: str
    findings: Findings
    manifest: Manifest | None = None
    for_torch: Version | None = None
    like: Path | None = None
    replica: Path | None = None
    verify: bool = True
    count: Callable[[int], None] = field(default=lambda _: None)
    doubts: dict[Path, Refusal | None] = field(default_factory=dict)
    saves: dict[str, list[str]] = field(default_factory=dict)

    @property
    def run(self) -> str:
        """What to call the folder above in commands."""
        return os.path.normpath(os.path.join(self.shown, os.pardir))

    def is_link(self, file: str, *, itself: bool = True) -> bool:
        """Tell whether a file, or a folder on the way to it, is a link: those are never written through.

        Args:
            file: Relative to the root.
            itself: Whether a link in place of the file counts; it does not when the link is only moved.
        """
        way = file.rpartition("/")[0]
        looked = file if itself else way
        root = self.root.path.resolve()
        return bool(looked) and os.path.realpath(root / looked) != str(root / looked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A metadata file that could be read, or why it could not."""

    data: bytes = b""
    metadata: DcpMetadata | None = None
    why: str = ""


def load_metadata(folder: Folder, name: str) -> Read | None:
    """Read a metadata file of a folder; None where there is none."""
    if name not in folder.files:
        return None
    where = folder.prefix + name
    try:
        data = folder.store.read(where, limit_bytes=folder.files[name])
        with no_gc():
            return Read(data=data, metadata=read_metadata(data, where=where))
    except FsdpCkptError as error:
        return Read(why=error.message)
    except OSError as error:
        return Read(why=f"{where} cannot be read: {error.strerror}")


def real_folders(root: Folder, depth: int = 3) -> Iterator[Folder]:
    """Yield a folder and those in it that are neither hidden nor links."""
    yield root
    if depth:
        for name in sorted(root.folders):
            if not name.startswith(".") and not (root.path / name).is_symlink():
                yield from real_folders(root.sub(name), depth - 1)


def counterpart(other: Path, prefix: str) -> Folder | None:
    """Return the folder of another checkpoint that is what ``prefix`` is in this one; None where it has none.

    Args:
        other: The other checkpoint, or directly its part.
        prefix: As of ``Folder``.
    """
    below = other / prefix
    for root, inner in ((other, prefix), (other, "")):
        folder = Folder(LocalStore(root), inner)
        if (below if inner else other).is_dir() and (not prefix or looks_like_dcp(folder)):
            return folder
    return None
