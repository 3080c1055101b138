from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdp_ckpt.errors import Incompatible
from fsdp_ckpt.train.live import Piece, dtype_of, flat_pieces, plain, takes_turn, whole
from fsdp_ckpt.train.ranks import Ranks

EXAMPLES = settings(derandomize=True, database=None, deadline=None, max_examples=150)


def _fill(shape: tuple[int, ...], pieces: list[Piece]) -> Tensor:
    """Return a tensor with the pieces in their places, -1 elsewhere; no place may be written twice."""
    found = torch.full(shape, -1.0)
    for piece in pieces:
        part = found[tuple(slice(start, start + n) for start, n in zip(piece.offsets, piece.lengths, strict=True))]
        assert part.shape == piece.tensor.shape
        assert bool((part == -1).all())
        part.copy_(piece.tensor)
    return found


@st.composite
def _runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    stop = draw(st.integers(start, math.prod(shape)))
    return shape, start, stop, tuple(draw(st.permutations(range(len(shape)))))


@EXAMPLES
@given(_runs())
def test_a_run_of_a_flattened_tensor_goes_back_to_its_place(
    run: tuple[tuple[int, ...], int, int, tuple[int, ...]],
) -> None:
    shape, start, stop, _ = run
    values = torch.arange(float(math.prod(shape)))
    expected = torch.full_like(values, -1.0)
    expected[start:stop] = values[start:stop]
    pieces = flat_pieces(shape, start, values[start:stop].clone())
    assert torch.equal(_fill(shape, pieces), expected.reshape(shape))
    assert len(pieces) <= max(2 * len(shape) - 1, 1)


@EXAMPLES
@given(_runs())
def test_so_does_one_that_was_flattened_in_another_order(
    run: tuple[tuple[int, ...], int, int, tuple[int, ...]],
) -> None:
    shape, start, stop, order = run
    tensor = np.arange(float(math.prod(shape))).reshape(shape)
    run_of = tensor.transpose(order).reshape(-1)
    expected = np.where((tensor[..., None] == run_of[start:stop]).any(-1), tensor, -1.0)
    pieces = flat_pieces(shape, start, torch.from_numpy(run_of[start:stop].astype("f4")), order)
    assert np.array_equal(_fill(shape, pieces).numpy(), expected)


def test_channels_last_is_flattened_by_torch_in_the_order_that_is_meant() -> None:
    conv = torch.arange(72.0).reshape(6, 3, 2, 2).to(memory_format=torch.channels_last)
    flat = torch.as_strided(conv, (conv.numel(),), (1,))  # as torch/distributed/fsdp/_flat_param.py does
    pieces = flat_pieces((6, 3, 2, 2), 30, flat[30:].clone(), (0, 2, 3, 1))
    found = _fill((6, 3, 2, 2), pieces)
    assert torch.equal(found[found >= 0].sort().values, flat[30:].sort().values)
    assert torch.equal(found[3:], conv[3:])


def test_writing_into_a_piece_changes_the_run() -> None:
    local = torch.zeros(7)
    for number, piece in enumerate(flat_pieces((4, 3), 2, local)):
        piece.tensor.fill_(number + 1)
    assert local.tolist() == [1, 2, 2, 2, 2, 2, 2]


def test_no_elements_give_no_pieces() -> None:
    assert flat_pieces((4, 3), 5, torch.empty(0)) == []


def test_a_tensor_without_dimensions_is_one_piece() -> None:
    (piece,) = flat_pieces((), 0, torch.tensor([7.0]))
    assert (piece.box, piece.tensor.item()) == (((), ()), 7.0)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_of_equal_copies_exactly_one_is_stored_and_names_spread_over_them(count: int) -> None:
    chosen = [[index for index in range(count) if takes_turn(f"layers.{n}.w", index, count)] for n in range(60)]
    assert all(len(one) == 1 for one in chosen)
    assert {one[0] for one in chosen} == set(range(count))


def test_a_plain_tensor_is_a_view_of_the_whole() -> None:
    param = torch.nn.Parameter(torch.zeros(2, 3))
    tensor = plain("w", param, Ranks())
    with torch.no_grad():
        tensor.pieces[0].tensor.fill_(5)
    assert bool((param == 5).all())
    assert (tensor.shape, tensor.writes, tensor.everywhere, tensor.num_bytes) == ((2, 3), True, True, 24)
    assert not whole(param).tensor.requires_grad


def test_every_dtype_of_torch_that_files_hold_is_known() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint16):
        assert dtype_of(dtype, "w").name == str(dtype).removeprefix("torch.")


def test_a_quantised_tensor_is_refused_by_name() -> None:
    with pytest.raises(Incompatible, match=r"`w\.q` has dtype torch\.qint8"):
        dtype_of(torch.qint8, "w.q")
