"""Files of torch.save before 1.6, which torch can still write."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from fsdp_ckpt.catalog import DTYPES
from fsdp_ckpt.codec.legacy import is_legacy, load_legacy
from fsdp_ckpt.codec.tensors import TensorRef
from fsdp_ckpt.codec.torchzip import locate
from fsdp_ckpt.errors import Incompatible, MalformedFile, UnsafePickle
from tests.build import full_bits
from tests.unit.codec.raw_pickle import call, dump
from tests.unit.codec.test_tensors import views
from tests.unit.codec.test_torchzip import Bytes, save, values


def legacy(value: Any) -> bytes:
    return save(value, _use_new_zipfile_serialization=False)


def load(data: bytes, **options: Any) -> Any:
    return load_legacy(Bytes(data), len(data), where="f", **options)


def test_they_are_recognised() -> None:
    assert is_legacy(legacy(torch.zeros(3))[:16])
    assert not is_legacy(save(torch.zeros(3))[:16])
    assert not is_legacy(b"")


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_views_of_every_dtype_are_found(name: str) -> None:
    for key, tensor in views(getattr(torch, name)).items():
        random = torch.randint(0, 255, (tensor.untyped_storage().nbytes(),), dtype=torch.uint8)
        tensor.untyped_storage().copy_(random.untyped_storage())
        data = legacy({"w": tensor})
        archive, value = load(data)
        ref = value["w"]
        assert isinstance(ref, TensorRef)
        assert ref.dtype is DTYPES[name]
        chunk = locate(archive, ref, "f", (0,) * tensor.dim(), tuple(tensor.shape))
        assert full_bits(values(data, chunk, tensor)) == full_bits(tensor), key
        assert chunk.crc32 is None, "there are no checksums"


def test_several_storages_and_shared_ones() -> None:
    base = torch.arange(10.0)
    state = {"a": base, "b": base[3:7], "c": torch.arange(5), "d": {"e": [torch.ones(2, 2)]}, "n": 7}
    data = legacy(state)
    archive, value = load(data)
    assert value["n"] == 7
    assert value["a"].storage == value["b"].storage
    for ref, tensor in ((value["a"], base), (value["b"], base[3:7]), (value["c"], torch.arange(5)),
                        (value["d"]["e"][0], torch.ones(2, 2))):  # fmt: skip
        chunk = locate(archive, ref, "f", (0,) * tensor.dim(), tuple(tensor.shape))
        assert full_bits(values(data, chunk, tensor)) == full_bits(tensor)


@pytest.mark.parametrize("count", [0, 1, 40_000])
def test_pickles_of_any_length(count: int) -> None:
    # Beyond one MiB they are read in several attempts.
    state = {f"layers.{i}.a_rather_long_name.weight": i for i in range(count)}
    archive, value = load(legacy({**state, "w": torch.arange(6.0)}))
    ref = value.pop("w")
    assert value == state
    assert locate(archive, ref, "f", (0,), (6,)).numel == 6


def test_no_tensor_at_all() -> None:
    archive, value = load(legacy({"a": [1, 2]}))
    assert value == {"a": [1, 2]}
    assert not archive.records


def test_parameters() -> None:
    _, value = load(legacy({"p": torch.nn.Parameter(torch.zeros(2, 3))}))
    assert value["p"].shape == (2, 3)


def test_every_truncation_is_noticed() -> None:
    data = legacy({"w": torch.arange(6.0), "v": torch.arange(3)})
    for stop in range(len(data)):
        with pytest.raises(MalformedFile):
            load(data[:stop])


def test_every_changed_byte_is_read_or_refused() -> None:
    data = legacy({"w": torch.arange(6.0)})
    read = 0
    for position in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            broken = data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]
            try:
                archive, _ = load(broken)
                assert all(0 <= r.start <= r.start + r.size <= len(data) for r in archive.records.values())
                read += 1
            except (MalformedFile, UnsafePickle, Incompatible):
                pass
    assert 0 < read < 3 * len(data)


def with_object(value: Any) -> bytes:
    """Return a file whose object is replaced by a crafted pickle."""
    file = io.BytesIO(legacy(0))
    plain = dump(0, 2)
    data = file.getvalue()
    assert data.count(plain) == 1
    return data.replace(plain, dump(value, 2))


def test_code_is_refused_unless_values_may_be_unknown() -> None:
    data = with_object({"x": call("os", "system", "true")})
    with pytest.raises(UnsafePickle, match=r"os\.system"):
        load(data)
    _, value = load(data, allow_unknown=True)
    assert repr(value["x"]) == "<opaque: needs os.system>"


def test_big_endian_machines() -> None:
    data = legacy({"w": torch.zeros(1)})
    at = data.index(b"little_endian")
    true_at = data.index(b"\x88", at)
    with pytest.raises(Incompatible, match="big-endian"):
        load(data[:true_at] + b"\x89" + data[true_at + 1 :])


@pytest.mark.parametrize("elements", [5, 7, 2**40, 2**63])
def test_a_storage_of_another_length(elements: int) -> None:
    data = legacy({"w": torch.arange(6.0)})
    at = len(data) - 24 - 8
    assert data[at : at + 8] == (6).to_bytes(8, "little")
    with pytest.raises(MalformedFile):
        load(data[:at] + elements.to_bytes(8, "little") + data[at + 8 :])
