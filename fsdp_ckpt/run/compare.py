"""Read two tensors side by side and say how they differ, in memory that does not depend on their size."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp_ckpt.catalog import DType, TensorEntry
from fsdp_ckpt.plan.boxes import Box, bands, intersect
from fsdp_ckpt.run.cast import cast_bits
from fsdp_ckpt.run.checksum import BLOCK_BYTES, verify_record
from fsdp_ckpt.run.differences import Differences, ValueStats
from fsdp_ckpt.run.elements import bits_differ
from fsdp_ckpt.run.gather import Gatherer, storage_dtype
from fsdp_ckpt.run.progress import Meter
from fsdp_ckpt.run.sides import Side, TensorPair, batches

__all__ = ["Comparer", "Comparison"]

_Array = np.ndarray[Any, np.dtype[Any]]
_CAST_KINDS = {"float", "float8"}
_NO_CAST = {"float4_e2m1fn_x2", "float8_e8m0fnu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was found about one pair of tensors.

    Attributes:
        is_equal: No bit differs; for tensors of different dtypes, no value does.
        is_close: All elements are within the tolerance; False where there is none.
        stats: How they differ; None when they are equal, or when it was not asked for.
        cast: ``a-to-b`` when B is exactly A rounded to B's dtype, ``b-to-a`` for the reverse, ``both`` when the values
            are equal; None when neither holds, or when it was not looked at.
        read_bytes: Bytes of tensors that were read, on both sides together.
    """

    is_equal: bool
    is_close: bool = False
    stats: ValueStats | None = None
    cast: str | None = None
    read_bytes: int = 0


class StoppedError(Exception):
    """Another comparison failed, or the user asked to stop."""


class Comparer:
    """Compares pairs of tensors of equal shape; may be called from several threads.

    Args:
        a: Where the first tensors are.
        b: Where the second ones are.
        meter: Told about bytes that were compared.
        statistics: Work out how tensors differ, not only whether: both are then read to their ends.
        tolerance: Largest absolute difference that counts as equal; None when nothing does.
        rtol: To which this share of ``|a|`` is added.
    """

    def __init__(
        self,
        a: Side,
        b: Side,
        *,
        meter: Meter,
        statistics: bool = True,
        tolerance: float | None = None,
        rtol: float = 0.0,
    ) -> None:
        self._a = a
        self._b = b
        self._meter = meter
        self._statistics = statistics
        self._tolerance = tolerance
        self._rtol = rtol
        self._stop = threading.Event()

    def run_all(self, pairs: Sequence[TensorPair], *, jobs: int) -> list[Comparison]:
        """Compare pairs in several threads.

        Args:
            pairs: What to compare.
            jobs: Threads.

        Returns:
            What was found, in the order of the pairs.

        Raises:
            CorruptCheckpoint: A record is damaged or too short; the message names the side.
        """
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            futures = [pool.submit(self._run, batch) for batch in batches(pairs)]
            try:
                return [found for future in futures for found in future.result()]
            except BaseException as error:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                for future in futures if isinstance(error, StoppedError) else ():  # one of them says why
                    with suppress(StoppedError, CancelledError):
                        future.result()
                raise

    def _run(self, pairs: Sequence[TensorPair]) -> list[Comparison]:
        try:
            return [self.run(pair) for pair in pairs]
        except BaseException:
            self._stop.set()
            raise

    def run(self, pair: TensorPair) -> Comparison:
        """Compare one pair.

        Bits are compared band by band of row-major order. Numbers are worked out from the first band on that differs;
        the norm of A before it is added by reading that part of A once more.

        Raises:
            CorruptCheckpoint: A record is damaged or too short; the message names the side.
        """
        if pair.a.dtype != pair.b.dtype and not self._statistics and self._tolerance is None:
            self._meter.add(pair.num_bytes)
            return Comparison(is_equal=False)
        work = _Work(pair, self._a, self._b, tolerance=self._tolerance, rtol=self._rtol)
        is_whole = self._read(work)
        self._meter.add(max(pair.num_bytes - work.read_bytes, 0))
        is_close = self._tolerance is not None and is_whole and work.differences.num_outside == 0
        if work.first is None or not is_whole:
            return Comparison(is_equal=work.first is None, is_close=is_close, read_bytes=work.read_bytes)
        if self._statistics:
            work.add_leading()
        return Comparison(
            is_equal=pair.a.dtype != pair.b.dtype and work.differences.num_changed == 0 and work.has_numbers,
            is_close=is_close and work.has_numbers,
            stats=work.differences.finish(pair.shape) if self._statistics and work.has_numbers else None,
            cast=work.cast,
            read_bytes=work.read_bytes,
        )

    def _read(self, work: _Work) -> bool:
        """Read both sides; return False when the rest was left, as nothing more had to be known."""
        for start, box in work.bands():
            if self._stop.is_set():
                raise StoppedError
            self._meter.add(work.compare(start, box))
            is_enough = self._tolerance is None or work.differences.num_outside
            if work.first is not None and is_enough and not self._statistics:
                work.verify(box)
                return False
        work.finish()
        return True


class _Work:
    """One pair while it is read.

    Attributes:
        differences: What was found so far.
        first: First element of the first band with differences; None while there is none.
        has_numbers: Whether values can be compared: for packed float4 only bits of equal dtypes can.
        read_bytes: What was read on both sides.
    """

    def __init__(self, pair: TensorPair, a: Side, b: Side, *, tolerance: float | None, rtol: float) -> None:
        self._pair = pair
        self._a = _Reader(a, pair.a)
        self._b = _Reader(b, pair.b)
        self._retyped = pair.a.dtype != pair.b.dtype
        kinds = {dtype.kind for dtype in pair.dtypes}
        names = {dtype.name for dtype in pair.dtypes}
        self._casts = {"a-to-b", "b-to-a"} if kinds <= _CAST_KINDS and not names & _NO_CAST else set()
        self.differences = Differences(*pair.dtypes, tolerance=tolerance, rtol=rtol)
        self.first: int | None = None
        self.has_numbers = not self._retyped or all(dtype.pack == 1 for dtype in pair.dtypes)

    @property
    def read_bytes(self) -> int:
        return self._a.read_bytes + self._b.read_bytes

    @property
    def cast(self) -> str | None:
        """Whether one side is the other in another dtype, see ``Comparison``."""
        if not self._retyped or not self._casts:
            return None
        return "both" if len(self._casts) == 2 else next(iter(self._casts))

    def bands(self) -> Iterator[tuple[int, Box]]:
        """Yield the boxes to compare, each with the row-major number of its first element."""
        start = 0
        for box in bands(self._pair.shape, max(dtype.itemsize for dtype in self._pair.dtypes), BLOCK_BYTES):
            yield start, box
            start += math.prod(box[1])

    def compare(self, start: int, box: Box) -> int:
        """Compare a band, and return the bytes that were read."""
        before = self.read_bytes
        a, b = self._a.read(box), self._b.read(box)
        if self._retyped:
            self.first = 0
            self.differences.add(start, a, b)
            self._check_casts(a, b)
        elif self.first is None and bits_differ(a, b).any():
            self.first = start
            self.differences.add(start, a, b)
        elif self.first is not None:
            self.differences.add(start, a, b)
        return self.read_bytes - before

    def finish(self) -> None:
        """Compare the checksums of records; where the tensors are equal, only of those that were read through."""
        self._a.finish()
        self._b.finish()
        if self.first is not None:
            self.verify(None)

    def verify(self, box: Box | None) -> None:
        """Compare the checksums of records that were not read through: what is damaged must not pass as a difference.

        Args:
            box: Only records that share elements with it.
        """
        self._a.verify(box)
        self._b.verify(box)

    def add_leading(self) -> None:
        """Read what is equal before the first difference once more, for the norms."""
        if self.first:
            again = _Reader(self._a.side, self._pair.a)
            for start, box in self.bands():
                if start >= self.first:
                    break
                self.differences.add_equal(again.read(box))
            self._a.read_bytes += again.read_bytes

    def _check_casts(self, a: _Array, b: _Array) -> None:
        first, second = self._pair.dtypes
        if "a-to-b" in self._casts and not _is_cast(a, first, b, second):
            self._casts.discard("a-to-b")
        if "b-to-a" in self._casts and not _is_cast(b, second, a, first):
            self._casts.discard("b-to-a")


class _Reader:
    """Reads one side of a pair in bands, into memory that is used again."""

    def __init__(self, side: Side, tensor: TensorEntry) -> None:
        self.side = side
        self.read_bytes = 0
        with side.blame():
            self._located = side.resolve(tensor)
            self._gatherer = Gatherer(tensor.key, tensor.dtype, tensor.shape, self._located, verify="passing")
        self._memory: _Array = np.empty(0, dtype=storage_dtype(tensor.dtype))

    def read(self, box: Box) -> _Array:
        """Return the bits of a band in a row; they are good until the next call."""
        count = math.prod(box[1])
        if len(self._memory) < count:
            self._memory = np.empty(count, dtype=self._memory.dtype)
        band = self._memory[:count]
        with self.side.blame():
            self._gatherer.read(box, band.reshape(box[1]))
        self.read_bytes += band.nbytes
        return band

    def finish(self) -> None:
        with self.side.blame():
            self._gatherer.finish()

    def verify(self, box: Box | None) -> None:
        if box is None and not self._gatherer.unverified_bytes:
            return
        for store, chunk in self._located:
            place = store, chunk.file, *(chunk.crc_range or (chunk.start, chunk.stop))
            if place in self.side.sound or (box and intersect((chunk.offsets, chunk.lengths), box) is None):
                continue
            with self.side.blame():
                self.read_bytes += verify_record(store, chunk, key=self._gatherer.key)
            self.side.sound.add(place)


def _is_cast(values: _Array, src: DType, wanted: _Array, dst: DType) -> bool:
    """Tell whether values, rounded to another dtype, are those wanted; NaN may have any bits."""
    found = cast_bits(values, src, dst)
    differ = bits_differ(found.view(wanted.dtype), wanted)
    if not differ.any():
        return True
    with np.errstate(invalid="ignore"):
        both_nan = np.isnan(found[differ]) & np.isnan(wanted[differ].view(found.dtype))
    return bool(both_nan.all())
