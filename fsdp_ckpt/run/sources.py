"""Find the raw bytes behind the chunks of a catalog."""

from __future__ import annotations

import math
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fsdp_ckpt.catalog import Chunk, Encoding, TensorEntry
from fsdp_ckpt.codec.torchzip import resolve_item
from fsdp_ckpt.errors import Incompatible, MalformedFile
from fsdp_ckpt.store.local import LocalStore, OpenFile

__all__ = ["Located", "Sources"]

Located = tuple[LocalStore, Chunk]
"""A RAW chunk and the store that its file is in."""

_OVERHEAD_BYTES = 1 << 20
_MAX_KNOWN = 4096


class Sources:
    """Resolves chunks to raw bytes; use as a context manager.

    Compressed items are expanded into a folder of temporary files, which is removed at the end.

    Args:
        root: The checkpoint's root, or its roots.
        spill: Where temporary files may go; None for the system's folder.
    """

    def __init__(self, root: Path | Sequence[Path], *, spill: Path | None = None) -> None:
        self.store = LocalStore(root)
        self._spill_parent = spill
        self._spill: LocalStore | None = None
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], tuple[Chunk, Chunk]] = {}
        self._expanded: dict[tuple[str, int], Chunk] = {}
        self._expanding: dict[tuple[str, int], threading.Lock] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.store.close()
        if self._spill is not None:
            self._spill.close()
            shutil.rmtree(self._spill.root, ignore_errors=True)

    def resolve(self, tensor: TensorEntry, chunk: Chunk) -> Located:
        """Return where the elements of a chunk lie.

        Raises:
            MalformedFile: The record is damaged, or is not what the metadata say.
            Incompatible: The record needs a package that is not installed.
        """
        match chunk.encoding:
            case Encoding.RAW:
                return self.store, chunk
            case Encoding.TORCH_ZIP:
                return self.store, self._resolved(tensor, chunk)
            case Encoding.ZSTD_TORCH_ZIP:
                return self._expand(tensor, chunk)

    def _resolved(self, tensor: TensorEntry, chunk: Chunk) -> Chunk:
        """Find an item's elements; of one that is cut, each piece asks."""
        place = chunk.file, chunk.start
        known = self._known.get(place)
        if known is not None and known[0] is chunk:
            return known[1]
        where = f"{chunk.file} (`{tensor.key}`)"
        found = resolve_item(chunk, tensor.dtype, self.store.reader(chunk.file), where=where)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[place] = chunk, found
        return found

    def _expand(self, tensor: TensorEntry, chunk: Chunk) -> Located:
        place = chunk.file, chunk.start
        with self._lock:
            if self._spill is None:
                self._spill = LocalStore(Path(tempfile.mkdtemp(prefix=".fsdp-ckpt-", dir=self._spill_parent)))
            spill = self._spill
            turn = self._expanding.setdefault(place, threading.Lock())
        where = f"{chunk.file} (`{tensor.key}`)"
        with turn:  # several threads may want the same item
            known = self._expanded.get(place)
            if known is None:
                name = f"{abs(hash(place)):x}-{chunk.start}"
                limit = math.prod(chunk.lengths) * tensor.dtype.itemsize + _OVERHEAD_BYTES
                size = self._decompress(chunk, spill.root / name, limit, where)
                item = chunk._replace(file=name, start=0, stop=size, encoding=Encoding.TORCH_ZIP)
                known = self._expanded[place] = resolve_item(item, tensor.dtype, spill.reader(name), where=where)
        return spill, known

    def _decompress(self, chunk: Chunk, target: Path, limit: int, where: str) -> int:
        try:
            import zstandard
        except ImportError:
            raise Incompatible(f"{where} is compressed with zstd", hint="pip install 'fsdp-ckpt[zstd]'") from None
        size = 0
        try:
            with self.store.opened(chunk.file) as source, open(target, "wb") as out:
                reader: Any = _Range(source, chunk.start, chunk.stop)
                for piece in zstandard.ZstdDecompressor().read_to_iter(reader):
                    size += len(piece)
                    if size > limit:
                        raise MalformedFile(f"{where}: expands to more than its {limit} bytes")
                    out.write(piece)
        except zstandard.ZstdError as error:
            raise MalformedFile(f"{where}: broken zstd stream: {error}") from None
        return size


class _Range:
    """A part of a file with the ``read`` that zstandard wants."""

    def __init__(self, source: OpenFile, start: int, stop: int) -> None:
        self._source = source
        self._position = start
        self._stop = stop

    def read(self, num_bytes: int) -> bytes:
        piece = self._source.read(self._position, min(num_bytes, self._stop - self._position))
        self._position += len(piece)
        return piece
