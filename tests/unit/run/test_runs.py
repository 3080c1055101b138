"""Where a box is unbroken runs of source files. Judge: the bytes of torch's own slice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fsdp_ckpt.catalog import DTYPES, Chunk, TensorEntry
from fsdp_ckpt.plan.boxes import Box
from fsdp_ckpt.run.runs import Run, find_runs, is_read_in_order
from fsdp_ckpt.run.tasks import CopyTask
from fsdp_ckpt.store.local import LocalStore
from tests.build import full_bits

GAP = b"\xee" * 11


def shelf(folder: Path, tensor: torch.Tensor, rows: Sequence[tuple[int, int]]) -> list[tuple[LocalStore, Chunk]]:
    """Store row blocks in one file, with gaps between them."""
    data, located, store = bytearray(GAP), [], LocalStore(folder)
    for start, stop in rows:
        piece = full_bits(tensor[start:stop])
        place = len(data)
        data += piece + GAP
        offsets = (start, *[0] * (tensor.dim() - 1))
        located.append((store, Chunk(offsets, (stop - start, *tensor.shape[1:]), "f", place, place + len(piece))))
    (folder / "f").write_bytes(data)
    return located


def task(tensor: torch.Tensor, box: Box, located: Sequence[tuple[LocalStore, Chunk]]) -> CopyTask:
    chunks = [chunk for _, chunk in located]
    entry = TensorEntry(key="w", name="w", dtype=DTYPES["int32"], shape=tuple(tensor.shape), chunks=chunks)
    return CopyTask(tensor=entry, dtype=entry.dtype, box=box, chunks=chunks, position=0, num_bytes=0)


def read(folder: Path, runs: Sequence[Run]) -> bytes:
    data = (folder / "f").read_bytes()
    return b"".join(data[run.start : run.start + run.num_bytes] for run in runs)


TENSOR = torch.arange(8 * 3 * 2, dtype=torch.int32).reshape(8, 3, 2)
BLOCKS = [(5, 8), (0, 2), (2, 5)]


def test_row_blocks(tmp_path: Path) -> None:
    everything = shelf(tmp_path, TENSOR, BLOCKS)
    for start, stop in itertools.combinations(range(9), 2):
        located = [
            pair for pair in everything if pair[1].offsets[0] < stop and start < pair[1].offsets[0] + pair[1].lengths[0]
        ]
        box = (start, 0, 0), (stop - start, 3, 2)
        runs = find_runs(task(TENSOR, box, located), located)
        assert runs is not None
        assert read(tmp_path, runs) == full_bits(TENSOR[start:stop])
        whole = {(a, b) for a, b in BLOCKS if start <= a and b <= stop}
        assert sum(run.is_record for run in runs) == len(whole)


def test_a_part_of_one_row(tmp_path: Path) -> None:
    located = shelf(tmp_path, TENSOR, [(0, 8)])
    for box, wanted in [
        (((3, 1, 0), (1, 2, 2)), TENSOR[3:4, 1:3]),
        (((3, 1, 1), (1, 1, 1)), TENSOR[3:4, 1:2, 1:2]),
        (((7, 2, 0), (1, 1, 2)), TENSOR[7:8, 2:3]),
    ]:
        runs = find_runs(task(TENSOR, box, located), located)
        assert runs is not None
        assert read(tmp_path, runs) == full_bits(wanted)
        assert [run.is_record for run in runs] == [False]


@pytest.mark.parametrize("box", [((0, 0, 0), (8, 3, 1)), ((0, 1, 0), (2, 1, 2)), ((2, 0, 1), (2, 3, 1))])
def test_what_is_no_run_has_to_be_gathered(tmp_path: Path, box: Box) -> None:
    located = shelf(tmp_path, TENSOR, [(0, 8)])
    assert find_runs(task(TENSOR, box, located), located) is None


def test_columns_have_to_be_gathered_unless_they_are_asked_for_as_they_are(tmp_path: Path) -> None:
    piece = TENSOR[:, :, :1]
    (tmp_path / "f").write_bytes(full_bits(piece))
    located = [(LocalStore(tmp_path), Chunk((0, 0, 0), (8, 3, 1), "f", 0, 96))]
    runs = find_runs(task(TENSOR, ((0, 0, 0), (8, 3, 1)), located), located)
    assert runs is not None
    assert read(tmp_path, runs) == full_bits(piece)
    assert find_runs(task(TENSOR, ((0, 0, 0), (4, 3, 1)), located), located) is None


@pytest.mark.parametrize("change", [{"strides": (1, 8, 24)}, {"conj": True}, {"neg": True}])
def test_values_that_are_stored_in_another_way_have_to_be_gathered(tmp_path: Path, change: dict[str, object]) -> None:
    ((store, chunk),) = shelf(tmp_path, TENSOR, [(0, 8)])
    located = [(store, chunk._replace(**change))]  # type: ignore[arg-type]
    assert find_runs(task(TENSOR, ((0, 0, 0), (8, 3, 2)), located), located) is None


def test_a_chunk_of_a_larger_storage_is_no_record(tmp_path: Path) -> None:
    ((store, chunk),) = shelf(tmp_path, TENSOR, [(0, 8)])
    for covered, is_record in [
        (None, True), ((chunk.start, chunk.stop), True), ((chunk.start - 4, chunk.stop), False),
        ((chunk.start, chunk.stop + 4), False),
    ]:  # fmt: skip
        located = [(store, chunk._replace(crc_range=covered))]
        runs = find_runs(task(TENSOR, ((0, 0, 0), (8, 3, 2)), located), located)
        assert runs is not None
        assert [run.is_record for run in runs] == [is_record]


def test_reading_in_order() -> None:
    chunk = Chunk((2, 0), (3, 4), "f", 100, 148)
    assert is_read_in_order(chunk, ((0, 0), (8, 4)))
    assert is_read_in_order(chunk, ((2, 0), (3, 4)))
    assert not is_read_in_order(chunk, ((2, 0), (3, 3)))
    assert not is_read_in_order(chunk, ((3, 0), (5, 4)))
    assert not is_read_in_order(chunk._replace(strides=(1, 3)), ((0, 0), (8, 4)))
    assert is_read_in_order(chunk._replace(crc_range=(100, 148)), ((0, 0), (8, 4)))
    assert not is_read_in_order(chunk._replace(crc_range=(90, 148)), ((0, 0), (8, 4)))
