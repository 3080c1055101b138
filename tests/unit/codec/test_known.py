from __future__ import annotations

import datetime as dt
import pathlib
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_ckpt.catalog import DTYPES
from fsdp_ckpt.codec.known import PLAIN, record, records
from fsdp_ckpt.codec.pickles import Constructor, Record, loads
from fsdp_ckpt.errors import MalformedFile
from tests.unit.codec.raw_pickle import call, dump, global_


def load(value: Any, protocol: int = 4) -> Any:
    return loads(pickle.dumps(value, protocol), PLAIN, where="x")


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_stand_for_themselves(name: str) -> None:
    assert load(getattr(torch, name)) is DTYPES[name]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4, 5), (2**40, 2**62)])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_sizes_are_tuples(shape: tuple[int, ...], protocol: int) -> None:
    found = load(torch.Size(shape), protocol)
    assert found == shape
    assert type(found) is tuple


def test_sizes_written_as_lists() -> None:
    assert loads(dump(call("torch", "Size", [2, 3]), 2), PLAIN, where="x") == (2, 3)


@pytest.mark.parametrize("value", [[1.5], [True], ["2"], [None], [(1,)]])
def test_sizes_are_whole_numbers(value: list[Any]) -> None:
    for inner in (value, tuple(value)):
        with pytest.raises(MalformedFile, match=r"torch\.Size"):
            loads(dump(call("torch", "Size", inner), 2), PLAIN, where="x")


@pytest.mark.parametrize("protocol", [2, 4])
def test_layouts_and_devices(protocol: int) -> None:
    assert load(torch.strided, protocol) == "torch.strided"
    device = load(torch.device("cuda", 1), protocol)
    assert (device.cls, device.args) == ("torch.device", ("cuda", 1))


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("text", ["/a/b c/d", "rel/x", "/", ".", "a"])
def test_paths_are_their_text(text: str, protocol: int) -> None:
    assert load(pathlib.PurePosixPath(text), protocol) == str(pathlib.PurePosixPath(text))
    assert load(pathlib.Path(text), protocol) == str(pathlib.Path(text))


@pytest.mark.parametrize("parts", [("/a/b",), ("/", "a", "b")])
@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_of_python_3_13_and_of_older_ones(module: str, parts: tuple[str, ...]) -> None:
    assert loads(dump(call(module, "PosixPath", *parts), 2), PLAIN, where="x") == "/a/b"


@pytest.mark.parametrize("value", [b"", b"abc", bytes(range(256))])
def test_bytes_of_protocol_2(value: bytes) -> None:
    # There they are text that is encoded in latin1.
    assert load(value, 2) == value


@pytest.mark.parametrize("codec", ["rot13", "idna", "unicode_escape", "zlib_codec"])
def test_other_codecs_are_refused(codec: str) -> None:
    with pytest.raises(MalformedFile, match="codec"):
        loads(dump(call("_codecs", "encode", "abc", codec), 2), PLAIN, where="x")


def test_enum_members_of_early_python_3_11() -> None:
    module = "torch.distributed.checkpoint.metadata"
    known = {**PLAIN, **records(module, "_MEM_FORMAT_ENCODING")}
    member = call("builtins", "getattr", global_(module, "_MEM_FORMAT_ENCODING"), "TORCH_CONTIGUOUS_FORMAT")
    found = loads(dump(member, 2), known, where="x")
    assert repr(found) == f"<class {module}._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT>"


@pytest.mark.parametrize(
    "value",
    [dt.date(2024, 2, 29), dt.timedelta(days=2, seconds=5), dt.time(12, 30), dt.UTC,
     dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.UTC)],
)  # fmt: skip
@pytest.mark.parametrize("protocol", [2, 4])
def test_dates_become_records(value: Any, protocol: int) -> None:
    found = load(value, protocol)
    assert isinstance(found, Record)
    assert found.cls == f"datetime.{type(value).__name__}"


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_numpy_random_states_can_be_read(protocol: int) -> None:
    # What Accelerate and the Trainer put into random_states_0.pkl and rng_state.pth.
    state: Any = np.random.RandomState(3).get_state()
    found = load(state, protocol)
    assert found[0] == "MT19937"
    assert found[2:] == state[2:]
    assert isinstance(found[1], Record)


@pytest.mark.parametrize(
    "value", [np.float64(1.5), np.int64(3), np.arange(3), np.zeros((2, 2), np.float32), np.bool_(True)]
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_numpy_values_become_records(value: Any, protocol: int) -> None:
    assert isinstance(load(value, protocol), Record)


def test_numpy_1_names() -> None:
    text = pickle.dumps(np.float64(1.5), 2).replace(b"cnumpy._core.multiarray", b"cnumpy.core.multiarray")
    assert isinstance(loads(text, PLAIN, where="x"), Record)


def test_python_2_names_of_builtins() -> None:
    assert loads(dump(call("__builtin__", "set", [1, 2]), 2), PLAIN, where="x") == {1, 2}
    assert loads(dump(call("__builtin__", "xrange", 3), 2), PLAIN, where="x") == range(3)


def test_types_of_builtins_are_names_only() -> None:
    found = load([int, float, str, bool, object])
    assert [item.name for item in found] == [f"builtins.{kind}" for kind in ("int", "float", "str", "bool", "object")]
    assert all(type(item) is Constructor for item in found)


def test_record_constructors() -> None:
    table = records("a.b", "C", "D") | {"e.F": record("e.F")}
    assert sorted(table) == ["a.b.C", "a.b.D", "e.F"]
    found = loads(dump(call("a.b", "D", 1, "x"), 2), table, where="x")
    assert (found.cls, found.args, found.state) == ("a.b.D", (1, "x"), None)


def test_nothing_in_the_table_is_a_function_of_another_module() -> None:
    # Whatever a pickle can call is code of this package.
    for name, value in PLAIN.items():
        if isinstance(value, Constructor):
            assert value.call.__module__.startswith("fsdp_ckpt."), name
        else:
            assert value in DTYPES.values(), name


def test_nothing_is_imported_for_it() -> None:
    import subprocess

    data = pickle.dumps([np.arange(3), torch.float32, torch.Size((2,)), dt.date(2024, 1, 1)])
    code = (
        "import sys; from fsdp_ckpt.codec.known import PLAIN; from fsdp_ckpt.codec.pickles import loads;"
        f"loads({data!r}, PLAIN, where='x');"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
