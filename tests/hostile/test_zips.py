"""Archives that lie about themselves, as items of a ``.distcp`` file, as a whole model, as one rank's file."""

from __future__ import annotations

import functools
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tool import assert_refused, tensors
from tests.hostile.forge_dcp import Forged, index, pattern, place, tensor_metadata
from tests.hostile.forge_pickle import Ops, bomb, dump, nested
from tests.hostile.forge_zip import Entry, archive, changed, records, saved, tensor_value, zip64
from tests.hostile.places import assert_harmless
from tests.hostile.sandbox import Case, Outcome, Sandbox

CONTENT = pattern(16)
MAX = 0xFFFFFFFF
ONE = records(tensor_value((2, 2)), [CONTENT])
WHOLE = records({"w": tensor_value((2, 2))}, [CONTENT])


def _write(folder: Path, one: bytes, whole: bytes) -> list[Path]:
    """Make an item, a model file and a rank file; ``one`` is an archive of a tensor, ``whole`` of a state dict."""
    forged = Forged()
    at = forged.append(one)
    forged.items["w"] = tensor_metadata((2, 2), [((0, 0), (2, 2))])
    forged.storage.append((index("w", (0, 0)), place(*at)))
    paths = [forged.write(folder / "item")]
    for name in ("full/pytorch_model.bin", "ranks/model_world_size_1_rank_0.pt"):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(whole)
        paths.append((folder / name).parent)
    return paths


def _both(sandbox: Sandbox, paths: list[Path], out: Path) -> list[tuple[Path, Outcome, Outcome]]:
    cases = []
    for path in paths:
        cases.append(Case(argv=["inspect", str(path)], direct=True))
        cases.append(Case(argv=["merge", str(path), str(out), "--no-fsync"], out=str(out), direct=True))
    done = sandbox.many(cases, timeout_s=30)
    return list(zip(paths, done[::2], done[1::2], strict=True))


def _deflated(content: bytes) -> dict[str, Any]:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(content) + packer.flush()
    return {"content": packed, "method": 8, "size": len(content), "crc": zlib.crc32(content)}


def _end64(entries: list[Entry], *, count: int, size: int, offset: int, at: int | None = None) -> bytes:
    """An archive whose 64-bit end record says anything."""
    plain = archive(entries)
    body, end = plain[:-22], plain[-22:]
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 20, 20, 0, 0, count, count, size, offset)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(body) if at is None else at, 1)
    return body + record + locator + end


@functools.cache
def _spoilt(kind: str) -> dict[str, bytes]:
    entries = ONE if kind == "one" else WHOLE
    plain = archive(entries)
    evil = Entry(name="data.pkl", content=b"cposix\nsystem\nX\x01\x00\x00\x00x\x85R.")
    bomb_bytes = _deflated(bytes(200 << 20))
    first = plain.index(b"PK\3\4", 1)
    return {
        "two-pickles": archive([*entries, evil]),
        "two-pickles-first": archive([evil, *entries]),
        "two-storages": archive([*entries, Entry(name="data/0", content=bytes(16))]),
        "deflated-storage": archive(changed(entries, "data/0", **_deflated(CONTENT))),
        "deflated-pickle": archive(changed(entries, "data.pkl", **_deflated(entries[0].content))),
        "deflate-bomb-storage": archive(changed(entries, "data/0", **bomb_bytes)),
        "deflate-bomb-pickle": archive(changed(entries, "data.pkl", **bomb_bytes)),
        "bzip2": archive(changed(entries, "data/0", method=12)),
        "encrypted": archive(changed(entries, "data/0", flags=1)),
        "sizes-differ": archive(changed(entries, "data/0", size=8)),
        "size-too-small": archive(changed(entries, "data/0", size=8, packed=8)),
        "size-into-the-next": archive(changed(entries, "data/0", size=60, packed=60)),
        "size-beyond-the-file": archive(changed(entries, "data/0", size=1 << 30, packed=1 << 30)),
        "size-32-bits": archive(changed(entries, "data/0", size=MAX - 1, packed=MAX - 1)),
        "size-64-bits-missing": archive(changed(entries, "data/0", size=MAX, packed=MAX)),
        "size-2-63": archive(
            changed(entries, "data/0", size=MAX, packed=MAX, extra=zip64(1 << 63, 1 << 63))
        ),
        "size-all-bits": archive(
            changed(entries, "data/0", size=MAX, packed=MAX, extra=zip64((1 << 64) - 1, (1 << 64) - 1))
        ),
        "pickle-size-2-62": archive(
            changed(entries, "data.pkl", size=MAX, packed=MAX, extra=zip64(1 << 62, 1 << 62))
        ),
        "header-2-63": archive(changed(entries, "data/0", header=MAX, extra=zip64(1 << 63))),
        "header-all-bits": archive(changed(entries, "data/0", header=MAX, extra=zip64((1 << 64) - 1))),
        "header-beyond": archive(changed(entries, "data/0", header=1 << 20)),
        "header-into-content": archive(changed(entries, "data/0", header=first - 8)),
        "header-of-another": archive(changed(entries, "data/0", header=0)),
        "extra-cut": archive(changed(entries, "data/0", size=MAX, packed=MAX, extra=b"\x01\x00\xff\x00")),
        "no-prefix": archive(entries, prefix=""),
        "two-prefixes": archive([*entries[:-1], Entry(name="../other/version", content=b"3\n")], prefix="archive/")
        .replace(b"archive/../other/", b"brchive/../other/"),
        "no-utf8-name": plain.replace(b"archive/data/0", b"archive/data/\xff"),
        "no-pickle": archive(entries[1:]),
        "no-storage": archive([entry for entry in entries if entry.name != "data/0"]),
        "nothing": archive([]),
        "empty-pickle": archive(changed(entries, "data.pkl", content=b"")),
        "count-too-large": archive(entries, count=len(entries) + 1),
        "count-65535": archive(entries, count=0xFFFF),
        "count-too-small": archive(entries, count=2),
        "directory-beyond": archive(entries, directory_offset=1 << 30),
        "directory-too-long": archive(entries, directory_bytes=1 << 30),
        "directory-all-bits": archive(entries, directory_bytes=MAX, directory_offset=MAX),
        "directory-elsewhere": archive(entries, directory_offset=0),
        "end64-offset-2-63": _end64(entries, count=len(entries), size=300, offset=1 << 63),
        "end64-count-2-60": _end64(entries, count=1 << 60, size=300, offset=0),
        "end64-size-2-63": _end64(entries, count=len(entries), size=1 << 63, offset=0),
        "end64-at-2-63": _end64(entries, count=len(entries), size=300, offset=0, at=1 << 63),
        "end64-at-nothing": _end64(entries, count=len(entries), size=300, offset=0, at=0),
        "end-missing": plain[:-22],
        "end-cut": plain[:-1],
        "only-the-end": plain[-22:],
        "only-magic": b"PK\3\4",
        "zeros": bytes(len(plain)),
        "no-directory-signature": plain.replace(b"PK\1\2", b"PK\1\3"),
        "no-local-signature": plain.replace(b"PK\3\4", b"PK\3\5", 1),
    }  # fmt: skip


def test_unspoilt_archives_merge(tmp_path: Path, sandbox: Sandbox) -> None:
    for path in _write(tmp_path / "ckpt", archive(ONE), archive(WHOLE)):
        done = sandbox.run("merge", path, tmp_path / f"out-{path.name}")
        assert done.code == 0, done.err
        assert tensors(tmp_path / f"out-{path.name}") == {"w": ("F32", (2, 2), CONTENT)}


@pytest.mark.parametrize("name", _spoilt("one"))
def test_a_spoilt_archive_is_refused(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    for path, seen, merged in _both(
        sandbox, _write(tmp_path / "ckpt", _spoilt("one")[name], _spoilt("whole")[name]), tmp_path / "out"
    ):
        for outcome in (seen, merged):
            assert_harmless(outcome, tmp_path)
        assert_refused(merged, 3, 4)  # 3: so spoilt that nothing says what it once was
        assert merged.digest is None
        if path.name == "item":
            assert seen.code == 0  # items are read by a merge only
        else:
            assert seen.code in (3, 4), seen.err


IMPOSSIBLE: dict[str, Any] = {
    "storage-larger-than-record": tensor_value((2, 2), numel=5),
    "storage-2-62": tensor_value((2, 2), numel=1 << 62),
    "offset-beyond": tensor_value((2, 2), offset=1),
    "offset-2-62": tensor_value((2, 2), offset=1 << 62),
    "offset-negative": tensor_value((2, 2), offset=-1),
    "offset-text": tensor_value((2, 2), offset="0"),
    "offset-huge": tensor_value((2, 2), offset=1 << 40_000),
    "strides-beyond": tensor_value((2, 2), strides=(4, 1)),
    "strides-2-62": tensor_value((2, 2), strides=(1 << 62, 1 << 62)),
    "strides-negative": tensor_value((2, 2), strides=(-2, 1)),
    "strides-too-few": tensor_value((2, 2), strides=(1,)),
    "strides-too-many": tensor_value((2, 2), strides=(2, 1, 1)),
    "shape-2-62": tensor_value((1 << 62, 1 << 62), numel=4),
    "shape-negative": tensor_value((-2, -2), numel=4),
    "shape-float": tensor_value((2.0, 2.0), numel=4, strides=(2, 1)),
    "shape-bool": tensor_value((True, 4), numel=4, strides=(4, 1)),
    "shape-bomb": tensor_value((bomb(), 2), numel=4, strides=(2, 1)),
    "shape-nested": tensor_value((nested(100_000), 2), numel=4, strides=(2, 1)),
    "shape-huge": tensor_value((1 << 40_000, 1), numel=4, strides=(1, 1)),
    "strides-bomb": tensor_value((2, 2), strides=(bomb(), 1)),
    "key-elsewhere": tensor_value((2, 2), key="../../../../etc/passwd"),
    "key-of-the-pickle": tensor_value((2, 2), key="../data.pkl"),
    "key-missing": tensor_value((2, 2), key="7"),
    "key-bomb": tensor_value((2, 2), key=bomb()),
    "key-long": tensor_value((2, 2), key="k" * 1_000_000),
    "rank-100000": tensor_value((1,) * 100_000, numel=1, strides=(1 << 62,) * 100_000),
    "rank-100000-large": tensor_value((1 << 40,) * 100_000, numel=1, strides=(0,) * 100_000),
    "not-a-tensor": Ops(b"X\x01\x00\x00\x00x"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_tensor_is_refused(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    value = IMPOSSIBLE[name]
    outcomes = _both(
        sandbox, _write(tmp_path / "ckpt", saved(value, [CONTENT]), saved({"w": value}, [CONTENT])), tmp_path / "out"
    )
    for _, seen, merged in outcomes:
        for outcome in (seen, merged):
            assert_harmless(outcome, tmp_path)
        assert_refused(merged, 3, 4)  # 3: a state dict of a text holds no tensors
        assert merged.digest is None
        assert seen.code in (0, 4), seen.err


@pytest.mark.parametrize(
    "value",
    [tensor_value((4,)), tensor_value((4, 1)), tensor_value((2, 1)), tensor_value((2, 2), dtype="bfloat16")],
    ids=["flat", "other-shape", "smaller", "other-dtype"],
)
def test_an_item_that_is_not_what_the_metadata_say_is_refused(value: Any, tmp_path: Path, sandbox: Sandbox) -> None:
    path = _write(tmp_path / "ckpt", saved(value, [CONTENT]), saved({}, []))[0]
    (_, _, merged) = _both(sandbox, [path], tmp_path / "out")[0]
    assert_harmless(merged, tmp_path)
    assert_refused(merged, 4)
    assert "`w`" in merged.err
    assert merged.digest is None


def test_a_big_endian_archive_is_incompatible(tmp_path: Path, sandbox: Sandbox) -> None:
    one, whole = (archive(changed(entries, "byteorder", content=b"big")) for entries in (ONE, WHOLE))
    for _, _, merged in _both(sandbox, _write(tmp_path / "ckpt", one, whole), tmp_path / "out"):
        assert_harmless(merged, tmp_path)
        assert_refused(merged, 8)
        assert merged.digest is None


def _odd() -> dict[str, tuple[bytes, bytes]]:
    """Archives that a tolerant reader may take and a strict one may refuse."""
    result = {}
    changes: dict[str, dict[str, Any]] = {
        "another-local-name": {"local_name": "archive/data/9"},
        "local-name-longer": {"local_name": "archive/data/000000000"},
        "wrong-flags": {"flags": 8},
    }
    for name, change in changes.items():
        result[name] = tuple(archive(changed(entries, "data/0", **change)) for entries in (ONE, WHOLE))
    outside = Entry(name="../../../../../../tmp/evil", content=b"x")
    result["outside-name"] = tuple(archive([*entries, outside]) for entries in (ONE, WHOLE))
    result["comment"] = tuple(archive(entries, comment=b"hello") for entries in (ONE, WHOLE))
    result["comment-64k"] = tuple(archive(entries, comment=b"PK\5\6" * 16_000) for entries in (ONE, WHOLE))
    evil = saved(None, pickle=b"cposix\nsystem\nX\x01\x00\x00\x00x\x85R.")
    result["archive-in-the-comment"] = tuple(archive(entries, comment=evil) for entries in (ONE, WHOLE))
    result["shell-script"] = tuple(b"#!/bin/sh\n" + archive(entries) for entries in (ONE, WHOLE))
    deep = (2, 2) + (1,) * 70
    turned = tensor_value(deep, strides=(1, 2) + (1,) * 70)
    result["transposed-rank-72"] = (saved(turned, [CONTENT]), saved({"w": turned}, [CONTENT]))
    pickled_twice = dump(tensor_value((2, 2))) + b"cposix\nsystem\n."
    result["second-pickle-behind"] = (
        saved(None, [CONTENT], pickle=pickled_twice),
        saved(None, [CONTENT], pickle=dump({"w": tensor_value((2, 2))}) + b"cposix\nsystem\n."),
    )
    return result  # type: ignore[return-value]


@pytest.mark.parametrize("name", _odd())
def test_an_odd_archive_is_refused_or_read_right(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    one, whole = _odd()[name]
    for path in _write(tmp_path / "ckpt", one, whole):
        out = tmp_path / f"out-{path.name}"
        outcome = sandbox.run("merge", path, out)
        assert_harmless(outcome, tmp_path)
        if outcome.code:
            assert_refused(outcome, 3, 4, 8)
            assert not out.exists()
        else:
            (_, shape, content) = tensors(out)["w"]
            turned = struct.pack("<4I", 0, 2, 1, 3)
            assert content == (turned if "transposed" in name else CONTENT)
            assert len(shape) == (72 if "transposed" in name else 2)
