"""One checkpoint in the folders of several nodes, which had disks of their own when they saved."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt import inspect, merge, open_checkpoint
from fsdp_ckpt.errors import Incompatible, IncompleteCheckpoint
from tests.cli.tool import (
    ACCELERATE,
    DCP,
    EXPECTED,
    FIXTURES,
    assert_refused,
    flip,
    run,
    snapshot,
    strict_json,
    tensors,
)

NEWEST = FIXTURES / "torch-2.13.0"
JUDGES = ("expected*", "layout.json")
RANK = re.compile(r"(?:__|rank_?|random_states_)(\d+)(?:_\d+\.distcp|\.\w+)")


def split(source: Path, places: Sequence[Path]) -> None:
    """Give each place the files of some ranks, in turn, and all files that are of no rank."""
    for number, place in enumerate(places):
        shutil.copytree(source, place, ignore=shutil.ignore_patterns(*JUDGES))
        for file in place.rglob("*"):
            match = RANK.fullmatch(file.name) or re.fullmatch(r".*?rank_?(\d+)\.\w+", file.name)
            if match and int(match[1]) % len(places) != number:
                file.unlink()


def whole(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*JUDGES)))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def with_manifest(folder: Path, *, save_id: str = "abc", step: int = 10) -> Path:
    """Write the manifest of a save by two ranks, as docs/layouts.md describes it, from the files that are there."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}"}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    fields: dict[str, Any] = {name: [] for name in ("models", "optimizers", "schedulers", "dataloaders", "objects")}
    fields |= {"format": "fsdp-ckpt/checkpoint/1", "save_id": save_id, "step": step, "world_size": 2, "files": files}
    fields |= {"state_dict_type": "SHARDED_STATE_DICT", "created": f"2026-01-01T00:00:{step}Z", "versions": {}}
    (folder / "fsdp_ckpt.json").write_text(json.dumps(fields | {"has_rng": False, "values": {}}, indent=1) + "\n")
    return folder


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, Path]:
    """An Accelerate folder of two ranks, one on each node."""
    places = tmp_path / "nodeA" / "ckpt", tmp_path / "nodeB" / "ckpt"
    source = whole(ACCELERATE, tmp_path / "ckpt")
    (source / "scheduler.bin").write_bytes(b"PK scheduler")
    split(with_manifest(source), places)
    return places


LAYOUTS = {
    "dcp": (DCP, 2),
    "accelerate": (ACCELERATE, 2),
    "three-ranks": (NEWEST / "fsdp2_sharded_w3", 3),
    "tensor-parallel": (NEWEST / "tp_fsdp_w4/pytorch_model_fsdp_0", 3),
    "hybrid": (NEWEST / "fsdp1_hybrid_w4", 2),
    "torch-2.1": (FIXTURES / "torch-2.1.2/fsdp1_sharded_w2", 2),
    "own-metadata": (NEWEST / "dcp_nocollectives_w2/dcp", 2),
    "zstd": (NEWEST / "dcp_zstd_w2/dcp", 2),
    "safetensors": (NEWEST / "dcp_safetensors_w2/dcp", 2),
    "many-files": (NEWEST / "dcp_threads_w2/dcp", 2),
    "titan": (FIXTURES / "torch-2.5.1/titan_w2/step-10", 2),
    "rank-files": (NEWEST / "rank_files_fsdp2_w2", 2),
    "rank-files-fsdp1": (NEWEST / "rank_files_fsdp1_w2", 2),
    "rank-files-accelerate": (NEWEST / "rank_files_accelerate_w2", 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_merge_is_that_of_the_whole_in_every_byte(name: str, tmp_path: Path) -> None:
    source, number = LAYOUTS[name]
    places = [tmp_path / f"node{n}" / source.name for n in range(number)]
    split(source, places)
    assert all(len(list(place.rglob("*"))) < len(list(source.rglob("*"))) for place in places)
    one = whole(source, tmp_path / "whole" / source.name)
    judge = run("merge", one, tmp_path / "judge", "--no-fsync")
    assert judge.code == 0, judge.err
    for order in (places, places[::-1]):
        out = tmp_path / f"out-{order[0].parent.name}"
        before = [snapshot(place) for place in places]
        done = run("merge", *order, out, "--no-fsync")
        assert done.code == 0, done.err
        assert contents(out) == contents(tmp_path / "judge")
        assert [snapshot(place) for place in places] == before
    expected = next(path for path in (source / "expected.safetensors", source.parent / "expected.safetensors",
                                      source.parent.parent / "expected.safetensors") if path.exists())  # fmt: skip
    found, right = tensors(tmp_path / "judge"), tensors(expected)
    assert found == {key: right[key] for key in found}
    assert found

    seen, alone = (strict_json(run("inspect", *paths, "--json").out) for paths in (places, [one]))
    assert (seen["path"], seen["other_paths"]) == (str(places[0]), [str(place) for place in places[1:]])
    assert (seen["root"], seen["other_roots"]) == (seen["path"], seen["other_paths"])
    assert seen["complete"] is True
    differs = ("path", "root", "other_paths", "other_roots")
    assert {k: v for k, v in seen.items() if k not in differs} == {k: v for k, v in alone.items() if k not in differs}


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "hybrid"])
def test_a_folder_alone_says_whose_files_are_elsewhere(name: str, tmp_path: Path) -> None:
    source, number = LAYOUTS[name]
    places = [tmp_path / f"node{n}" / source.name for n in range(number)]
    split(source, places)
    seen = run("inspect", places[0])
    assert seen.code == 4
    assert "INCOMPLETE" in seen.out
    assert re.search(r"nothing of (some ranks|ranks? 1\b.*) is here: .*, give the folders of all nodes\n", seen.out), (
        seen.out
    )
    command = f"fsdp-ckpt inspect {places[0]} ANOTHER_NODE/{source.name}"
    assert f"next: {command}\n" in seen.out
    refused = run("merge", places[0], tmp_path / "out")
    assert_refused(refused, 4)
    assert re.search(r"nothing of some ranks" if name == "own-metadata" else r"nothing of ranks? 1\b", refused.err)
    assert refused.hint == f"fsdp-ckpt merge {places[0]} ANOTHER_NODE/{source.name} {tmp_path / 'out'}"
    assert not (tmp_path / "out").exists()


def test_missing_files_are_named_with_their_ranks(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    refused = run("merge", nodes[0], tmp_path / "out")
    assert "`pytorch_model_fsdp_0/__1_0.distcp`: listed in the metadata, but not there (of rank 1)" in refused.err
    seen = run("inspect", nodes[1])
    for file in ("pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/__0_0.distcp"):
        assert f"{file}: listed in the manifest, but not there (of rank 0)" in seen.out
        assert f"{file}: listed in the metadata, but not there (of rank 0)" in seen.out
    assert seen.out.count("ranks-elsewhere") == 1


def test_a_file_on_no_node_is_missing(tmp_path: Path) -> None:
    source = NEWEST / "tp_fsdp_w4/pytorch_model_fsdp_0"
    places = [tmp_path / node / "part" for node in "ABCD"]
    split(source, places)
    refused = run("merge", *places[:3], tmp_path / "out")
    assert_refused(refused, 4)
    assert "`__3_0.distcp`: listed in the metadata, but not there (of rank 3)" in refused.err
    assert "nothing of rank 3 is in these 3 folders: add the folders of their nodes" in refused.err
    assert refused.hint == "fsdp-ckpt merge " + " ".join(map(str, [*places[:3], "ANOTHER_NODE/part", tmp_path / "out"]))
    assert run("merge", *places, tmp_path / "out").code == 0


def test_metadata_on_one_node_are_enough(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    # As torch writes it without a shared file system (accelerate#3010).
    (nodes[1] / "fsdp_ckpt.json").unlink()
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        (nodes[1] / part / ".metadata").unlink()
    alone = run("inspect", nodes[1])
    assert "no .metadata: a save was cut off, or it is on another node" in alone.out
    for order in (nodes, nodes[::-1]):
        assert run("merge", *order, tmp_path / "out", "--overwrite").code == 0
        assert tensors(tmp_path / "out") == tensors(EXPECTED)


def test_parts_run_folders_and_python(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    parts = [node / "pytorch_model_fsdp_0" for node in nodes]
    assert run("merge", *parts, tmp_path / "parts").code == 0
    for number, node in enumerate(nodes):
        shutil.copytree(node, node.parent / "run" / "step-10")
        if not number:  # the save of the other node has not begun
            shutil.copytree(node, node.parent / "run" / "step-20")
    runs = [node.parent / "run" for node in nodes]
    done = run("merge", *runs, tmp_path / "runs")
    assert done.code == 0, done.err
    assert "step-20 (incomplete)" in done.err
    report = merge(runs, tmp_path / "python")
    assert (report.source, report.other_sources) == (str(runs[0]), (str(runs[1]),))
    assert inspect(nodes).complete
    for out in ("parts", "runs", "python"):
        assert tensors(tmp_path / out) == tensors(EXPECTED)
    with open_checkpoint(list(nodes)) as view:
        right = tensors(EXPECTED)
        assert {name: view.get_tensor(name).tobytes() for name in view} == {name: right[name][2] for name in right}


def test_tied_weights_are_compared_across_nodes(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    done = run("merge", *nodes, tmp_path / "out", "--tie")
    assert done.code == 0, done.err
    right = tensors(EXPECTED)
    assert right.pop("lm_head.weight") == right["embed.weight"]  # half of each is on either node
    assert tensors(tmp_path / "out") == right


def test_one_folder_given_twice_is_one(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(nodes[0])
    assert inspect([nodes[0], tmp_path / "link"]).other_roots == []
    assert run("merge", nodes[0], tmp_path / "link", nodes[1], nodes[1], tmp_path / "out").code == 0
    assert tensors(tmp_path / "out") == tensors(EXPECTED)


def _other_save(nodes: tuple[Path, Path]) -> None:
    path = nodes[1] / "fsdp_ckpt.json"
    text = path.read_text()
    path.write_text(text.replace('"save_id": "abc"', '"save_id": "xyz"').replace('"step": 10', '"step": 20'))


def _append(file: str, data: bytes = b"x") -> Callable[[tuple[Path, Path]], None]:
    def change(nodes: tuple[Path, Path]) -> None:
        with open(nodes[1] / file, "ab") as opened:
            opened.write(data)

    return change


def _copy(file: str, change: Callable[[bytes], bytes]) -> Callable[[tuple[Path, Path]], None]:
    def copy(nodes: tuple[Path, Path]) -> None:
        (nodes[1] / file).write_bytes(change((nodes[0] / file).read_bytes()))

    return copy


DATA = "pytorch_model_fsdp_0/__0_0.distcp"
DIFFERENT = {
    "manifest": (_other_save, "step 10 of 2026-01-01T00:00:10Z and step 20 of 2026-01-01T00:00:10Z, by their fsdp_"),
    "manifest-by-a-byte": (_append("fsdp_ckpt.json", b"\n"), "their fsdp_ckpt.json differ"),
    "metadata": (_append("pytorch_model_fsdp_0/.metadata"), "pytorch_model_fsdp_0/.metadata has"),
    "metadata-of-the-optimizer": (
        _copy("optimizer_0/.metadata", lambda data: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]),
        "their optimizer_0/.metadata differ",
    ),
    "scheduler": (_copy("scheduler.bin", lambda data: data.replace(b"P", b"Q")), "their scheduler.bin differ"),
    "size": (_copy(DATA, lambda data: data + b"x"), f"{DATA} has "),
    "cut": (_copy(DATA, lambda data: data[:-1]), f"{DATA} has "),
    "content": (_copy(DATA, lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:]), f"their {DATA} differ"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_folders_of_different_saves_are_refused(name: str, nodes: tuple[Path, Path], tmp_path: Path) -> None:
    change, text = DIFFERENT[name]
    assert run("inspect", *nodes).code == 0
    change(nodes)
    before = snapshot(tmp_path)
    for order in (nodes, nodes[::-1]):
        refused = run("merge", *order, tmp_path / "out")
        assert_refused(refused, 8)
        assert f"`{order[0]}` and `{order[1]}` are not of one save: " in refused.err
        assert refused.hint == f"fsdp-ckpt inspect {order[0]}; fsdp-ckpt inspect {order[1]}"
        assert_refused(run("inspect", *order), 8)
    assert text in run("merge", *nodes, tmp_path / "out").err
    assert snapshot(tmp_path) == before


def test_equal_metadata_of_another_save_are_told_by_the_manifest_above(nodes: tuple[Path, Path]) -> None:
    _other_save(nodes)
    parts = [node / "pytorch_model_fsdp_0" for node in nodes]
    assert (parts[0] / ".metadata").read_bytes() == (parts[1] / ".metadata").read_bytes()
    with pytest.raises(Incompatible, match=r"not of one save: step 10 .* and step 20 "):
        inspect(parts)


def test_copies_that_are_the_same_do_no_harm(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    _copy(DATA, lambda data: data)(nodes)
    assert run("merge", *nodes, tmp_path / "out", "--remove-source").code == 0
    assert tensors(tmp_path / "out") == tensors(EXPECTED)


def test_what_nobody_reads_may_differ(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    for number, node in enumerate(nodes):
        (node / "training_args.bin").write_bytes(b"PK %d" % number)  # with the place of the process in it
        (node / "dl_state_dict.bin").write_bytes(b"PK %d" % number)  # with the position of a rank
        (node / "hostname.txt").write_text(f"node{number}\n")
        state = {"global_step": 10, "is_world_process_zero": not number, "is_local_process_zero": True}
        (node / "trainer_state.json").write_text(json.dumps(state))
    assert inspect(nodes).step == 10
    (nodes[1] / "trainer_state.json").write_text('{"global_step": 11}')
    assert_refused(run("merge", *nodes, tmp_path / "out"), 8)


def test_remove_source_removes_all_of_them(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    done = run("merge", *nodes, tmp_path / "out", "--remove-source")
    assert done.code == 0, done.err
    assert f"removed: {nodes[0]}, {nodes[1]}" in done.out
    assert tensors(tmp_path / "out") == tensors(EXPECTED)
    for node in nodes:  # everything else stays
        assert sorted(path.name for path in node.iterdir()) == ["fsdp_ckpt.json", "optimizer_0", "scheduler.bin"]


def test_rank_files_are_removed_on_all_nodes(tmp_path: Path) -> None:
    places = [tmp_path / node / "ckpt" for node in "AB"]
    split(NEWEST / "rank_files_accelerate_w2", places)
    (places[1] / "kept").touch()
    assert run("merge", *places, tmp_path / "out", "--remove-source").code == 0
    assert [sorted(path.name for path in place.rglob("*")) for place in places] == [[], ["kept"]]
    assert tensors(tmp_path / "out") == tensors(NEWEST / "rank_files_accelerate_w2/expected.safetensors")


@pytest.mark.parametrize("number", [0, 1])
def test_a_destination_in_one_of_the_sources_is_refused(number: int, nodes: tuple[Path, Path]) -> None:
    assert_refused(run("merge", *nodes, nodes[number]), 2)
    assert_refused(run("merge", *nodes, nodes[number].parent), 2)
    inside = nodes[number] / "pytorch_model_fsdp_0" / "out"
    assert_refused(run("merge", *nodes, inside, "--remove-source"), 2)
    assert not inside.exists()


def test_hints_name_all_sources(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").touch()
    refused = run("merge", *nodes, tmp_path / "out")
    assert_refused(refused, 5)
    assert refused.hint is not None
    assert refused.hint.startswith(f"fsdp-ckpt merge {nodes[0]} {nodes[1]} {tmp_path / 'out'} --overwrite")


def test_side_files_of_any_node_are_taken_along(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    (nodes[1] / "config.json").write_text('{"model_type": "llama"}')
    (nodes[0].parent / "tokenizer.json").write_text("far")
    assert run("merge", *nodes, tmp_path / "out").code == 0
    assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "llama"}'


MISTAKES: dict[str, tuple[int, str, Callable[[Path, Path], list[Path]]]] = {
    "empty": (3, "is empty", lambda a, b: [a, b, a.parent / "empty"]),
    "missing": (3, "does not exist", lambda a, b: [a, b.parent / "nothing"]),
    "file": (2, "is a file: several sources are the folders", lambda a, b: [a, b / DATA.replace("0_0", "1_0")]),
    "levels": (2, "is one part of a checkpoint", lambda a, b: [a, b / "pytorch_model_fsdp_0"]),
    "levels-again": (2, "is one part of a checkpoint", lambda a, b: [a / "pytorch_model_fsdp_0", b]),
    "scheme": (2, "scheme `xyz`", lambda a, _: [a, Path("xyz://bucket/ckpt")]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, nodes: tuple[Path, Path], tmp_path: Path) -> None:
    code, text, make = MISTAKES[name]
    (nodes[0].parent / "empty").mkdir()
    sources = [str(path).replace("xyz:/b", "xyz://b") for path in make(*nodes)]
    refused = run("merge", *sources, tmp_path / "out")
    assert_refused(refused, code)
    assert text in refused.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["outside", "nodeA/ckpt"])
def test_a_link_out_of_the_second_folder_is_refused(target: str, nodes: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(ACCELERATE, tmp_path / "outside")
    link = nodes[1] / "pytorch_model_fsdp_0" / "__1_0.distcp"
    secret = tmp_path / target / "pytorch_model_fsdp_0" / "secret"
    link.rename(secret)  # the right content, but not where it may be read from
    link.symlink_to(secret)
    with pytest.raises(Exception, match="a link out of the checkpoint; nothing was read"):
        inspect(nodes)
    refused = run("merge", *nodes, tmp_path / "out")
    assert_refused(refused, 4)
    assert "a link out of the checkpoint; nothing was read" in refused.err
    assert not (tmp_path / "out").exists()


def test_a_damaged_shard_of_the_second_folder_is_found(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    flip(nodes[1] / "pytorch_model_fsdp_0" / "__1_0.distcp")
    assert_refused(run("merge", *nodes, tmp_path / "out"), 4)
    assert not (tmp_path / "out").exists()


def test_the_message_in_python(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpoint, match=r"not there \(of rank 1\); nothing of rank 1 is here") as caught:
        merge(nodes[0], tmp_path / "out")
    assert caught.value.hint == f"fsdp-ckpt merge {nodes[0]} ANOTHER_NODE/ckpt {tmp_path / 'out'}"
