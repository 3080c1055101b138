"""Values in objects= come back as they were, or are refused when saving; a damaged file is never half believed."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import io
import math
import pathlib
import random
import tracemalloc
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_ckpt import load_state, save_state
from fsdp_ckpt.errors import ChecksumMismatch, FsdpCkptError, Incompatible, MalformedFile, UsageError
from fsdp_ckpt.train.objects import decode, encode


class Point(NamedTuple):
    """A tuple with a class of its own."""

    x: int


class Holder:
    """An object with one value for a state."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def same(first: Any, second: Any) -> bool:
    """Equal in type, in all elements, and in their types."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        if first.is_nested:
            return all(map(same, first.unbind(), second.unbind()))
        if first.layout is not torch.strided:
            return first.layout == second.layout and same(first.to_dense(), second.to_dense())
        return first.dtype == second.dtype and first.shape == second.shape and bool((first == second).all())
    if isinstance(first, np.ndarray | np.generic):
        kinds = {kind.dtype.newbyteorder("=") for kind in (first, second)}  # NumPy brings arrays into native order
        return len(kinds) == 1 and first.shape == second.shape and bool(np.all(first == second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple | collections.deque):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


KEPT: dict[str, Callable[[], Any]] = {
    "float16 array": lambda: np.array([1.5, -2], np.float16),
    "int8 array": lambda: np.array([[1, -2]], np.int8),
    "int16 array": lambda: np.array([1, -2], np.int16),
    "uint16 array": lambda: np.array([1, 65535], np.uint16),
    "complex64 array": lambda: np.array([1 + 2j], np.complex64),
    "complex128 array": lambda: np.array([1 + 2j]),
    "texts": lambda: np.array(["a", "bcd", "é"]),
    "bool array": lambda: np.array([True, False]),
    "datetime64 array": lambda: np.array(["2020-01-02", "1999-12-31"], "datetime64[D]"),
    "empty array": lambda: np.zeros((0, 3), np.float32),
    "0-d array": lambda: np.array(7),
    "big-endian array": lambda: np.array([1, 2.5], ">f4"),
    "column-major array": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "array with gaps": lambda: np.arange(12.0).reshape(3, 4)[:, ::2],
    "float32 scalar": lambda: np.float32(0.1),
    "float64 scalar": lambda: np.float64(0.1),
    "int16 scalar": lambda: np.int16(-3),
    "bool scalar": lambda: np.bool_(True),
    "datetime64 scalar": lambda: np.datetime64("2020-01-01"),
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset(["a"]),
    "OrderedDict": lambda: collections.OrderedDict(b=1, a=2),
    "Counter": lambda: collections.Counter("aab"),
    "slice": lambda: slice(1, 9, 2),
    "range": lambda: range(3, 9, 2),
    "complex": lambda: 1 - 2j,
    "bytes": lambda: b"\x00\xff",
    "bytearray": lambda: bytearray(b"\x00\xff"),
    "datetime": lambda: dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC),
    "timedelta": lambda: dt.timedelta(days=1, microseconds=2),
    "path": lambda: pathlib.Path("/a/b"),
    "dtype": lambda: torch.bfloat16,
    "device": lambda: torch.device("cpu"),
    "size": lambda: torch.Size([2, 3]),
    "nesting": lambda: [(1, [2, {3: torch.ones(2), "x": (np.int64(4), None)}]), ()],
    "number of many bits": lambda: 2**200,
    "infinity": lambda: float("inf"),
    "bfloat16 tensor": lambda: torch.tensor([1.5, -2], dtype=torch.bfloat16),
    "float8 tensor": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "transposed tensor": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "state of NumPy's generator": lambda: np.random.default_rng(0).bit_generator.state,
    "state of NumPy's old generator": lambda: np.random.RandomState(0).get_state(),
}

EITHER: dict[str, Callable[[], Any]] = {
    "deque": lambda: collections.deque([1, 2], maxlen=3),
    "defaultdict of numbers": lambda: collections.defaultdict(int, a=1),
    "defaultdict of lists": lambda: collections.defaultdict(list, a=[1]),
    "decimal": lambda: decimal.Decimal("1.5"),
    "uuid": lambda: uuid.UUID(int=5),
    "namedtuple": lambda: Point(1),
    "array of objects": lambda: np.array([None, 1], dtype=object),
    "structured array": lambda: np.zeros(2, [("a", "i4")]),
    "masked array": lambda: np.ma.zeros(2),
    "longdouble array": lambda: np.zeros(2, np.longdouble),
    "sparse tensor": lambda: torch.eye(2).to_sparse(),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "function": lambda: lambda: None,
    "module": lambda: nn.Linear(1, 1),
    "class": lambda: Holder,
}


@pytest.mark.parametrize("name", KEPT)
def test_plain_values_tensors_and_arrays_come_back_as_they_were(name: str) -> None:
    value = KEPT[name]()
    found = decode(encode({"value": value}, "it"), "file")["value"]
    assert same(found, value), f"{value!r} came back as {found!r}"


@pytest.mark.parametrize("name", EITHER)
def test_other_values_come_back_as_they_were_or_are_refused_when_saving(name: str) -> None:
    value = EITHER[name]()
    refused, data = None, b""
    try:
        data = encode({"value": value}, "Holder `a`")
    except Incompatible as error:
        refused = error
    if refused is not None:
        assert "Holder `a`" in refused.message
        assert "state_dict() return numbers" in (refused.hint or "")
    else:
        found = decode(data, "file")["value"]
        assert same(found, value), f"{value!r} came back as {found!r}"


def test_a_value_that_is_refused_leaves_the_previous_checkpoint(tmp_path: pathlib.Path) -> None:
    holder = Holder(5)
    save_state(tmp_path / "run", objects={"a": holder}, step=1, durable=False)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    holder.value = uuid.UUID(int=5)
    with pytest.raises(Incompatible, match=r"uuid\.UUID"):
        save_state(tmp_path / "run", objects={"a": holder}, step=2, durable=False)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    load_state(tmp_path / "run", objects={"a": holder})
    assert holder.value == 5


VALUES: dict[str, Callable[[], Any]] = {
    "numbers and texts": lambda: {"loss": 0.1, "step": 3, "big": 2**200, "note": "é ∂", "done": True, "none": None},
    "containers": lambda: {"list": [1, [2, {"a": []}]], "dictionary": {"a": {"b": {}}}},
    "deep": lambda: _deep(50),
    "infinities": lambda: {"best": float("inf"), "worst": [float("-inf")]},
    "lone surrogate": lambda: {"text": "\ud800"},
}

NO_VALUES: dict[str, Callable[[], Any]] = {
    "NumPy scalar": lambda: np.float32(1),
    "array": lambda: np.ones(2),
    "tensor": lambda: torch.ones(2),
    "set": lambda: {1},
    "bytes": lambda: b"x",
    "path": lambda: pathlib.Path("/a"),
    "datetime": lambda: dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
    "a tuple as a key": lambda: {(1, 2): 3},
    "too deep": lambda: _deep(100_000),
}


def _deep(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_as_they_were(tmp_path: pathlib.Path, name: str) -> None:
    values = VALUES[name]()
    save_state(tmp_path / "run", nn.Linear(1, 1), values=values, durable=False)
    assert same(load_state(tmp_path / "run").values, values)


def test_a_loss_that_is_not_a_number_does_not_stop_a_save(tmp_path: pathlib.Path) -> None:
    save_state(tmp_path / "run", nn.Linear(1, 1), values={"loss": float("nan")}, durable=False)
    assert math.isnan(load_state(tmp_path / "run").values["loss"])


@pytest.mark.parametrize("name", NO_VALUES)
def test_values_that_json_does_not_have_are_refused_when_saving(tmp_path: pathlib.Path, name: str) -> None:
    save_state(tmp_path / "run", nn.Linear(1, 1), values={"a": 1}, durable=False)
    with pytest.raises(UsageError, match="values: ") as caught:
        save_state(tmp_path / "run", nn.Linear(1, 1), values={"a": NO_VALUES[name]()}, durable=False)
    assert "numbers, texts" in (caught.value.hint or "")
    assert load_state(tmp_path / "run").values == {"a": 1}


def _flip(data: bytes, position: int, bit: int) -> bytes:
    return data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]


def test_every_flipped_bit_is_found_or_harmless() -> None:
    value = {"rate": 0.123456789, "tensor": torch.arange(9.0), "array": np.arange(5, dtype=np.int16), "text": "é"}
    data = encode(value, "it")
    found = 0
    for position in range(len(data)):
        try:
            loaded = decode(_flip(data, position, position % 8), "file")
        except (ChecksumMismatch, MalformedFile):
            found += 1
        else:
            assert same(loaded, value), f"byte {position}, bit {position % 8}"
    assert found > len(data) // 4


class Job:
    """Everything that is stored in small files."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.987654321)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.scaler.scale(torch.ones(()))  # its scale becomes a tensor
        self.feed, self.own = Holder(torch.arange(300)), Holder(torch.arange(300.0))

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler,
            "dataloader": self.feed, "objects": {"own": self.own}, "rng": True,
        }  # fmt: skip

    def scramble(self) -> None:
        self.scheduler.gamma, self.optimizer.param_groups[0]["lr"] = 0.25, 0.75
        self.scaler.update(7.0)
        self.feed.value, self.own.value = 1, 2
        torch.nn.init.zeros_(self.model.weight)
        random.seed(8)
        torch.manual_seed(8)

    def bits(self) -> list[Any]:
        state = [self.scheduler.state_dict(), self.scaler.state_dict(), self.feed.value, self.own.value]
        live = [self.model.weight.tolist(), self.optimizer.param_groups[0]["lr"]]
        return [*state, *live, random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]


SMALL = {
    "scheduler.bin": ["data.pkl", "version"],
    "scaler.pt": ["data.pkl", "byteorder"],
    "random_states_0.pkl": ["data.pkl", "data/0"],
    "dl_states_0.pkl": ["data.pkl", "data/0"],
    "custom_checkpoint_0.pkl": ["data.pkl", "data/0"],
}


@pytest.mark.parametrize("file", SMALL)
def test_a_flipped_bit_in_a_small_file_is_found_before_anything_changes(tmp_path: pathlib.Path, file: str) -> None:
    import zipfile

    job = Job()
    save_state(tmp_path / "run", **job.parts(), durable=False)
    path = tmp_path / "run" / file
    data = path.read_bytes()
    records = {info.filename.partition("/")[2]: info for info in zipfile.ZipFile(io.BytesIO(data)).infolist()}
    job.scramble()
    before = job.bits()
    for name in SMALL[file]:
        info = records[name]
        name_bytes, extra_bytes = (int.from_bytes(data[info.header_offset + at :][:2], "little") for at in (26, 28))
        content = info.header_offset + 30 + name_bytes + extra_bytes  # APPNOTE.TXT 4.3.7
        for position in range(content, content + info.file_size, max(1, info.file_size // 12)):
            path.write_bytes(_flip(data, position, 2))
            with pytest.raises((ChecksumMismatch, MalformedFile), match=file.replace(".", r"\.")):
                load_state(tmp_path / "run", **job.parts())
            assert job.bits() == before
    path.write_bytes(data)
    load_state(tmp_path / "run", **job.parts())
    assert job.bits() != before


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


BOMBS: dict[str, Callable[[], Any]] = {
    "ndarray": lambda: Call(np.ndarray, (30_000_000,)),
    "_reconstruct": lambda: Call(np._core.multiarray._reconstruct, np.ndarray, (30_000_000,), b"d"),  # type: ignore[attr-defined]
    "bytearray": lambda: Call(bytearray, 400_000_000),
    "bytes": lambda: Call(bytes, 400_000_000),
    "list": lambda: Call(list, range(30_000_000)),
    "deque": lambda: Call(collections.deque, range(30_000_000)),
    "frozenset": lambda: Call(frozenset, range(3_000_000)),
    "size": lambda: Call(torch.Size, range(3_000_000)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_that_asks_for_memory_is_refused_before_any_is_taken(name: str) -> None:
    buffer = io.BytesIO()
    torch.save({"value": BOMBS[name]()}, buffer)
    assert len(buffer.getvalue()) < 4000
    tracemalloc.start()
    try:
        with pytest.raises(FsdpCkptError):
            decode(buffer.getvalue(), "file")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
