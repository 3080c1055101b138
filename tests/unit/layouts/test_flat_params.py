"""Flat parameters and slices of them, byte ranges computed by hand; what is ambiguous is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_ckpt.catalog import DTYPES, Chunk, Part, Problem, Role, Severity, Shape, TensorEntry
from fsdp_ckpt.errors import FlatParameters, IncompleteCheckpoint, NameCollision
from fsdp_ckpt.layouts.flat_params import name_part
from fsdp_ckpt.layouts.flat_shapes import ModelShapes
from fsdp_ckpt.layouts.local_slices import LOCAL_SLICES, join_by_rank, place_slices
from fsdp_ckpt.layouts.registry import read_checkpoint

FLOAT = DTYPES["float32"]


def line(file: str, start: int, numel: int, offset: int = 0, **more: Any) -> Chunk:
    """Return so many float32 in one dimension, from a byte on."""
    return Chunk((offset,), (numel,), file, start, start + 4 * numel, **more)


def flat(name: str, *chunks: Chunk, placements: str | None = "ShardedTensor") -> TensorEntry:
    numel = sum(chunk.numel for chunk in chunks)
    return TensorEntry(key=f"m.{name}", name=name, dtype=FLOAT, shape=(numel,), chunks=chunks, placements=placements,
                       path=(name,))  # fmt: skip


def plain(name: str, shape: Shape, *chunks: Chunk, **more: Any) -> TensorEntry:
    return TensorEntry(key=f"m.{name}", name=name, dtype=more.pop("dtype", FLOAT), shape=shape, chunks=chunks[:1],
                       replicas=chunks[1:], path=(name,), **more)  # fmt: skip


def part(*entries: TensorEntry, dialect: str = "rank-files", problems: Sequence[Problem] = ()) -> Part:
    tensors = {entry.key: entry for entry in entries}
    return Part(name="p", role=Role.MODEL, dialect=dialect, tensors=tensors, flat="flat", problems=problems)


def shapes(known: Mapping[str, Shape], **more: Any) -> ModelShapes:
    return ModelShapes(source="shapes", shapes=known, **more)


def as_they_are(_: TensorEntry, chunk: Chunk) -> Chunk:
    return chunk


def named(given: Part, known: ModelShapes) -> dict[str, TensorEntry]:
    found = name_part(given, known, as_they_are)
    assert found.flat is None
    assert found.is_complete
    return {entry.name: entry for entry in found.tensors.values()}


def test_by_hand() -> None:
    """Three ranks have 5, 5 and 4 elements of (2, 3), (4) and (2, 2), from byte 100 on."""
    entry = flat("a._flat_param", line("r0", 100, 5, 0, crc32=7), line("r1", 100, 5, 5), line("r2", 100, 4, 10))
    found = name_part(part(entry), shapes({"a.w": (2, 3), "a.b": (4,), "a.c.v": (2, 2)}), as_they_are)
    assert [*found.tensors] == ["m.a.w", "m.a.b", "m.a.c.v"]
    w, b, v = found.tensors.values()
    assert (w.name, w.path, w.shape, w.placements) == ("a.w", ("a.w",), (2, 3), None)
    assert w.chunks == (
        Chunk((0, 0), (1, 3), "r0", 100, 112, crc32=7, crc_range=(100, 120)),
        Chunk((1, 0), (1, 2), "r0", 112, 120, crc32=7, crc_range=(100, 120)),
        Chunk((1, 2), (1, 1), "r1", 100, 104, crc_range=(100, 120)),
    )
    assert b.chunks == (Chunk((0,), (4,), "r1", 104, 120, crc_range=(100, 120)),)
    assert v.chunks == (Chunk((0, 0), (2, 2), "r2", 100, 116),)


def test_a_tensor_that_was_laid_out_by_columns() -> None:
    """Elements (2, 3) in memory as 3 columns of 2; the first rank has the first column and half of the second."""
    entry = flat("_flat_param", line("r0", 0, 3), line("r1", 0, 3, 3))
    (found,) = named(part(entry), shapes({"w": (2, 3)}, orders={"w": (1, 0)})).values()
    assert [(c.offsets, c.lengths, c.file, c.start, c.stop, c.strides) for c in found.chunks] == [
        ((0, 0), (2, 1), "r0", 0, 8, (1, 2)),
        ((0, 1), (1, 1), "r0", 8, 12, (1, 1)),
        ((1, 1), (1, 1), "r1", 0, 4, (1, 1)),
        ((0, 2), (2, 1), "r1", 4, 12, (1, 2)),
    ]


def test_the_deepest_unit_has_a_parameter() -> None:
    root = flat("_flat_param", line("r0", 0, 3))
    outer = flat("a._fsdp_wrapped_module._flat_param", line("r0", 100, 2))
    inner = flat("a.1._flat_param", line("r0", 200, 4))
    known = shapes({"x": (3,), "a.w": (2,), "a.1.w": (4,)})
    found = named(part(root, outer, inner), known)
    assert {name: entry.chunks[0].start for name, entry in found.items()} == {"x": 0, "a.w": 100, "a.1.w": 200}
    assert [entry.key for entry in found.values()] == ["m.x", "m.a.w", "m.a.1.w"]
    with pytest.raises(FlatParameters, match=r"`a\.1\._flat_param` has 4 elements, .* have 5"):
        named(part(root, outer, inner), shapes({"x": (3,), "a.w": (2,), "a.1.w": (4,), "a.1.v": (1,)}))


def test_a_unit_10_is_not_in_unit_1() -> None:
    units = [flat(f"a.{number}._flat_param", line("r0", number, 2)) for number in (1, 10)]
    found = named(part(*units), shapes({"a.1.w": (2,), "a.10.w": (2,)}))
    assert {name: entry.chunks[0].start for name, entry in found.items()} == {"a.1.w": 1, "a.10.w": 10}


def test_a_shared_parameter_is_there_once_and_named_twice() -> None:
    known = {"embed.w": (2, 1), "b": (3,), "head.w": (2, 1)}
    entry = flat("_flat_param", line("r0", 0, 5))
    found = named(part(entry), shapes(known, aliases={"head.w": "embed.w"}))
    assert [*found] == ["embed.w", "b", "head.w"]
    assert found["head.w"].chunks == found["embed.w"].chunks
    assert (found["head.w"].key, found["head.w"].path) == ("m.head.w", ("head.w",))
    with pytest.raises(FlatParameters, match=r"has 5 elements, .* have 7"):
        named(part(entry), shapes(known))


def test_a_parameter_shared_by_two_units_is_in_both_of_them() -> None:
    """FSDP1 flattens the inner one first; the outer one still has the original parameter."""
    given = part(flat("_flat_param", line("r0", 0, 5)), flat("e._flat_param", line("r0", 100, 2)))
    known = shapes({"e.w": (2,), "b": (3,), "head.w": (2,)}, aliases={"head.w": "e.w"})
    assert {name: entry.chunks[0].start for name, entry in named(given, known).items()} == {
        "e.w": 100, "b": 0, "head.w": 12,
    }  # fmt: skip


def test_without_order_one_parameter_is_certain_and_two_are_not() -> None:
    one = part(flat("a._flat_param", line("r0", 0, 6)))
    assert named(one, shapes({"a.w": (2, 3)}, doubt="none")).keys() == {"a.w"}
    with pytest.raises(FlatParameters, match="does not tell: none"):
        named(one, shapes({"a.w": (2, 2), "a.b": (2,)}, doubt="none"))


def test_what_is_whole_stays_as_it_is() -> None:
    buffer = plain("a.steps", (2,), Chunk((0,), (2,), "r0", 0, 16), dtype=DTYPES["int64"])
    ignored = plain("a.v", (2, 2), Chunk((0, 0), (2, 2), "r0", 16, 32))
    entry = flat("_flat_param", line("r0", 100, 2))
    found = named(part(buffer, ignored, entry), shapes({"a.v": (2, 2), "a.w": (2,), "a.steps": (2,)}))
    assert (found["a.steps"], found["a.v"]) == (buffer, ignored)
    assert found["a.w"].chunks[0].start == 100
    with pytest.raises(FlatParameters, match=r"`a\.v` has the shape \(2, 2\); by shapes it is \(4,\)"):
        named(part(buffer, ignored, entry), shapes({"a.v": (4,), "a.w": (2,)}))


def test_names_that_are_nowhere_are_refused() -> None:
    entry = flat("a._flat_param", line("r0", 0, 2))
    with pytest.raises(FlatParameters, match=r"`b\.w` of shapes is in no flat parameter, nor beside them"):
        named(part(entry), shapes({"a.w": (2,), "b.w": (2,)}))
    with pytest.raises(FlatParameters, match=r"has 2 elements, .* have 0"):
        named(part(entry), shapes({}))


def test_names_that_become_one_are_refused() -> None:
    twice = [plain(name, (1,), line("r0", 0, 1)) for name in ("a.w", "a._orig_mod.w")]
    with pytest.raises(NameCollision, match=r"`a\.w`"):
        named(part(*twice), shapes({}))


@pytest.mark.parametrize(
    "entry",
    [
        flat("a._flat_param", line("r0", 0, 2), placements=None),
        flat("a.flat_param_0", line("r0", 0, 2)),
        replace(flat("a._flat_param", line("r0", 0, 2)), shape=(2, 1)),
    ],
)
def test_other_flat_parameters_are_refused(entry: TensorEntry) -> None:
    with pytest.raises(FlatParameters, match="is not a flat parameter as FSDP1 of torch 2"):
        named(part(entry), shapes({"a.w": (2,)}))


def test_a_strided_flat_parameter_is_refused() -> None:
    entry = flat("a._flat_param", line("r0", 0, 2, strides=(3,)))
    with pytest.raises(FlatParameters, match="not in one run"):
        named(part(entry), shapes({"a.w": (2,)}))


def slices() -> dict[str, TensorEntry]:
    """What two ranks have of w (2, 3) and b (2), with two elements between and one after them."""
    entry = flat("a._flat_param", line("r0", 100, 5), line("r1", 100, 6, 5))
    first = {
        "w": plain("a.w", (5,), line("r0", 100, 5, crc_range=(100, 120))),
        "b": plain("a.b", (0,), line("r0", 500, 0)),
        "steps": plain("a.steps", (3,), line("r0", 600, 3), line("r1", 700, 3)),
    }
    by_rank = {
        "w": [line("r0", 100, 5, crc_range=(100, 120)), line("r1", 100, 1, crc_range=(100, 124))],
        "b": [line("r0", 500, 0), line("r1", 112, 2, crc_range=(100, 124))],
        "steps": [line("r0", 600, 3), line("r1", 700, 3)],
    }
    return place_slices({**first, "flat": entry}, by_rank)


def test_slices_are_told_by_their_place() -> None:
    found = slices()
    assert (found["w"].shape, found["w"].placements) == ((6,), LOCAL_SLICES)
    assert [(c.offsets, c.lengths, c.file, c.start) for c in found["w"].chunks] == [
        ((0,), (5,), "r0", 100),
        ((5,), (1,), "r1", 100),
    ]
    assert (found["b"].shape, [c.start for c in found["b"].chunks]) == ((2,), [112])
    assert (found["steps"].placements, len(found["steps"].replicas)) == (None, 1)


def test_slices_need_shapes_only() -> None:
    given = part(*slices().values())
    found = named(given, shapes({"a.b": (2,), "a.w": (2, 3)}, doubt="sorted"))
    assert [(c.offsets, c.lengths, c.file, c.start, c.stop) for c in found["a.w"].chunks] == [
        ((0, 0), (1, 3), "r0", 100, 112),
        ((1, 0), (1, 2), "r0", 112, 120),
        ((1, 2), (1, 1), "r1", 100, 104),
    ]
    assert {chunk.crc_range for chunk in found["a.w"].chunks} == {(100, 120), (100, 124)}
    assert found.keys() == {"a.w", "a.b", "a.steps"}


@pytest.mark.parametrize(
    ("known", "match"),
    [
        ({"a.w": (2, 4), "a.b": (2,)}, r"slices of `a\.w` have 6 elements; by shapes it has 8"),
        ({"a.w": (2, 3)}, r"shapes does not tell the shape of `a\.b`"),
        ({"a.w": (2, 3), "a.b": (2,), "a.c": (1,)}, r"of `a\.w` there are slices, of `a\.c` .* there are none"),
    ],
)
def test_slices_that_do_not_fit_are_refused(known: dict[str, Shape], match: str) -> None:
    with pytest.raises(FlatParameters, match=match):
        named(part(*slices().values()), shapes(known))


def test_a_flat_parameter_with_more_than_its_slices_is_refused() -> None:
    found = slices()
    longer = flat("a._flat_param", line("r0", 100, 25), line("r1", 100, 25, 25))
    with pytest.raises(FlatParameters, match="has 50 elements, the slices of its parameters that shapes names have 8"):
        named(part(found["w"], found["b"], longer), shapes({"a.w": (2, 3), "a.b": (2,)}))


def test_a_missing_rank_is_the_reason() -> None:
    problem = Problem(severity=Severity.ERROR, code="missing-rank", where="r1", message="rank 1 is missing")
    with pytest.raises(IncompleteCheckpoint, match="rank 1 is missing"):
        named(part(*slices().values(), problems=[problem]), shapes({"a.w": (4, 3), "a.b": (2,)}))


def test_copied_slices_are_joined_by_rank() -> None:
    """Of unequal sizes at once; of equal ones, which look like copies of one tensor, by the shape."""
    chunks = [line("r0", 0, 2), line("r1", 0, 0), line("r2", 0, 3)]
    joined = join_by_rank(plain("w", (2,), *chunks), chunks)
    assert joined.shape == (5,)
    assert [(c.offsets, c.file) for c in joined.chunks] == [((0,), "r0"), ((2,), "r2")]
    equal = plain("b", (2,), line("r0", 50, 2), line("r1", 50, 2))
    differ = Problem(severity=Severity.WARNING, code="replicas-differ", where="m.b", message="differ")
    found = name_part(part(equal, problems=[differ]), shapes({"b": (4,)}), as_they_are)
    assert [(c.offsets, c.file) for c in found.tensors["m.b"].chunks] == [((0,), "r0"), ((2,), "r1")]
    assert [*found.problems] == []
    kept = name_part(part(equal, problems=[differ]), shapes({"b": (2,)}), as_they_are)
    assert (kept.tensors["m.b"], [*kept.problems]) == (equal, [differ])


@pytest.mark.parametrize("is_sharded", [True, False])
def test_moments_of_flat_parameters_are_no_copies(is_sharded: bool, tmp_path: Path) -> None:
    """What each rank's ``optimizer.state_dict()`` holds has the same name and size on each."""
    for rank in range(2):
        moment = torch.full((3,), float(rank if is_sharded else 0))
        state = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": moment}}, "param_groups": [{"params": [0]}]}
        torch.save(state, tmp_path / f"optim_world_size_2_rank_{rank}.pt")
    (found,) = read_checkpoint(tmp_path).parts
    assert found.role is Role.OPTIMIZER
    assert found.is_complete is not is_sharded
