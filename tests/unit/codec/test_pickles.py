"""Benign pickles give what Python's own unpickler gives."""

from __future__ import annotations

import collections
import itertools
import pickle
import pickletools
from typing import Any

import pytest

from fsdp_ckpt.codec.known import PLAIN
from fsdp_ckpt.codec.pickles import Constructor, Machine, Opaque, Record, loads
from fsdp_ckpt.errors import MalformedFile, UnsafePickle
from tests.unit.codec.raw_pickle import dump

PROTOCOLS = (2, 3, 4, 5)
SHARED: list[Any] = [1, 2]
RECURSIVE: list[Any] = [0]
RECURSIVE.append(RECURSIVE)

VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, 1, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**31, 2**63, -(2**63), 2**64, 10**40, 1 << 3000],
    "huge int": -(1 << 20_000),
    "floats": [0.0, -0.0, 1.5, float("inf"), 5e-324, 1e308],
    "texts": ["", "a", "ä", "権重", "\x94", "a\ud800b", "x" * 255, "x" * 256, "ü" * 200],
    "bytes": [b"", b"a", bytes(range(256)), b"x" * 256, b"x" * 70_000],
    "bytearray": bytearray(b"abc"),
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((1,),))],
    "lists": [[], [1], [[], [2]], list(range(2500))],
    "dicts": [{}, {"a": 1}, {1: 2, None: 3, (1, 2): 4, 0: False}, {str(i): i for i in range(2500)}],
    "sets": [set(), {1, "a", (2, 3)}, set(range(2500))],
    "frozensets": [frozenset(), frozenset({1, frozenset({2})})],
    "shared": [SHARED, SHARED, {"x": SHARED}],
    "many memos": [[text, text] for text in map("text {}".format, range(400))],
    "complex": 1 - 2.5j,
    "range": [range(5), range(1, 10, 3)],
    "slice": slice(1, None, 2),
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "nested": {"a": [{"b": ({"c": {1.5}},)}]},
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", VALUES)
def test_values_are_those_of_python(name: str, protocol: int) -> None:
    data = pickle.dumps(VALUES[name], protocol)
    found, expected = loads(data, PLAIN, where="x"), pickle.loads(data)
    assert found == expected
    assert repr_types(found) == repr_types(expected)


def repr_types(value: Any) -> Any:
    """Types all the way down, but for what is documented: OrderedDict is a dict, bytearray bytes."""
    kind = {"OrderedDict": "dict", "bytearray": "bytes"}.get(type(value).__name__, type(value).__name__)
    if isinstance(value, dict):
        return kind, [(repr_types(key), repr_types(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return kind, [repr_types(item) for item in value]
    if isinstance(value, set | frozenset):
        return kind, sorted(map(repr, map(repr_types, value)))
    return kind, str(value) if isinstance(value, float) else None


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_python_pickler_without_its_c_twin(protocol: int) -> None:
    # It frames and memoizes differently.
    for value in VALUES.values():
        assert loads(dump(value, protocol), PLAIN, where="x") == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_identity_and_recursion(protocol: int) -> None:
    first, second, third = loads(pickle.dumps(VALUES["shared"], protocol), PLAIN, where="x")
    assert first is second
    assert third["x"] is first
    recursive = loads(pickle.dumps(RECURSIVE, protocol), PLAIN, where="x")
    assert recursive[1] is recursive


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("maxlen", [None, 5])
def test_containers_of_collections_become_plain_ones(protocol: int, maxlen: int | None) -> None:
    deque = collections.deque([1, 2, 3], maxlen)
    counter = collections.Counter("banana")
    default = collections.defaultdict(list, {"a": [1]})
    found = loads(pickle.dumps([deque, counter, default], protocol), PLAIN, where="x")
    assert found == [[1, 2, 3], {"b": 1, "a": 3, "n": 2}, {"a": [1]}]
    assert [type(item) for item in found] == [list, dict, dict]


def test_every_opcode_of_protocols_2_to_5_is_known_or_refused_by_name() -> None:
    supported = {
        code for value, protocol in itertools.product(VALUES.values(), PROTOCOLS) for code in opcodes(value, protocol)
    }
    assert {"MEMOIZE", "LONG4", "BINUNICODE8", "FROZENSET", "ADDITEMS", "BYTEARRAY8", "LONG_BINGET"} - supported == {
        "BINUNICODE8"  # needs 4 GiB
    }
    refused = []
    for op in pickletools.opcodes:
        try:
            loads(b"\x80\x04" + op.code.encode("latin-1") + b"\0" * 4, {}, where="x")
        except MalformedFile as error:
            if f"unsupported opcode {ord(op.code):#04x}" in str(error):
                refused.append(op.name)
        except UnsafePickle:
            pass
    # Protocols 0 and 1 in texts, and out-of-band buffers: torch writes none of them.
    assert set(refused) == {
        "INT", "LONG", "FLOAT", "STRING", "UNICODE", "PUT", "GET", "PERSID", "NEXT_BUFFER", "READONLY_BUFFER",
    }  # fmt: skip


def opcodes(value: Any, protocol: int) -> set[str]:
    return {op.name for op, _, _ in pickletools.genops(pickle.dumps(value, protocol))}


@pytest.mark.parametrize("program", [b"\x8d\x03\0\0\0\0\0\0\0abc.", b"\x8e\x03\0\0\0\0\0\0\0abc.", b"X\x03\0\0\0abc.",
                                     b"U\x03abc.", b"T\x03\0\0\0abc.", b"\x96\x03\0\0\0\0\0\0\0abc."])  # fmt: skip
def test_rare_opcodes_with_their_long_lengths(program: bytes) -> None:
    found = loads(b"\x80\x05" + program, {}, where="x")
    assert found == pickle.loads(b"\x80\x05" + program)


def test_stack_opcodes() -> None:
    for program in (b"K\x01K\x020.", b"(K\x01K\x021K\x03.", b"K\x072\x86.", b"(K\x01K\x02l.", b"(K\x01K\x02d."):
        assert loads(b"\x80\x02" + program, {}, where="x") == pickle.loads(b"\x80\x02" + program)


def test_several_pickles_in_a_row() -> None:
    data = pickle.dumps({"a": 1}, 2) + pickle.dumps([2], 4) + b"rest"
    first = Machine(data, {}, where="x")
    assert first.run() == {"a": 1}
    second = Machine(data, {}, where="x", position=first.position)
    assert second.run() == [2]
    assert data[second.position :] == b"rest"


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


class Slotted:
    __slots__ = ("y",)


NAME = f"{__name__}.Point"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_known_classes_become_records(protocol: int) -> None:
    known = {NAME: Constructor(NAME, lambda _, args: Record(NAME, args))}
    found = loads(pickle.dumps(Point(5), protocol), known, where="x")
    assert isinstance(found, Record)
    assert (found.cls, found.args, found.state) == (NAME, (), {"x": 5})
    assert found.get("x") == 5
    assert found.get("y") is None
    assert found.get("y", 7) == 7


def test_slots_are_state_too() -> None:
    name = f"{__name__}.Slotted"
    value = Slotted()
    value.y = 3  # type: ignore[attr-defined]
    known = {name: Constructor(name, lambda _, args: Record(name, args))}
    assert loads(pickle.dumps(value, 4), known, where="x").get("y") == 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_unknown_classes_are_opaque_where_asked_for(protocol: int) -> None:
    found = loads(pickle.dumps([Point(5), 1], protocol), {}, where="x", allow_unknown=True)
    assert isinstance(found[0], Opaque)
    assert repr(found[0]) == f"<opaque: needs {NAME}>"
    assert found[1] == 1


def test_persistent_ids_are_resolved() -> None:
    data = b"\x80\x02U\x03abcQ."
    assert Machine(data, {}, where="x", persistent=lambda pid: f"<{pid}>").run() == "<abc>"
    with pytest.raises(MalformedFile, match="persistent id"):
        Machine(data, {}, where="x").run()
