"""A pickle machine that builds plain values and runs nothing.

Python's own unpickler imports whatever a pickle names and allocates whatever it asks for. This one is a small stack
machine for the same opcodes (protocol 2 and newer, the ones that torch writes) with these differences:

- A global is looked up in the table that the caller gives. A name that is not there is refused, or replaced by an
  inert ``Opaque`` when the caller asks for that. Nothing is imported, ever.
- Calls go to the functions of that table only; they build records.
- Lengths are checked against the data before anything is allocated, memo indices against the length of the data,
  and keys of dictionaries against a depth (hashing nested tuples recurses in C).

Opcodes are those of CPython's Lib/pickletools.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Mapping
from pickle import PicklingError, UnpicklingError
from typing import Any

from fsdp_ckpt.codec.opcodes import OPCODES, STOP
from fsdp_ckpt.errors import MalformedFile, UnsafePickle

__all__ = ["Constructor", "Global", "Machine", "Opaque", "PicklingError", "Record", "UnpicklingError", "loads"]

_COPY_LIMIT = 1 << 20
_KEY_NODES = 256
_MAX_NAME = 1000


class Record:
    """An instance of a class that was not imported: its name, constructor arguments and state.

    Attributes:
        cls: ``module.qualname``.
        args: Arguments of the call or of ``__new__``.
        state: What ``__setstate__`` would have got: a dict, a tuple, or None.
    """

    __slots__ = ("args", "cls", "state")

    def __init__(self, cls: str, args: tuple[Any, ...] = (), state: Any = None) -> None:
        self.cls = cls
        self.args = args
        self.state = state

    def __repr__(self) -> str:
        return f"<{self.cls}>"

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute from the state: a dict, or ``(dict or None, dict of slots)``."""
        states = self.state if type(self.state) is tuple else (self.state,)
        for state in states:
            if isinstance(state, dict) and name in state:
                return state[name]
        return default


class Opaque(Record):
    """A record of a class that is not on the list. It can be shown, not used."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<opaque: needs {self.cls}>"


class Constructor:
    """A global that may be called.

    Args:
        name: ``module.qualname``.
        call: Builds the result from the machine and the arguments.
        bulk: Optional shortcut for long runs of alike records, see ``Machine.run``; called with the machine and the
            position of the opcode.
    """

    __slots__ = ("bulk", "call", "name")

    def __init__(
        self,
        name: str,
        call: Callable[[Machine, tuple[Any, ...]], Any],
        bulk: Callable[[Machine, int], None] | None = None,
    ) -> None:
        self.name = name
        self.call = call
        self.bulk = bulk

    def __repr__(self) -> str:
        return f"<class {self.name}>"


Global = Any
"""What a global resolves to: a Constructor, or a value that stands for itself (a DType, say)."""


class Machine:
    """Runs one pickle.

    Args:
        data: The bytes; the pickle may be followed by others.
        known: Globals by ``module.qualname``.
        where: File and record, for messages.
        persistent: Resolves persistent ids (torch's storages).
        allow_unknown: Replace unknown globals by ``Opaque`` records instead of refusing.
        position: Where in ``data`` the pickle begins; after ``run``, one past its STOP.
    """

    def __init__(
        self,
        data: bytes,
        known: Mapping[str, Global],
        *,
        where: str,
        persistent: Callable[[Any], Any] | None = None,
        allow_unknown: bool = False,
        position: int = 0,
    ) -> None:
        self.data = data
        self.known = known
        self.where = where
        self.persistent = persistent
        self.allow_unknown = allow_unknown
        self.position = position
        self.stack: list[Any] = []
        self.memo: list[Any] = []
        self.copied = 0
        self._marks: list[list[Any]] = []
        self._globals: dict[str, Global] = {}

    def run(self) -> Any:
        """Return the value that the pickle describes.

        A ``BINGET`` or ``LONG_BINGET`` of a Constructor with ``bulk`` calls it with the constructor on top of the
        stack; ``bulk`` may replace it by finished records and move ``position``, or leave all as it is.

        Raises:
            UnsafePickle: A global is not known.
            MalformedFile: The bytes are not a pickle, or one that torch would not write.
        """
        data, ops, stack = self.data, OPCODES, self.stack
        try:
            while True:
                code = data[self.position]
                self.position += 1
                op = ops[code]
                if op is None:
                    if code == STOP:
                        return stack.pop()
                    raise self.malformed(f"unsupported opcode {code:#04x}")
                op(self)
                stack = self.stack
        except (
            IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error, OverflowError, RecursionError,
        ) as error:  # fmt: skip
            if isinstance(error, MalformedFile | UnsafePickle):
                raise
            raise self.malformed(str(error) or type(error).__name__) from error

    def malformed(self, reason: str) -> MalformedFile:
        """Return the error for a broken pickle."""
        return MalformedFile(f"{self.where}: broken pickle at byte {self.position}: {reason}")

    def take(self, num_bytes: int) -> bytes:
        """Return the next bytes and move past them."""
        end = self.position + num_bytes
        if num_bytes < 0 or end > len(self.data):
            raise self.malformed(f"{num_bytes} bytes announced, {len(self.data) - self.position} left")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def spend(self, num_items: int) -> None:
        """Account for a copy that a call makes; a pickle must not multiply its own size without bound."""
        self.copied += num_items
        if self.copied > _COPY_LIMIT + 16 * len(self.data):
            raise self.malformed("it copies its own content over and over")

    def find(self, module: str, name: str) -> Global:
        """Return what a global stands for."""
        if len(module) + len(name) > _MAX_NAME:
            raise self.malformed("a global with an absurdly long name")
        full = f"{module}.{name}"
        found = self._globals.get(full)
        if found is None:
            found = self.known.get(full)
            if found is None:
                if not self.allow_unknown:
                    raise UnsafePickle(full, where=self.where)
                found = Constructor(full, lambda _, args: Opaque(full, args))
            self._globals[full] = found
        return found

    def reduce(self, function: Any, args: Any) -> Any:
        """Call a constructor."""
        if type(function) is not Constructor:
            raise self.malformed(f"it calls {type(function).__name__}, which is no class")
        if type(args) is not tuple:
            raise self.malformed("arguments are no tuple")
        return function.call(self, args)

    def build(self, target: Any, state: Any) -> None:
        """Give a record its state. State of a plain dict (an OrderedDict's attributes) is dropped."""
        if isinstance(target, Record):
            target.state = state
        elif not isinstance(target, dict):
            raise self.malformed(f"state for {type(target).__name__}")

    def put(self, index: int, value: Any) -> None:
        """Store into the memo."""
        memo = self.memo
        if index < len(memo):
            memo[index] = value
            return
        if index > len(self.data):
            raise self.malformed(f"memo index {index} in {len(self.data)} bytes")
        memo.extend([None] * (index - len(memo)))
        memo.append(value)

    def get(self, index: int, width: int) -> None:
        """Push from the memo, and give a constructor's shortcut its chance; the opcode was ``width`` bytes long."""
        value = self.memo[index]
        self.stack.append(value)
        if type(value) is Constructor and value.bulk is not None:
            value.bulk(self, self.position - width)

    def pop_mark(self) -> list[Any]:
        """Return the items above the topmost mark."""
        items = self.stack
        self.stack = self._marks.pop()
        return items

    def push_mark(self) -> None:
        """Begin a new list of items."""
        self._marks.append(self.stack)
        self.stack = []

    def append(self, items: list[Any]) -> None:
        """Append to the list on top of the stack."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Opaque):
            raise self.malformed(f"items for {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        """Put keys and values, in turn, into the dictionary on top of the stack."""
        target = self.stack[-1]
        if isinstance(target, Opaque):
            return
        if not isinstance(target, dict) or len(items) % 2:
            raise self.malformed(f"items for {type(target).__name__}")
        pairs = iter(items)
        for key, value in zip(pairs, pairs, strict=True):
            target[key if type(key) is str else self.as_key(key)] = value

    def as_key(self, key: Any) -> Hashable:
        """Return a dictionary key after making sure that hashing it is cheap."""
        if type(key) is tuple:
            for item in key:
                if type(item) is tuple and tuple in map(type, item):
                    self._refuse_deep(key)
                    break
        return key  # type: ignore[no-any-return]

    def _refuse_deep(self, key: tuple[Any, ...]) -> None:
        todo, seen = [key], 0
        while todo:
            seen += 1
            node = todo.pop()
            todo.extend(item for item in node if type(item) is tuple)
            if seen + len(todo) > _KEY_NODES:
                raise self.malformed("a dictionary key is nested too deep")


def loads(data: bytes, known: Mapping[str, Global], *, where: str, allow_unknown: bool = False) -> Any:
    """Return the value of a pickle without storages, see ``Machine``."""
    return Machine(data, known, where=where, allow_unknown=allow_unknown).run()
