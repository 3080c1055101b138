"""Pickles that want code, memory or the stack are refused, and nothing of theirs happens."""

from __future__ import annotations

import contextlib
import pickle
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt.codec.known import PLAIN
from fsdp_ckpt.codec.pickles import loads
from fsdp_ckpt.codec.tensors import TORCH
from fsdp_ckpt.errors import MalformedFile, UnsafePickle
from tests.unit.child import outcome
from tests.unit.codec.raw_pickle import Raw, call, dump, global_

CANARY = "fsdp_ckpt_test_canary"


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that could be imported, and that leaves a file when it is."""
    sung = tmp_path / "sung"
    (tmp_path / f"{CANARY}.py").write_text(
        f"open({str(sung)!r}, 'w').close()\n\ndef sing(*args):\n    open({str(sung)!r}, 'w').close()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield sung
    sys.modules.pop(CANARY, None)


GLOBALS = {
    "GLOBAL": f"c{CANARY}\nsing\n.".encode(),
    "STACK_GLOBAL": b"\x8c\x15" + CANARY.encode() + b"\x8c\x04sing\x93.",
    "INST": f"(i{CANARY}\nsing\n.".encode(),
    "REDUCE": f"c{CANARY}\nsing\n)R.".encode(),
    "OBJ": f"(c{CANARY}\nsing\no.".encode(),
    "NEWOBJ": f"c{CANARY}\nsing\n)\x81.".encode("latin-1"),
    "NEWOBJ_EX": f"c{CANARY}\nsing\n)}}\x92.".encode("latin-1"),
    "BUILD": f"c{CANARY}\nsing\n)R}}b.".encode(),
    "in a list": f"](c{CANARY}\nsing\n)Re.".encode(),
    "as a key": f"}}(c{CANARY}\nsing\n)RNu.".encode(),
    "dotted name": b"\x8c\x15" + CANARY.encode() + b"\x8c\x0dsing.__call__\x93.",
    "through getattr": b"cbuiltins\ngetattr\nc" + CANARY.encode() + b"\nsing\nX\x04\0\0\0sing\x86R.",
}


@pytest.mark.parametrize("name", GLOBALS)
@pytest.mark.parametrize("allow_unknown", [False, True])
def test_a_global_that_is_not_known_is_never_imported(name: str, allow_unknown: bool, canary: Path) -> None:
    data = b"\x80\x04" + GLOBALS[name]
    if not allow_unknown:
        with pytest.raises(UnsafePickle, match=r"^f: ") as caught:
            loads(data, TORCH, where="f")
        assert caught.value.name.startswith(CANARY)
    elif name == "through getattr":
        with pytest.raises(UnsafePickle, match=CANARY):
            loads(data, TORCH, where="f", allow_unknown=True)
    else:
        assert CANARY in repr(loads(data, TORCH, where="f", allow_unknown=True))
    assert CANARY not in sys.modules
    assert not canary.exists()


def test_the_canary_sings_for_python(canary: Path) -> None:
    pickle.loads(b"\x80\x04" + GLOBALS["REDUCE"])
    assert canary.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "exec"), ("builtins", "__import__"),
     ("builtins", "open"), ("subprocess", "Popen"), ("torch", "load"), ("torch.hub", "load"),
     ("operator", "attrgetter"),
     ("functools", "partial"), ("copyreg", "_reconstructor"), ("numpy.testing._private.utils", "runstring"),
     ("collections", "namedtuple"), ("torch.jit", "load"), ("builtins", "type"), ("importlib", "import_module"),
     ("codecs", "encode"), ("_codecs", "decode"), ("torch._dynamo", "optimize"), ("types", "FunctionType")],
)  # fmt: skip
def test_well_known_ways_to_run_code(module: str, name: str) -> None:
    with pytest.raises(UnsafePickle) as caught:
        loads(dump([call(module, name, "echo")], 2), TORCH, where="f")
    assert caught.value.name == f"{module}.{name}"


@pytest.mark.parametrize("path", ["__globals__", "__class__", "__init__", "system", "CPU"])
def test_getattr_reaches_nothing(path: str) -> None:
    # Enum members of early Python 3.11 are pickled so: a name is looked up in the table, never in an object.
    with pytest.raises(UnsafePickle, match=rf"torch\.device\.{path}"):
        loads(dump(call("builtins", "getattr", global_("torch", "device"), path), 2), PLAIN, where="f")
    with pytest.raises(MalformedFile, match="getattr"):
        loads(dump(call("builtins", "getattr", "text", path), 2), PLAIN, where="f")


@pytest.mark.parametrize("opcode", [b"\x82\x01", b"\x83\x01\0", b"\x84\x01\0\0\0"])
def test_copyreg_extensions(opcode: bytes) -> None:
    with pytest.raises(UnsafePickle, match="extension"):
        loads(b"\x80\x02" + opcode + b".", PLAIN, where="f")


@pytest.mark.parametrize(
    "program",
    [
        b"X" + struct.pack("<I", 1 << 30) + b"a.",
        b"B" + struct.pack("<I", 1 << 30) + b"a.",
        b"T" + struct.pack("<I", 0xFFFFFFFF) + b"a.",
        b"\x8d" + struct.pack("<Q", 1 << 62) + b"a.",
        b"\x8e" + struct.pack("<Q", 1 << 62) + b"a.",
        b"\x96" + struct.pack("<Q", (1 << 64) - 1) + b"a.",
        b"\x8b" + struct.pack("<i", 1 << 30) + b"a.",
        b"\x8b" + struct.pack("<i", -1) + b"a.",
        b"r" + struct.pack("<I", 0xFFFFFFF0) + b".",
        b"Nr" + struct.pack("<I", 0xFFFFFFF0) + b".",
        b"j" + struct.pack("<I", 0xFFFFFFF0) + b".",
    ],
)
def test_announced_sizes_are_checked_before_anything_is_allocated(program: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFile):
            loads(b"\x80\x04" + program, PLAIN, where="f")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_memo_indices_cost_no_more_than_the_pickle_is_long() -> None:
    size = 200_000
    program = b"\x80\x02" + b"N" + b"".join(b"r" + struct.pack("<I", i) for i in range(0, size, 1000)) + b"0" * 5
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFile):
            loads(program, PLAIN, where="f")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["list", "tuple", "dict", "bytes", "bytearray", "set", "frozenset"])
def test_copying_a_large_value_over_and_over_is_refused(name: str) -> None:
    large: Any = {"dict": dict.fromkeys(range(5000), 1), "bytes": b"x" * 5000, "bytearray": b"x" * 5000}.get(
        name, list(range(5000))
    )
    body = dump(large, 3)[2:-1]
    program = b"\x80\x04" + body + b"q\xff0" + b"](" + (f"cbuiltins\n{name}\n".encode() + b"h\xff\x85R") * 2000 + b"e."
    with pytest.raises(MalformedFile, match="over and over"):
        loads(program, PLAIN, where="f")


def test_nested_lists_may_be_deep_but_do_no_harm() -> None:
    found = loads(b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".", PLAIN, where="f")
    depth = 0
    while found:
        found, depth = found[0], depth + 1
    assert depth == 299_999


DEEP_TUPLE = b")" + b"\x85" * 200_000
# A frozenset in a tuple in a frozenset …: hashes are remembered, comparisons go all the way down.
DEEP_SET = b"(" * 50_000 + b")" + b"\x85\x91" * 50_000
DEEP = {
    "key of a dict": b"}" + DEEP_TUPLE + b"Ns.",
    "key of a dict, behind a short one": b"}(K\x01N" + DEEP_TUPLE + b"Nu.",
    "inner part of a key": b"}K\x01" + DEEP_TUPLE + b"\x86Ns.",
    "member of a set": b"\x8f(" + DEEP_TUPLE + b"\x90.",
    "member of a frozenset": b"(" + DEEP_TUPLE + b"\x91.",
    "argument of set": b"cbuiltins\nset\n](" + DEEP_TUPLE + b"e\x85R.",
    "argument of OrderedDict": b"ccollections\nOrderedDict\n](" + DEEP_TUPLE + b"N\x86e\x85R.",
    "argument of Counter": b"ccollections\nCounter\n}" + DEEP_TUPLE + b"Ns\x85R.",
    "equal keys": b"}" + DEEP_SET + b"Ns" + DEEP_SET + b"Ns.",
    "torch.Size": b"ctorch\nSize\n(" + DEEP_TUPLE + b"t\x85R.",
    "shape of a tensor": b"ctorch._utils\n_rebuild_tensor_v2\n(NK\0" + DEEP_TUPLE + b")\x89}tR.",
    "what is no size": b"ctorch\nSize\n" + DEEP_TUPLE + b"R.",
}


@pytest.mark.parametrize("name", DEEP)
def test_nothing_recurses_over_deep_values(name: str) -> None:
    """Hashing or comparing a tuple of so many levels in C would end the process."""
    assert outcome(lambda: loads(b"\x80\x04" + DEEP[name], TORCH, where="f")) in ("ok", "MalformedFile")


@pytest.mark.parametrize(
    "program",
    [b"", b".", b"N", b"\xff.", b"0.", b"1.", b"a.", b"]a.", b"s.", b"}s.", b"u.", b"e.", b"t.", b"\x85.", b"N\x86.",
     b"R.", b"N)R.", b"NNR.", b"\x93.", b"NN\x93.", b"b.", b"N}b.", b"K\x01}b.", b"h\x05.", b"(K\x01d.", b"}(K\x01u.",
     b"K\x01K\x02a.", b"](K\x01u.", b"\x8f](K\x01e\x90.", b"}]Ns.", b"}}Ns.", b"\x8f(]\x90.", b"(]\x91.",
     b"X\x01\0\0\0\xff.",
     b"c\xff\nx\n.", b"cabc", b"cabc\ndef", b"o.", b"(o.", b"(No.", b"Q.", b"G\0\0.", b"J\0.", b"M\0.", b"\x8a\x05\0.",
     b"ctorch\nSize\nN\x85R.", b"ctorch\nSize\n(Nt\x85R.", b"ctorch\nSize\n)R.", b"ctorch\nfloat32\n)R.",
     b"cbuiltins\ncomplex\nN\x85R.", b"cbuiltins\nrange\n)R.", b"cbuiltins\nset\nK\x05\x85R.", b"c_codecs\nencode\n)R.",
     b"cpathlib\nPosixPath\nK\x01\x85R.", b"ccollections\nOrderedDict\n](K\x01e\x85R.",
     b"cbuiltins\ndict\n](K\x01e\x85R.",
     b"ctorch.serialization\n_get_layout\n)R.", b"cbuiltins\nbytes\n](M\xff\xffe\x85R."],
)  # fmt: skip
def test_nonsense_is_malformed(program: bytes) -> None:
    with pytest.raises(MalformedFile):
        loads(b"\x80\x04" + program, PLAIN, where="the place")


def test_messages_say_where() -> None:
    with pytest.raises(MalformedFile, match=r"^the place: broken pickle at byte 3"):
        loads(b"\x80\x04\xff.", PLAIN, where="the place")


def test_every_truncation_of_a_real_pickle_is_malformed() -> None:
    data = pickle.dumps({"a": [1, (2.5, "text", b"bytes"), {3, 4}], "b": frozenset({5})}, 4)
    for stop in range(len(data)):
        with pytest.raises(MalformedFile):
            loads(data[:stop], PLAIN, where="f")


def test_every_changed_byte_of_a_real_pickle_is_read_or_refused() -> None:
    data = pickle.dumps({"a": [1, (2.5, "text", b"bytes"), {3, 4}], "b": frozenset({5}), "c": {None: "d" * 300}}, 4)
    for position in range(len(data)):
        for value in (0x00, 0x28, 0x29, 0x2E, 0x52, 0x85, 0x93, 0x94, 0xFF, data[position] ^ 1, data[position] ^ 0x80):
            changed = data[:position] + bytes([value]) + data[position + 1 :]
            with contextlib.suppress(MalformedFile, UnsafePickle):
                loads(changed, PLAIN, where="f")


def test_raw_stands_for_itself() -> None:
    assert pickle.loads(dump([Raw(b"K\x07"), call("builtins", "complex", 1.0, 2.0)], 2)) == [7, 1 + 2j]
