"""What is written without torch is what torch and Python's own unpickler read back, value for value."""

from __future__ import annotations

import collections
import datetime as dt
import io
import math
import pathlib
import pickle
import random
import zipfile
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ckpt.catalog import DTYPES
from fsdp_ckpt.codec.known import PLAIN
from fsdp_ckpt.codec.pickles import Opaque, Record, loads
from fsdp_ckpt.codec.tensors import TORCH
from fsdp_ckpt.codec.torchzip import open_archive
from fsdp_ckpt.codec.torchzip_writer import ArchiveTensor, seal_archive
from fsdp_ckpt.codec.value_writer import encode_object, encode_pickle, lay_out_state
from fsdp_ckpt.errors import Incompatible
from tests.build import full_bits

_NUMPY: Any = np
_CORE = _NUMPY._core.multiarray
NUMPY = [np.ndarray, np.dtype, *(getattr(np.dtypes, f"{name}DType") for name in ("UInt32", "Float64", "Int64", "Bool"))]
NUMPY_NAMES: list[Any] = [
    (getattr(_CORE, name), f"numpy.{module}.multiarray.{name}")
    for name in ("_reconstruct", "scalar")
    for module in ("core", "_core")
] + [_NUMPY._core.numeric._frombuffer]


def decoded(value: Any, protocol: int = 2) -> Any:
    """Return what our reader makes of Python's pickle of a value."""
    return loads(pickle.dumps(value, protocol), PLAIN, where="x")


def shown(value: Any) -> str:
    """Return a value's text, which tells 1 from True and 1.0, and () from []; sets have no order of their own."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}{sorted(map(shown, value))}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{shown(key)}: {shown(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{', '.join(map(shown, value))}]"
    return repr(value)


def torch_reads(value: Any) -> Any:
    with torch.serialization.safe_globals(NUMPY + NUMPY_NAMES):
        return torch.load(io.BytesIO(encode_object(value)), weights_only=True)


_SHARED: list[Any] = ["shared", b"shared", {"k": 1.5}]
PLAIN_VALUES: dict[str, Any] = {
    "none": None,
    "flags": [True, False],
    "small integers": [0, 1, 255, 256, 65535, 65536, -1, -255, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1],
    "large integers": [2**63, -(2**63), 2**64, 2**2000, -(2**2000), 2**2031 - 1, -(2**2031)],
    "floats": [0.0, -0.0, 5e-324, 1e308, math.inf, -math.inf, 0.1],
    "complex": [1j, complex(-0.0, math.inf)],
    "texts": ["", "é\n", "権", "\0", "a lone surrogate \ud800", "x" * 70000],
    "bytes": [b"", b"abc", bytes(range(256)), b"\xff" * 70000],
    "bytearray": bytearray(b"a\x80"),
    "nested": {"a": [1, (2, {"b": ()}), []], 5: {}, (1, "x"): None, None: 1, True: 2, 2.5: 3},
    "sets": [set(), {1, 2, 3}, {"a", "b"}, {(1, 2), None}],
    "param_groups": [
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "fused": None, "params": ["a.w", "b.w"]},
        {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "fused": None, "params": []},
    ],
    "python's random state": random.Random(5).getstate(),
    "the same thing over and over": [_SHARED, _SHARED, (_SHARED, _SHARED), {"x": _SHARED}],
    "more things than a memo of one byte numbers": [[str(i), [i], (i,)] for i in range(300)] * 2,
}


@pytest.mark.parametrize("name", PLAIN_VALUES)
def test_torch_and_python_read_back_plain_values(name: str) -> None:
    value = PLAIN_VALUES[name]
    assert shown(torch_reads(value)) == shown(value)
    assert shown(pickle.loads(encode_pickle(value))) == shown(value)


@pytest.mark.parametrize("value", [frozenset({1, 2}), range(2, 10, 3), slice(1, None, 2), 2**5000, [int, float, str]])
def test_python_reads_back_what_torch_loads_only_without_weights_only(value: Any) -> None:
    # Here torch refuses its own files just so.
    own = io.BytesIO()
    torch.save(value, own)
    for data in (own.getvalue(), encode_object(decoded(value, protocol=4))):
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            torch.load(io.BytesIO(data), weights_only=True)
        assert torch.load(io.BytesIO(data), weights_only=False) == value


def test_nan_stays_nan() -> None:
    assert math.isnan(torch_reads(math.nan))


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name: str) -> None:
    assert torch_reads({"dtype": DTYPES[name]}) == {"dtype": getattr(torch, name)}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "value",
    [torch.device("cuda", 1), torch.device("cpu"), collections.OrderedDict(a=1), torch.Size([2, 3]),
     np.float64(1.5), np.int64(-7), np.bool_(True)],
)  # fmt: skip
def test_torch_reads_back_what_was_decoded(value: Any, protocol: int) -> None:
    found = torch_reads(decoded(value, protocol))
    assert found == value
    plainer: dict[type, type] = {torch.Size: tuple, collections.OrderedDict: dict}
    assert type(found) is plainer.get(type(value), type(value))


@pytest.mark.parametrize("numpy_1", [False, True])
@pytest.mark.parametrize(
    "array", [np.arange(6, dtype=np.uint32), np.ones((2, 3), np.float32), np.zeros(0), np.array(5), np.array(["ab"])]
)
def test_arrays_under_the_name_that_they_had(array: Any, numpy_1: bool) -> None:
    data = pickle.dumps(array, 2)
    data = data.replace(b"cnumpy._core.multiarray", b"cnumpy.core.multiarray") if numpy_1 else data
    again = encode_pickle(loads(data, PLAIN, where="x"))
    assert (b"numpy.core.multiarray\n" in again, b"numpy._core.multiarray\n" in again) == (numpy_1, not numpy_1)
    found = pickle.loads(again)
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize(("protocol", "numpy_1"), [(2, False), (2, True), (4, False), (4, True), (5, False)])
def test_a_random_state_of_numpy_goes_on_as_it_would_have(protocol: int, numpy_1: bool) -> None:
    made = np.random.RandomState(3)
    made.standard_normal(7)  # leaves half a pair behind
    data = pickle.dumps({"numpy": made.get_state()}, protocol)
    if numpy_1:
        old, new = (b"numpy._core.multiarray", b"numpy.core.multiarray")
        if protocol >= 4:  # there the name has its length before it, and a frame counts it
            old, new = b"\x8c" + bytes([len(old)]) + old, b"\x8c" + bytes([len(new)]) + new
            data = data[:2] + data[11:]
        data = data.replace(old, new)
    found = torch_reads(loads(data, PLAIN, where="x"))["numpy"]
    other = np.random.RandomState(99)
    other.set_state(found)
    assert other.standard_normal(9).tolist() == made.standard_normal(9).tolist()


def test_a_random_state_of_python_goes_on_as_it_would_have() -> None:
    made = random.Random(8)
    made.gauss(0, 1)
    other = random.Random(1)
    other.setstate(torch_reads(decoded(made.getstate())))
    assert [other.gauss(0, 1) for _ in range(5)] == [made.gauss(0, 1) for _ in range(5)]


@pytest.mark.parametrize(
    "value",
    [dt.date(2024, 2, 29), dt.timedelta(days=2, seconds=5), dt.time(12, 30), dt.UTC,
     dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.UTC)],
)  # fmt: skip
def test_dates(value: Any) -> None:
    assert pickle.loads(encode_pickle(decoded({"when": value}))) == {"when": value}


def test_paths_stay_texts() -> None:
    assert torch_reads(decoded(pathlib.PurePosixPath("/a/b"))) == "/a/b"


def test_the_archive_is_a_sound_zip_file_with_torch_names() -> None:
    with zipfile.ZipFile(io.BytesIO(encode_object({"a": 1}))) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["archive/data.pkl", "archive/byteorder", "archive/version"]
        assert archive.read("archive/byteorder") == b"little"
        assert archive.read("archive/version") == b"3\n"


_ATOMS: Any = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(codec=None, exclude_categories=()), max_size=6)
    | st.binary(max_size=6)
)
_KEYS: Any = st.text(max_size=3) | st.integers(-5, 5) | st.tuples(st.integers(0, 3), st.text(max_size=2)) | st.none()
_VALUES: Any = st.recursive(
    _ATOMS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=2).map(lambda items: [items, items, (items,)])
        | st.dictionaries(_KEYS, inner, max_size=3)
        | st.sets(_KEYS, max_size=3)
    ),
    max_leaves=15,
)


@settings(derandomize=True, database=None, deadline=None, max_examples=200)
@given(_VALUES)
def test_any_nesting_is_read_back_by_torch_python_and_our_reader(value: Any) -> None:
    data = encode_object(value)
    assert shown(torch.load(io.BytesIO(data), weights_only=True)) == shown(value)
    assert shown(pickle.loads(encode_pickle(value))) == shown(value)
    archive = open_archive(lambda start, num: data[start : start + num], 0, len(data), where="x")
    assert shown(archive.load(TORCH)) == shown(value)


def _state(value: Any, contents: dict[int, bytes]) -> bytes:
    layout = lay_out_state(value, prefix="optimizer")
    data = bytearray(layout.size)
    for storage, content in contents.items():
        start, stop = layout.storages[storage]
        assert (start % 4096, stop - start) == (0, len(content))
        data[start:stop] = content
    for position, part in seal_archive(layout, {number: zlib.crc32(content) for number, content in contents.items()}):
        data[position : position + len(part)] = part
    return bytes(data)


def test_a_real_optimizer_state_is_laid_out_before_its_tensors_are_known() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "amsgrad": True}], lr=0.01
    )
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    contents: dict[int, bytes] = {}

    def entry(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            contents[len(contents)] = full_bits(value)
            dtype = DTYPES[str(value.dtype).removeprefix("torch.")]
            return ArchiveTensor(name="", dtype=dtype, shape=tuple(value.shape), storage=len(contents) - 1)
        if isinstance(value, dict):
            return {key: entry(item) for key, item in value.items()}
        return [entry(item) for item in value] if isinstance(value, list) else value

    data = _state(entry(state), contents)
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert found["param_groups"] == state["param_groups"]
    assert list(found["state"]) == list(state["state"])
    for index, fields in state["state"].items():
        assert list(found["state"][index]) == list(fields)
        for name, tensor in fields.items():
            again = found["state"][index][name]
            assert (again.dtype, again.shape, full_bits(again)) == (tensor.dtype, tensor.shape, full_bits(tensor))
    fresh = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    fresh.load_state_dict(found)


def test_tied_tensors_share_a_storage() -> None:
    tensor = ArchiveTensor(name="", dtype=DTYPES["float32"], shape=(2,), storage=0)
    found = torch.load(io.BytesIO(_state({"a": [tensor], "b": (tensor,)}, {0: b"\0" * 8})), weights_only=True)
    assert found["a"][0].data_ptr() == found["b"][0].data_ptr()


_TENSOR = ArchiveTensor(name="", dtype=DTYPES["float32"], shape=(2,), storage=0)
_LOOP: list[Any] = []
_LOOP.append({"again": (_LOOP,)})
_DEEP: Any = 1
for _ in range(150):
    _DEEP = [_DEEP]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, Opaque("evil.Class", (1,))]}, r"at \['a'\]\[1\] is an instance of `evil.Class`"),
        ({"a": (Record("evil.Class", ()),)}, r"at \['a'\]\[0\] is of `evil.Class`"),
        (Record("builtins.getattr", ("a", "b")), r"it is of `builtins.getattr`"),
        ({"x": PLAIN["_codecs.encode"]}, r"at \['x'\] is of `_codecs.encode`"),
        ({"x": _TENSOR}, r"at \['x'\] is a tensor"),
        ({"x": torch.ones(2)}, r"at \['x'\] is a tensor"),
        (Record("torch.device", (object(),)), r"at \['args'\]\[0\] is a object"),
        (_LOOP, "contains itself"),
        (_DEEP, "nested too deep"),
    ],
)
def test_what_cannot_be_written_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(Incompatible, match=rf"^the state of rank 3: .*{message}") as caught:
        encode_object(value, what="the state of rank 3")
    assert caught.value.hint


def test_tensors_of_a_state_stand_in_dictionaries_and_lists_only() -> None:
    with pytest.raises(Incompatible, match="is a tensor"):
        lay_out_state({"x": Record("torch.device", (_TENSOR,))}, prefix="p")


def test_what_is_shared_is_written_once() -> None:
    value: Any = ["x" * 100]
    for _ in range(60):  # 2**60 texts when written out
        value = [value, value]
    assert len(encode_pickle(value)) < 1500


def test_sets_are_written_in_one_order() -> None:
    assert encode_pickle({"b", "a", "c"}) == encode_pickle({"c", "b", "a"})
    assert pickle.loads(encode_pickle({"b", "a", "c"})) == {"a", "b", "c"}
