"""safetensors files that break the rules. The judge is the safetensors library: what it refuses, we refuse."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors

from tests.cli.tool import assert_refused, deserialize, tensors
from tests.hostile.forge_dcp import Forged, index, place, tensor_metadata
from tests.hostile.places import assert_harmless
from tests.hostile.sandbox import Case, Sandbox

DATA = bytes(range(16))


def _file(header: bytes | str, data: bytes = DATA, *, length: int | None = None) -> bytes:
    head = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(head) if length is None else length) + head + data


def _entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes


def _one(**changes: Any) -> bytes:
    return _file(json.dumps({"w": _entry(**changes)}))


def _raw(text: str) -> bytes:
    """A header around the text of one entry."""
    return _file('{"w":{' + text + "}}")


def _two(first: list[int], second: list[int]) -> bytes:
    return _file(
        json.dumps(
            {
                "a": _entry(shape=[(first[1] - first[0]) // 4], data_offsets=first),
                "b": _entry(shape=[(second[1] - second[0]) // 4], data_offsets=second),
            }
        )
    )


GOOD = '"dtype":"F32","shape":[2,2],"data_offsets":[0,16]'
DIGITS = "9" * 100_000

BROKEN: dict[str, bytes] = {
    "empty": b"",
    "seven-bytes": bytes(7),
    "eight-zeros": bytes(8),
    "length-2-63": _file("{}", b"", length=1 << 63),
    "length-all-bits": _file("{}", b"", length=(1 << 64) - 1),
    "length-100-million": _file("{}", b"", length=100_000_000),
    "length-one-more": _file("{}", b"", length=3),
    "length-one-less": _file(json.dumps({"w": _entry()}), length=len(json.dumps({"w": _entry()})) - 1),
    "no-json": _file("hello"),
    "single-quotes": _file("{'w':{}}"),
    "trailing-comma": _file('{"w":{' + GOOD + "},}"),
    "comment": _file("{/* x */}"),
    "garbage-behind": _file('{"w":{' + GOOD + "}}x"),
    "two-objects": _file('{"w":{' + GOOD + "}}{}"),
    "a-list": _file("[]"),
    "a-number": _file("1"),
    "a-text": _file('"w"'),
    "null": _file("null"),
    "not-utf8": _file(b'{"w\xff":{' + GOOD.encode() + b"}}"),
    "utf-16": _file(('{"w":{' + GOOD + "}}").encode("utf-16")),
    "utf-16-le": _file(('{"w":{' + GOOD + "}}").encode("utf-16-le")),
    "utf-32": _file(('{"w":{' + GOOD + "}}").encode("utf-32")),
    "utf-8-mark": _file(('{"w":{' + GOOD + "}}").encode("utf-8-sig")),
    "utf-8-surrogate": _file(b'{"\xed\xa0\x80":{' + GOOD.encode() + b"}}"),
    "lone-surrogate": _file('{"\\ud800":{' + GOOD + "}}"),
    "lone-surrogate-in-metadata": _file('{"__metadata__":{"a":"\\udfff"},"w":{' + GOOD + "}}"),
    "nul-in-name": _file(b'{"w\x00":{' + GOOD.encode() + b"}}"),
    "nested-lists": _file("[" * 100_000),
    "nested-objects": _file('{"a":' * 100_000),
    "nested-in-metadata": _file('{"__metadata__":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "nested-in-shape": _raw('"dtype":"F32","data_offsets":[0,16],"shape":' + "[" * 100_000 + "]" * 100_000),
    "metadata-twice": _file('{"__metadata__":{"a":"1"},"__metadata__":{"a":"1"},"w":{' + GOOD + "}}"),
    "metadata-number": _file('{"__metadata__":{"a":1},"w":{' + GOOD + "}}"),
    "metadata-list": _file('{"__metadata__":[],"w":{' + GOOD + "}}"),
    "entry-number": _file('{"w":1}'),
    "entry-list": _file('{"w":[]}'),
    "entry-null": _file('{"w":null}'),
    "entry-empty": _file('{"w":{}}'),
    "field-missing": _raw('"dtype":"F32","shape":[2,2]'),
    "field-twice": _raw('"dtype":"F32",' + GOOD),
    "dtype-unknown": _one(dtype="F33"),
    "dtype-lower": _one(dtype="f32"),
    "dtype-null": _one(dtype=None),
    "dtype-number": _one(dtype=1),
    "dtype-list": _one(dtype=["F32"]),
    "dtype-long": _one(dtype="F" * 100_000),
    "shape-negative": _one(shape=[-2, -2]),
    "shape-one-negative": _one(shape=[-4], data_offsets=[0, 16]),
    "shape-float": _one(shape=[2.0, 2.0]),
    "shape-bool": _one(shape=[True, 4]),
    "shape-text": _one(shape=["4"]),
    "shape-null": _one(shape=None),
    "shape-object": _one(shape={}),
    "shape-exponent": _raw('"dtype":"F32","shape":[4e0],"data_offsets":[0,16]'),
    "shape-nan": _raw('"dtype":"F32","shape":[NaN],"data_offsets":[0,16]'),
    "shape-2-64": _one(shape=[1 << 64]),
    "shape-overflow": _one(shape=[1 << 62, 4], data_offsets=[0, 16]),
    "shape-overflow-to-zero": _one(shape=[1 << 32, 1 << 32], data_offsets=[0, 0]),
    "shape-digits": _raw('"dtype":"F32","data_offsets":[0,16],"shape":[' + DIGITS + "]"),
    "shape-many-large": _one(shape=[(1 << 62) - 1] * 300_000),
    "shape-too-small": _one(shape=[3]),
    "shape-too-large": _one(shape=[5]),
    "offsets-negative": _one(data_offsets=[-16, 0]),
    "offsets-reversed": _one(data_offsets=[16, 0]),
    "offsets-float": _one(data_offsets=[0.0, 16.0]),
    "offsets-bool": _one(shape=[], dtype="U8", data_offsets=[False, True]),
    "offsets-one": _one(data_offsets=[16]),
    "offsets-three": _one(data_offsets=[0, 16, 16]),
    "offsets-object": _one(data_offsets={"0": 0, "1": 16}),
    "offsets-null": _one(data_offsets=None),
    "offsets-digits": _raw('"dtype":"F32","shape":[2,2],"data_offsets":[0,' + DIGITS + "]"),
    "offsets-2-64": _one(data_offsets=[1 << 64, (1 << 64) + 16]),
    "offsets-beyond": _one(data_offsets=[16, 32]),
    "offsets-not-from-zero": _one(shape=[3], data_offsets=[4, 16]),
    "overlap": _two([0, 12], [8, 16]),
    "overlap-whole": _two([0, 16], [0, 16]),
    "gap": _two([0, 4], [8, 16]),
    "data-missing": _file(json.dumps({"w": _entry()}), b""),
    "data-one-less": _file(json.dumps({"w": _entry()}), DATA[:-1]),
    "data-one-more": _file(json.dumps({"w": _entry()}), DATA + b"x"),
    "data-without-tensors": _file("{}", DATA),
    "half-a-byte": _file(json.dumps({"w": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}), b"x"),
}  # fmt: skip

TWICE: dict[str, bytes] = {
    "same-name-twice": _file('{"w":{' + GOOD + '},"w":{' + GOOD + "}}"),
    "same-name-twice-escaped": _file('{"w":{' + GOOD + '},"\\u0077":{' + GOOD + "}}"),
}
"""The format's description forbids these ("Duplicate keys are disallowed"); the library takes the last one."""


def _blob(folder: Path, content: bytes) -> Path:
    """A folder of torch.distributed.checkpoint whose data file is this (SerializationFormat.SAFETENSORS)."""
    forged = Forged()
    forged.append(content or b"\0")
    forged.items["w"] = tensor_metadata((2, 2), [((0, 0), (2, 2))])
    forged.storage.append((index("w", (0, 0)), place("__0_0.distcp", 0, 16)))
    return forged.write(folder)


@pytest.mark.parametrize("name", BROKEN)
def test_what_the_library_refuses_is_refused(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    with pytest.raises(Exception, match=r"."):  # its own error, or OverflowError for a negative length
        deserialize(BROKEN[name])
    _assert_refused(BROKEN[name], tmp_path, sandbox)


@pytest.mark.parametrize("name", TWICE)
def test_a_name_that_stands_twice_is_refused(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    _assert_refused(TWICE[name], tmp_path, sandbox)


def _assert_refused(content: bytes, tmp_path: Path, sandbox: Sandbox) -> None:
    folders = [tmp_path / "single", tmp_path / "sharded/sharded", tmp_path / "index"]
    names = ["model.safetensors", "shard-00001-model-00001-of-00001.safetensors", "model-00001-of-00001.safetensors"]
    for folder, file in zip(folders, names, strict=True):
        folder.mkdir(parents=True)
        (folder / file).write_bytes(content)
    weight_map = {"weight_map": {"w": names[2]}}
    (folders[2] / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    paths = [folders[0], folders[0] / names[0], folders[1].parent, folders[2], _blob(tmp_path / "blob", content)]

    out = tmp_path / "out"
    cases = [
        Case(argv=[command, str(path), *([str(out), "--no-fsync"] if command == "merge" else [])], direct=True,
             out=str(out))
        for path in paths
        for command in ("inspect", "merge")
    ]  # fmt: skip
    for outcome in sandbox.many(cases, timeout_s=30):
        assert_harmless(outcome, tmp_path)
        assert_refused(outcome, 4)
        assert outcome.digest is None


def test_a_header_above_the_limit_is_not_even_read(tmp_path: Path, sandbox: Sandbox) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"w": _entry()}).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 100_000_001) + header)
        file.write(b" " * (100_000_001 - len(header)) + DATA)
    with pytest.raises(safetensors.SafetensorError, match="header too large"):
        safetensors.safe_open(path, framework="np")
    for command in (["inspect", path], ["merge", path, tmp_path / "out"]):
        outcome = sandbox.run(*command)
        assert_harmless(outcome, tmp_path)
        assert_refused(outcome, 4)
        assert outcome.peak_bytes < 100 << 20
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rank", [65, 3_000, 100_000])
def test_a_tensor_of_many_dimensions_is_refused_or_kept(rank: int, tmp_path: Path, sandbox: Sandbox) -> None:
    content = _one(shape=[1] * (rank - 1) + [4])
    assert len(deserialize(content)) == 1
    (tmp_path / "model.safetensors").write_bytes(content)
    seen = sandbox.run("inspect", tmp_path)
    outcome = sandbox.run("merge", tmp_path / "model.safetensors", tmp_path / "out")
    for result in (seen, outcome):
        assert_harmless(result, tmp_path)
    if outcome.code:
        assert_refused(outcome, 4, 8)
        assert not (tmp_path / "out").exists()
    else:
        assert tensors(tmp_path / "out") == tensors(tmp_path / "model.safetensors")


SHARDING: dict[str, str] = {
    "no-json": "x",
    "list": "[]",
    "nested": "[" * 100_000,
    "no-offsets": '{"w":{}}',
    "text": '{"w":{"saved_offsets":"ab"}}',
    "rank": '{"w":{"saved_offsets":[0]}}',
    "negative": '{"w":{"saved_offsets":[-1,0]}}',
    "large": '{"w":{"saved_offsets":[9223372036854775807,0]}}',
    "huge": '{"w":{"saved_offsets":[1' + "0" * 4_000 + ",0]}}",
    "hole": '{"w":{"saved_offsets":[2,0]}}',
    "infinite": '{"w":{"saved_offsets":[Infinity,0]}}',
}


@pytest.mark.parametrize("name", SHARDING)
def test_a_shard_that_lies_about_its_place_is_refused(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    header = {"__metadata__": {"DCP_SHARDING_INFO": SHARDING[name]}, "w": _entry()}
    folder = tmp_path / "ckpt/sharded"
    folder.mkdir(parents=True)
    (folder / "shard-00001-model-00001-of-00001.safetensors").write_bytes(_file(json.dumps(header)))
    for argv in (["inspect", folder.parent], ["merge", folder.parent, tmp_path / "out"]):
        outcome = sandbox.run(*argv)
        assert_harmless(outcome, tmp_path)
        if argv[0] == "merge":
            assert_refused(outcome, 4)
        else:
            assert outcome.code in (0, 4), outcome.err
    assert not (tmp_path / "out").exists()
