"""Pickles that run code, or eat memory or time, in an unpickler that trusts them."""

from __future__ import annotations

import functools
import os
import pickle
import struct
from collections.abc import Callable
from typing import Any

from tests.hostile.forge_pickle import PROTO2, STOP, Call, Glob, New, Ops, Persistent, bomb, dump, emit, nested, text


class _Reduced:
    """Something that Python's own pickler writes as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def _call(module: str, name: str, *args: Any) -> bytes:
    return dump(Call(Glob(module, name), args))


def _python(protocol: int, canary: str) -> bytes:
    return pickle.dumps(_Reduced(os.system, f"touch {canary}"), protocol=protocol)


def code_attacks(canary: str) -> dict[str, tuple[bytes, str]]:
    """Return pickles that would create the file ``canary`` or load code, and the global that each asks for."""
    touch, source = f"touch {canary}", f"open({canary!r}, 'w')"
    found: dict[str, tuple[bytes, str]] = {
        f"python-protocol-{protocol}": (_python(protocol, canary), "posix.system") for protocol in range(6)
    }
    by_name: list[tuple[str, str, tuple[Any, ...]]] = [
        ("builtins", "eval", (source,)),
        ("builtins", "exec", (source,)),
        ("__builtin__", "eval", (source,)),
        ("builtins", "__import__", ("antigravity",)),
        ("builtins", "compile", (source, "x", "exec")),
        ("builtins", "open", (canary, "w")),
        ("builtins", "setattr", (Glob("builtins", "dict"), "x", 1)),
        ("builtins", "map", (Glob("builtins", "int"), [])),
        ("os", "system", (touch,)),
        ("os", "execvp", ("touch", ["touch", canary])),
        ("nt", "system", (touch,)),
        ("subprocess", "Popen", (["touch", canary],)),
        ("subprocess", "check_output", (["touch", canary],)),
        ("pty", "spawn", (["touch", canary],)),
        ("runpy", "run_path", (canary,)),
        ("importlib", "import_module", ("antigravity",)),
        ("pathlib", "Path.touch", (canary,)),
        ("shutil", "rmtree", (canary,)),
        ("timeit", "timeit", (source,)),
        ("cProfile", "run", (source,)),
        ("pdb", "run", (source,)),
        ("code", "InteractiveInterpreter", ()),
        ("ctypes", "CDLL", ("libc.so.6",)),
        ("marshal", "loads", (b"\xe3",)),
        ("pickle", "loads", (b"cos\nsystem\n(X\x01\x00\x00\x00xtR.",)),
        ("_pickle", "Unpickler", ()),
        ("types", "FunctionType", ()),
        ("functools", "partial", (Glob("builtins", "int"),)),
        ("functools", "reduce", (Glob("builtins", "int"), [])),
        ("operator", "attrgetter", ("system",)),
        ("operator", "methodcaller", ("system", touch)),
        ("socket", "create_connection", (("127.0.0.1", 9),)),
        ("webbrowser", "open", ("http://127.0.0.1:9",)),
        ("torch", "load", (canary,)),
        ("torch.serialization", "load", (canary,)),
        ("torch.storage", "_load_from_bytes", (b"cos\nsystem\n(X\x01\x00\x00\x00xtR.",)),
        ("torch.jit", "load", (canary,)),
        ("torch.hub", "load", ("a/b", "c")),
        ("torch.utils.collect_env", "run", (touch,)),
        ("torch._inductor.codecache", "_load_triton_kernel_from_source", (source,)),
        ("numpy", "load", (canary,)),
        ("numpy.testing._private.utils", "runstring", (source, {})),
        ("pip", "main", (["install", "x"],)),
        ("torch.Size.__class__", "__subclasses__", ()),
        ("collections", "OrderedDict.__init__.__globals__", ()),
        ("torch.serialization", "_get_layout.__globals__", ()),
        ("builtins", "getattr.__class__", ()),
        (" os", "system", (touch,)),
        ("os\0", "system", (touch,)),
        ("collections ", "OrderedDict", ()),
    ]
    for module, name, args in by_name:
        found[f"call-{module}.{name}".replace("\0", "0")] = (_call(module, name, *args), f"{module}.{name}")
    system, arg = b"cposix\nsystem\n", text(touch)
    posix = {
        "global": PROTO2 + system + arg + b"\x85R.",
        "stack-global": b"\x80\x04" + text("posix") + text("system") + b"\x93" + arg + b"\x85R.",
        "inst": b"(" + arg + b"iposix\nsystem\n.",
        "obj": b"(" + system + arg + b"o.",
        "newobj": PROTO2 + system + arg + b"\x85\x81.",
        "newobj-ex": b"\x80\x04" + system + arg + b"\x85}\x92.",
        "build": PROTO2 + system + b")R" + emit({"__setstate__": 1}) + b"b.",
        "through-the-memo": PROTO2 + b"ctorch\nSize\nq\x000" + system + b"q\x000h\x00" + arg + b"\x85R.",
        "called-and-dropped": PROTO2 + system + arg + b"\x85R0" + system + b".",
        "uncalled": PROTO2 + b"]" + system + b"a.",
    }
    found |= {f"posix-{name}": (code, "posix.system") for name, code in posix.items()}
    return found


def chain_attacks(canary: str) -> dict[str, bytes]:
    """Return pickles that try to climb from names that are allowed to something that runs code."""
    get = Glob("builtins", "getattr")
    size, ordered = Glob("torch", "Size"), Glob("collections", "OrderedDict")
    climb = Call(get, (Call(get, (Call(get, (size, "__class__")), "__base__")), "__subclasses__"))
    return {
        "getattr-subclasses": dump(Call(climb, ())),
        "getattr-globals": dump(Call(get, (Call(get, (ordered, "__init__")), "__globals__"))),
        "getattr-of-getattr": dump(Call(Call(get, (get, "__call__")), (get, "__self__"))),
        "getattr-of-a-value": dump(Call(get, ("text", "format"))),
        "getattr-default": dump(Call(get, (size, "nothing", Glob("builtins", "dict")))),
        "call-a-dtype": dump(Call(Glob("torch", "float32"), ("x",))),
        "call-a-text": dump(Call("posix.system", (f"touch {canary}",))),
        "call-a-result": dump(Call(Call(size, ((1,),)), ())),
        "arguments-no-tuple": PROTO2 + emit(size) + emit([1]) + b"R.",
        "build-a-class": PROTO2 + emit(size) + emit({"__call__": 1}) + b"b.",
        "build-a-text": PROTO2 + emit("x") + emit({"a": 1}) + b"b.",
        "build-a-tuple": PROTO2 + emit((1, 2)) + emit({"a": 1}) + b"b.",
        "rebuild-of-getattr": dump(
            Call(Glob("torch._tensor", "_rebuild_from_type_v2"), (get, size, (size, "__reduce__"), {}))
        ),
        "rebuild-recursion": dump(_rebuild_chain(2000)),
        "extension-1": PROTO2 + b"\x82\x01.",
        "extension-2": PROTO2 + b"\x83\x01\x00.",
        "extension-4": PROTO2 + b"\x84\x01\x00\x00\x00.",
        "newobj-ex-keywords": b"\x80\x04" + emit(size) + b")" + emit({"a": 1}) + b"\x92.",
        "encode-a-strange-codec": _call("_codecs", "encode", "x", "rot13"),
        "encode-a-number": _call("_codecs", "encode", 1, "latin1"),
        "bytes-of-a-number": _call("builtins", "bytes", 1 << 40),
        "bytearray-of-a-number": _call("builtins", "bytearray", 1 << 40),
        "list-of-a-range": dump(Call(Glob("builtins", "list"), (Call(Glob("builtins", "range"), (1 << 40,)),))),
        "tuple-of-a-range": dump(Call(Glob("builtins", "tuple"), (Call(Glob("builtins", "range"), (1 << 40,)),))),
        "size-of-a-range": dump(Call(size, (Call(Glob("builtins", "range"), (1 << 40,)),))),
    }


def _rebuild_chain(levels: int) -> Any:
    kind, function = Glob("torch", "Tensor"), Glob("torch._tensor", "_rebuild_from_type_v2")
    arguments: Any = (Glob("torch", "Size"), kind, ((1,),), None)
    code = emit(arguments)
    for _ in range(levels):
        code = b"(" + emit(function) + emit(kind) + code + b"Nt"
    return Call(function, (function, kind, Ops(code), None))


def _copies(module: str, name: str) -> bytes:
    """Copy one memoised list of 20,000 items 10,000 times: 1.6 GB."""
    items = b"](" + b"N" * 20_000 + b"eq\x00"
    return PROTO2 + items + b"0](" + emit(Glob(module, name)) + b"q\x010" + b"h\x01h\x00\x85R" * 10_000 + b"e."


def _encodes() -> bytes:
    """Encode one memoised text of 100,000 characters 20,000 times: 2 GB."""
    names = emit("latin1") + b"q\x010" + emit(Glob("_codecs", "encode")) + b"q\x020"
    return PROTO2 + emit("x" * 100_000) + b"q\x000" + names + b"](" + b"h\x02h\x00h\x01\x86R" * 20_000 + b"e."


def _long_globals() -> bytes:
    """Names are module + name: 5,000 of a quarter of a megabyte each, from one in the memo."""
    names = b"".join(b"h\x00" + text(f"n{number}") + b"\x93" for number in range(5_000))
    return b"\x80\x04" + text("m" * 250_000) + b"q\x000](" + names + b"e."


def _wide(items: int) -> bytes:
    """A list that holds itself so many times: harmless until somebody prints it."""
    return PROTO2 + b"]q\x00(" + b"h\x00" * items + b"e."


def _wide_dict(items: int) -> bytes:
    return PROTO2 + b"}q\x00(" + b"".join(emit(f"k{number}") + b"h\x00" for number in range(items)) + b"u."


def _array(shape: Any) -> bytes:
    """A NumPy array whose shape is anything at all."""
    dtype = Call(Glob("numpy", "dtype"), ("f8", False, True))
    made = Call(Glob("numpy.core.multiarray", "_reconstruct"), (Glob("numpy", "ndarray"), (0,), b"b"))
    return PROTO2 + emit(made) + emit((1, shape, dtype, False, b"")) + b"b."


def _equal_sets(levels: int) -> bytes:
    """Two equal frozensets in frozensets: their hashes are cheap, comparing them is deep."""
    one = b"(K\x01\x91"
    for _ in range(levels):
        one = b"(" + one + b"\x91"
    return PROTO2 + b"}" + one + b"Ns" + one + b"Ns."


def _set_bomb(levels: int) -> bytes:
    """A frozenset of two things that both hold the same frozenset, and so on: cheap to hash, endless to print."""
    code = b"(K\x01\x91"
    for _ in range(levels):
        code = b"(" + code + b"q\x00h\x00\x85\x91"
    return code


def _eight(code: bytes, length: int, content: bytes = b"abc") -> bytes:
    return b"\x80\x04" + code + struct.pack("<Q", length) + content + STOP


@functools.cache
def memory_attacks() -> dict[str, bytes]:
    """Return pickles that are broken, or that would take memory or time out of all proportion to their size."""
    deep = 100_000
    key = b"}" + emit(nested(1_000_000)) + b"Ns"
    huge = emit(1 << 40_000)
    return {
        "empty": b"",
        "one-byte": b"\x80",
        "no-stop": PROTO2 + b"}",
        "only-stop": STOP,
        "unknown-opcode": PROTO2 + b"\xff.",
        "text-opcodes": b"(dp0\nS'a'\np1\nI1\nsS'b'\nL5L\nsS'c'\nF1.5\nsV\\u0041\nI01\ns.",
        "persistent-text": b"P0\n.",
        "persistent-without-stack": PROTO2 + b"Q.",
        "persistent-none": dump(Persistent(None)),
        "persistent-text-id": dump(Persistent("storage")),
        "persistent-short": dump(Persistent(("storage", Glob("torch", "FloatStorage"), "0"))),
        "persistent-other-kind": dump(Persistent(("module", Glob("torch", "FloatStorage"), "0", "cpu", 4))),
        "persistent-no-class": dump(Persistent(("storage", "FloatStorage", "0", "cpu", 4))),
        "persistent-wrong-class": dump(Persistent(("storage", Glob("torch", "Size"), "0", "cpu", 4))),
        "persistent-negative": dump(Persistent(("storage", Glob("torch", "FloatStorage"), "0", "cpu", -1))),
        "persistent-size-text": dump(Persistent(("storage", Glob("torch", "FloatStorage"), "0", "cpu", "4"))),
        "persistent-key-number": dump(Persistent(("storage", Glob("torch", "FloatStorage"), 0, "cpu", 4))),
        "persistent-view": dump(Persistent(("storage", Glob("torch", "FloatStorage"), "0", "cpu", 4, ("v", 0, 1)))),
        "memo-put-2-31": PROTO2 + b"Nr" + struct.pack("<I", 1 << 31) + STOP,
        "memo-put-all-bits": PROTO2 + b"Nr\xff\xff\xff\xff.",
        "memo-get-unset": PROTO2 + b"h\x05.",
        "memo-long-get-2-31": PROTO2 + b"j" + struct.pack("<I", 1 << 31) + STOP,
        "unicode8-2-40": _eight(b"\x8d", 1 << 40),
        "bytes8-2-40": _eight(b"\x8e", 1 << 40),
        "bytearray8-2-40": _eight(b"\x96", 1 << 40),
        "bytes8-all-bits": _eight(b"\x8e", (1 << 64) - 1),
        "unicode-2-32": PROTO2 + b"X\xff\xff\xff\xffab.",
        "unicode-no-utf8": PROTO2 + b"X\x02\x00\x00\x00\xff\xfe.",
        "long4-negative": PROTO2 + b"\x8b\xff\xff\xff\xff.",
        "frame-lies": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff}",
        "stack-underflow": PROTO2 + b"\x87.",
        "stop-on-nothing": PROTO2 + b"(0.",
        "pop-mark-without-mark": PROTO2 + b"1.",
        "tuple-without-mark": PROTO2 + b"t.",
        "many-marks": PROTO2 + b"(" * deep,
        "deep-tuple": PROTO2 + emit(nested(deep)) + STOP,
        "deep-tuple-key": PROTO2 + key + STOP,
        "deep-list": PROTO2 + b"]" * deep + b"a" * (deep - 1) + STOP,
        "deep-dict": PROTO2 + b"}N" * deep + b"Ns" + b"s" * (deep - 1) + STOP,
        "deep-frozenset": PROTO2 + b"(" * deep + b"\x91" * deep + STOP,
        "deep-frozenset-keys": _equal_sets(deep),
        "bomb": dump(bomb()),
        "bomb-key": PROTO2 + b"}" + emit(bomb()) + b"Ns.",
        "bomb-set": b"\x80\x04\x8f(" + emit(bomb()) + b"\x90.",
        "bomb-frozenset": b"\x80\x04(" + emit(bomb()) + b"\x91.",
        "bomb-ordered-dict": dump(Call(Glob("collections", "OrderedDict"), ([[bomb(), 1]],))),
        "list-in-itself": PROTO2 + b"]q\x00h\x00a.",
        "dict-in-itself": PROTO2 + b"}q\x00" + text("a") + b"h\x00s.",
        "dict-in-itself-twice": PROTO2 + b"}q\x00(" + text("a") + b"h\x00" + text("b") + b"h\x00u.",
        "list-in-itself-64-times": _wide(64),
        "dict-in-itself-64-times": _wide_dict(64),
        "array-of-bomb-shape": _array(bomb()),
        "array-of-huge-shape": _array((1 << 40_000,)),
        "set-bomb-key": PROTO2 + b"}" + _set_bomb(64) + b"Ns.",
        "list-as-key": PROTO2 + b"}]Ns.",
        "odd-items": PROTO2 + b"}(Nu.",
        "items-for-a-text": PROTO2 + text("x") + b"(NNu.",
        "append-to-a-tuple": PROTO2 + b")Na.",
        "copies-as-deque": _copies("collections", "deque"),
        "copies-as-tuple": _copies("builtins", "tuple"),
        "copies-as-size": _copies("torch", "Size"),
        "copies-as-list": _copies("builtins", "list"),
        "copies-as-frozenset": _copies("builtins", "frozenset"),
        "encodes": _encodes(),
        "long-globals": _long_globals(),
        "paths": PROTO2 + text("p" * 100_000) + b"q\x000cpathlib\nPath\nq\x010](" + b"h\x01h\x00\x86R" * 9_000 + b"e.",
        "huge-integer": PROTO2 + huge + STOP,
        "huge-integer-key": PROTO2 + b"}" + huge + b"Ns.",
        "metadata-of-nothing": dump(New(Glob("torch.distributed.checkpoint.metadata", "Metadata"), None)),
        "metadata-of-numbers": dump(
            New(
                Glob("torch.distributed.checkpoint.metadata", "Metadata"),
                {"state_dict_metadata": {"a": 1}, "storage_data": {"a": 1}},
            )
        ),
    }
