"""Names in metadata that lead out of the checkpoint, and files that are no files."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.tool import assert_refused, run, snapshot, tensors
from tests.hostile.forge_dcp import Forged, index, place, tensor_metadata
from tests.hostile.forge_zip import saved, tensor_value
from tests.hostile.places import assert_harmless
from tests.hostile.sandbox import Case, Sandbox

SECRET = bytes(range(100, 116))


def _checkpoint(folder: Path, relative_path: str) -> Path:
    """A checkpoint whose one tensor is said to lie in a file of this name; a file of that content lies outside."""
    item = saved(tensor_value((2, 2)), [SECRET])
    outside = folder.parent / "outside"
    outside.mkdir(parents=True)
    (outside / "__0_0.distcp").write_bytes(item)
    forged = Forged()
    forged.items["w"] = tensor_metadata((2, 2), [((0, 0), (2, 2))])
    forged.storage.append((index("w", (0, 0)), place(relative_path, 0, len(item))))
    return forged.write(folder)


def _refused(sandbox: Sandbox, path: Path, out: Path, outside: Path, *, harmless: bool = False) -> None:
    """Check that a merge is refused, and that inspect says that something is wrong, unless the name is harmless."""
    cases = [
        Case(argv=["inspect", str(path)], direct=True),
        Case(argv=["merge", str(path), str(out), "--no-fsync"], out=str(out), direct=True),
    ]
    seen, merged = sandbox.many(cases, timeout_s=20)
    for outcome in (seen, merged):
        assert_harmless(outcome, path if path.is_dir() else path.parent, out.parent / "out", out.parent / ".out")
        assert not [name for name in outcome.opened if name.startswith(str(outside))]
    assert seen.code in (0, 3, 4), seen.err
    if seen.code == 0 and not harmless:
        assert "INCOMPLETE" in seen.out
    assert_refused(merged, 3, 4)
    assert merged.digest is None


NAMES = {
    "parent": "../outside/__0_0.distcp",
    "parent-inside": "sub/../../outside/__0_0.distcp",
    "dot-parent": "./../outside/__0_0.distcp",
    "double-slash": "..//outside/__0_0.distcp",
    "absolute": "{outside}/__0_0.distcp",
    "absolute-twice": "//{outside}/__0_0.distcp",
    "passwd": "/etc/passwd",
    "device": "/dev/zero",
    "proc": "/proc/self/environ",
    "url": "file://{outside}/__0_0.distcp",
    "home": "~/outside/__0_0.distcp",
    "percent": "%2e%2e/outside/__0_0.distcp",
    "backslash": "..\\outside\\__0_0.distcp",
    "nul": "a\0b",
    "nul-behind": "../outside/__0_0.distcp\0",
    "empty": "",
    "dot": ".",
    "dots": "..",
    "slash": "/",
    "newline": "x\ny",
    "escape": "\x1b[31mred",
    "long": "n" * 5_000,
    "long-path": "n/" * 5_000,
    "surrogate": "\ud800",
    "metadata": ".metadata",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_out_is_refused(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    outside = tmp_path / "outside"
    path = _checkpoint(tmp_path / "ckpt", NAMES[name].format(outside=outside))
    _refused(sandbox, path, tmp_path / "out", outside, harmless=name == "metadata")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


def _device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("making a device node needs root")


KINDS: dict[str, Callable[[Path], None]] = {
    "link-out": lambda path: path.symlink_to("../outside/__0_0.distcp"),
    "link-absolute": lambda path: path.symlink_to(path.parents[1] / "outside/__0_0.distcp"),
    "link-to-passwd": lambda path: path.symlink_to("/etc/passwd"),
    "link-to-zero": lambda path: path.symlink_to("/dev/zero"),
    "link-to-itself": lambda path: path.symlink_to(path.name),
    "link-to-nothing": lambda path: path.symlink_to("nothing"),
    "folder": lambda path: path.mkdir(),
    "fifo": _fifo,
    "socket": _socket,
    "device": _device,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "pytorch_model.bin", "model.safetensors"])
def test_what_is_no_regular_file_inside_is_refused(file: str, kind: str, tmp_path: Path, sandbox: Sandbox) -> None:
    outside = tmp_path / "outside"
    path = _checkpoint(tmp_path / "ckpt", "__0_0.distcp")
    if "distcp" not in file and file != ".metadata":
        (path / ".metadata").unlink()
        (outside / "__0_0.distcp").write_bytes(saved({"w": tensor_value((2, 2))}, [SECRET]))
    (path / file).unlink(missing_ok=True)
    KINDS[kind](path / file)
    _refused(sandbox, path, tmp_path / "out", outside)
    _refused(sandbox, path / file, tmp_path / "out", outside)


def test_a_folder_that_is_a_link_out_is_refused(tmp_path: Path, sandbox: Sandbox) -> None:
    path = _checkpoint(tmp_path / "ckpt", "link/__0_0.distcp")
    (path / "link").symlink_to("../outside")
    _refused(sandbox, path, tmp_path / "out", tmp_path / "outside")


def test_links_within_a_checkpoint_and_to_it_are_followed(tmp_path: Path, sandbox: Sandbox) -> None:
    path = _checkpoint(tmp_path / "ckpt", "__0_0.distcp")
    shutil.copy(tmp_path / "outside/__0_0.distcp", path / "blob")
    (path / "__0_0.distcp").symlink_to("blob")
    (tmp_path / "latest").symlink_to("ckpt")
    outcome = sandbox.run("merge", tmp_path / "latest", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert tensors(tmp_path / "out")["w"][2] == SECRET


INDEXES = {
    "parent": {"weight_map": {"w": "../outside/model.safetensors"}},
    "absolute": {"weight_map": {"w": "{outside}/model.safetensors"}},
    "folder": {"weight_map": {"w": "sub/model.safetensors"}},
    "nul": {"weight_map": {"w": "a\0b"}},
    "number": {"weight_map": {"w": 7}},
    "long": {"weight_map": {"w": "n" * 100_000}},
    "surrogate": {"weight_map": {"w": "\ud800"}},
    "name-surrogate": {"weight_map": {"\ud800": "model.safetensors"}},
    "another-tensor": {"weight_map": {"v": "model-00001-of-00001.safetensors"}},
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_names_other_files_is_refused(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}).encode()
    content = len(header).to_bytes(8, "little") + header + SECRET
    for folder in ("outside", "ckpt", "ckpt/sub"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(content)
    path = tmp_path / "ckpt"
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    text = json.dumps(INDEXES[name]).replace("{outside}", str(tmp_path / "outside"))
    (path / "model.safetensors.index.json").write_text(text)
    _refused(sandbox, path, tmp_path / "out", tmp_path / "outside")


def test_a_folder_within_itself_comes_to_an_end(tmp_path: Path, sandbox: Sandbox) -> None:
    for inner in ("model", "sharded", "checkpoint-5"):
        path = tmp_path / inner
        (path / "optimizer_0").mkdir(parents=True)
        (path / inner).symlink_to(".")
        for argv in (["inspect", path], ["merge", path, tmp_path / "out"]):
            outcome = sandbox.run(*argv, timeout_s=20)
            assert_harmless(outcome, tmp_path)
            assert outcome.code in ((3, 4) if argv[0] == "merge" else (0, 3, 4)), outcome.err


def test_side_files_are_not_fetched_through_links_that_lead_out(tmp_path: Path, sandbox: Sandbox) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"token": "hf_secret"}')
    path = _checkpoint(tmp_path / "ckpt", "__0_0.distcp")
    shutil.copy(tmp_path / "outside/__0_0.distcp", path)
    for name in ("tokenizer.json", "vocab.txt", "chat_template.jinja"):
        (path / name).symlink_to(secret)
    outcome = sandbox.run("merge", path, tmp_path / "out")
    assert outcome.code == 0, outcome.err
    copied = [file.name for file in (tmp_path / "out").iterdir() if b"hf_secret" in file.read_bytes()]
    assert copied == []


def test_a_greedy_config_is_left_alone(tmp_path: Path, sandbox: Sandbox) -> None:
    path = _checkpoint(tmp_path / "ckpt", "__0_0.distcp")
    shutil.copy(tmp_path / "outside/__0_0.distcp", path)
    (path / "config.json").write_text('{"model_type": [' + "[]," * 6_000_000 + "[]]}")
    outcome = sandbox.run("merge", path, tmp_path / "out", timeout_s=60)
    assert_harmless(outcome, tmp_path)
    assert outcome.code == 0, outcome.err
    assert tensors(tmp_path / "out")["w"][2] == SECRET


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{", '{"a":' * 50_000, "9" * 100_000, '{"global_step": 1e999}', "\ud800"]
)
def test_broken_side_files_do_no_harm(text: str, tmp_path: Path, sandbox: Sandbox) -> None:
    path = _checkpoint(tmp_path / "ckpt", "__0_0.distcp")
    shutil.copy(tmp_path / "outside/__0_0.distcp", path)
    for name in ("config.json", "trainer_state.json", "generation_config.json"):
        (path / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    for argv in (["inspect", path], ["inspect", path, "--json"], ["merge", path, tmp_path / "out"]):
        outcome = sandbox.run(*argv)
        assert_harmless(outcome, tmp_path)
        assert outcome.code == 0, outcome.err
    assert tensors(tmp_path / "out")["w"][2] == SECRET


def test_a_planted_link_does_not_divert_what_is_written(tmp_path: Path) -> None:
    """The hidden folder's name can be guessed; a link of that name must not be written through."""
    path = _checkpoint(tmp_path / "ckpt", "__0_0.distcp")
    shutil.copy(tmp_path / "outside/__0_0.distcp", path)
    work, victim = tmp_path / "work", tmp_path / "victim"
    work.mkdir()
    victim.mkdir()
    (victim / "diary.txt").write_text("mine")
    assert run("merge", path, work / "out", "--part", "1/2").code == 0  # leaves the hidden folder for share 2
    (hidden,) = [entry for entry in work.iterdir() if entry.name.startswith(".")]
    shutil.rmtree(hidden)
    hidden.symlink_to(victim)
    before = snapshot(victim)
    result = run("merge", path, work / "out")
    assert snapshot(victim) == before
    if result.code:
        assert_refused(result, 5)
        assert not (work / "out").exists()
    else:
        assert not (work / "out").is_symlink()
        assert tensors(work / "out")["w"][2] == SECRET
