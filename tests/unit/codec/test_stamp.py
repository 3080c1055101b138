from __future__ import annotations

import doctest

import pytest

from fsdp_ckpt.codec import stamp
from fsdp_ckpt.codec.stamp import STAMP_BYTES, is_free, make_stamp, read_stamp


def test_the_example_is_right() -> None:
    found = doctest.testmod(stamp)
    assert (found.failed, found.attempted) == (0, 1)


@pytest.mark.parametrize(("save_id", "rank"), [("0", 0), ("f" * 16, 1), ("0123456789abcdef", 9_999_999)])
def test_what_is_written_is_read(save_id: str, rank: int) -> None:
    data = make_stamp(save_id, rank)
    assert len(data) == STAMP_BYTES
    assert data.startswith(f"fsdp-ckpt/data/1 save={save_id} rank={rank}\n".encode())
    assert read_stamp(data + b"PK\3\4 what follows") == (save_id, rank)


@pytest.mark.parametrize(
    "data", [b"", bytes(STAMP_BYTES), b"PK\3\4".ljust(STAMP_BYTES), make_stamp("ab", 1)[:-1] + b"x",
             make_stamp("ab", 1).replace(b"/1 ", b"/2 "), make_stamp("AB", 1), make_stamp("ab", 1)[:20]]
)  # fmt: skip
def test_anything_else_is_none(data: bytes) -> None:
    assert read_stamp(data) is None


def test_zeros_are_free_and_a_stamp_is_at_the_beginning_only() -> None:
    stamped = make_stamp("ab", 1) + bytes(100)
    assert is_free(b"", 0)
    assert is_free(bytes(500), 0)
    assert is_free(bytes(500), 700)
    assert is_free(stamped, 0)
    assert not is_free(stamped, 64)
    assert not is_free(stamped + b"x", 0)
