"""Write pickle opcodes one by one, with the memo numbers, batches and frames of CPython's C pickler (protocol 4)."""

import pickle
import struct
from collections.abc import Callable, Hashable, Iterator
from typing import BinaryIO, ParamSpec

P = ParamSpec("P")

_BATCH = 1000
_FRAME_BYTES = 1 << 16
_TUPLES = {1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}


class PickleStream:
    """A pickle being written: opcodes go out in frames, the memo is counted (MEMOIZE numbers without saying so).

    What is kept in memory is one number per object that is shared and one piece per sequence that repeats.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame = bytearray()
        self._num_memoized = 0
        self._numbers: dict[Hashable, int] = {}
        self._pieces: dict[Hashable, tuple[bytes, int]] = {}
        file.write(pickle.PROTO + b"\x04")

    def put(self, opcodes: bytes) -> None:
        """Write opcodes that memoize nothing."""
        self._frame += opcodes

    def remember(self, opcodes: bytes) -> None:
        """Write opcodes that leave one object, and memoize it."""
        self._frame += opcodes + pickle.MEMOIZE
        self._num_memoized += 1

    def share(self, key: Hashable, write: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Write an object the first time (its last MEMOIZE must be its own), a reference to it afterwards."""
        number = self._numbers.get(key)
        if number is None:
            write(*args, **kwargs)
            self._numbers[key] = self._num_memoized - 1
        elif number < 256:
            self.put(pickle.BINGET + bytes([number]))
        else:
            self.put(pickle.LONG_BINGET + struct.pack("<I", number))

    def repeat(self, key: Hashable, write: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Write a sequence of opcodes that is the same whenever `key` is, from the second or third time on by copying.

        The sequence is kept once it shares no object for the first time. A frame may end after it.
        """
        piece = self._pieces.get(key)
        if piece is None:
            num_shared, num_memoized, length = len(self._numbers), self._num_memoized, len(self._frame)
            write(*args, **kwargs)
            if len(self._numbers) == num_shared:
                self._pieces[key] = bytes(self._frame[length:]), self._num_memoized - num_memoized
        else:
            self._frame += piece[0]
            self._num_memoized += piece[1]
        if len(self._frame) >= _FRAME_BYTES:
            self._end_frame()

    def batches(self, count: int, *, one: bytes, many: bytes, closes_full_batch: bool) -> Iterator[int]:
        """Yield 0 .. count-1, around the items that the caller writes between, in batches of 1,000.

        Args:
            count: Number of items, at least 1.
            one: Opcode for a single item.
            many: Opcode that ends a batch.
            closes_full_batch: Whether an empty batch follows a full last one (dicts do, lists do not).
        """
        if count == 1:
            yield 0
            self.put(one)
            return
        for index in range(count):
            if index % _BATCH == 0:
                self.put((many if index else b"") + pickle.MARK)
            yield index
        self.put(many + (pickle.MARK + many if closes_full_batch and count % _BATCH == 0 else b""))

    def dict_items(self, count: int) -> Iterator[int]:
        """Write an empty dict and yield 0 .. count-1, around the keys and values that the caller writes between."""
        self.remember(pickle.EMPTY_DICT)
        yield from self.batches(count, one=pickle.SETITEM, many=pickle.SETITEMS, closes_full_batch=True)

    def list_items(self, count: int) -> Iterator[int]:
        """Write an empty list and yield 0 .. count-1, around the items that the caller writes between."""
        self.remember(pickle.EMPTY_LIST)
        yield from self.batches(count, one=pickle.APPEND, many=pickle.APPENDS, closes_full_batch=False)

    def text(self, text: str) -> None:
        """Write a string that is an object of its own; at most 255 bytes of UTF-8."""
        data = text.encode()
        self.remember(pickle.SHORT_BINUNICODE + bytes([len(data)]) + data)

    def name(self, text: str) -> None:
        """Write a string that is one object wherever it stands."""
        self.share(text, self.text, text)

    def integer(self, value: int) -> None:
        """Write a non-negative integer in the shortest opcode."""
        if value < 1 << 8:
            self.put(pickle.BININT1 + bytes([value]))
        elif value < 1 << 16:
            self.put(pickle.BININT2 + struct.pack("<H", value))
        elif value < 1 << 31:
            self.put(pickle.BININT + struct.pack("<i", value))
        else:
            data = pickle.encode_long(value)
            self.put(pickle.LONG1 + bytes([len(data)]) + data)

    def tuple_of(self, values: tuple[int, ...]) -> None:
        """Write a tuple of one to three non-negative integers."""
        for value in values:
            self.integer(value)
        self.remember(_TUPLES[len(values)])

    def global_name(self, module: str, name: str) -> None:
        """Write a class or function by its name."""
        self.share((module, name), self._global_name, module, name)

    def _global_name(self, module: str, name: str) -> None:
        self.name(module)
        self.name(name)
        self.remember(pickle.STACK_GLOBAL)

    def new(self, module: str, name: str) -> None:
        """Write an object of the class, without its state."""
        self.global_name(module, name)
        self.remember(pickle.EMPTY_TUPLE + pickle.NEWOBJ)

    def open_state(self) -> None:
        """Begin the state of the object just written, a dict of two items or more; `close_state` ends it."""
        self.remember(pickle.EMPTY_DICT)
        self.put(pickle.MARK)

    def close_state(self) -> None:
        """End the state and give it to its object."""
        self.put(pickle.SETITEMS + pickle.BUILD)

    def close(self) -> None:
        """Write the end of the pickle and the last frame; the file stays open."""
        self.put(pickle.STOP)
        self._end_frame()

    def _end_frame(self) -> None:
        self._file.write(pickle.FRAME + struct.pack("<Q", len(self._frame)))
        self._file.write(self._frame)
        self._frame.clear()
