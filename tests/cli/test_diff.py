"""``diff``: a verdict and an exit code for scripts, a table for people, JSON for programs."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.build import rows, save_dcp
from tests.cli.test_help import HEAVY
from tests.cli.tool import (
    ACCELERATE,
    DCP,
    EXPECTED,
    FIXTURES,
    TOOL,
    assert_refused,
    environment,
    flip,
    run,
    snapshot,
    strict_json,
)
from tests.hostile.attacks import code_attacks

OTHER = FIXTURES / "torch-2.13.0/fsdp2_sharded_w3/pytorch_model_fsdp_0"
INDEXED = FIXTURES / "torch-2.13.0/rank_files_fsdp2_w2"


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """What is in ``DCP``, with one element of ``layers.0.up.weight`` changed, and one tensor in another dtype."""
    tensors = load_file(EXPECTED)
    tensors["layers.0.up.weight"][3, 7] += 0.5
    tensors["layers.1.norm.bias"] = tensors["layers.1.norm.bias"].double()
    save_file(tensors, tmp_path / "changed.safetensors")
    return tmp_path / "changed.safetensors"


@pytest.fixture
def training(tmp_path: Path) -> tuple[Path, Path]:
    """Two steps of a training run of many layers, of other numbers of ranks."""
    paths = tmp_path / "step-10", tmp_path / "step-20"
    for path, ranks in zip(paths, (2, 3), strict=True):
        step = int(path.name[5:])
        model = {f"layers.{i}.weight": torch.arange(12.0).reshape(4, 3) * (1 + i) + step / 100 for i in range(60)}
        letters = str.maketrans("01", "ab")
        model |= {f"odd.{f'{i:06b}'.translate(letters)}": torch.full((2,), float(step)) for i in range(50)}
        state = {key: {"step": torch.tensor(float(step))} for key in model}
        groups = [{"lr": 1 / step, "params": list(model)}]
        content = {
            "model": {key: rows(value, ranks) for key, value in model.items()},
            "optimizer": {"state": state, "param_groups": groups},
            "scheduler": {"last_epoch": step},
        }
        save_dcp(path, content, ranks=ranks)
    return paths


def test_equal_checkpoints_of_other_numbers_of_ranks() -> None:
    before = snapshot(DCP)
    result = run("diff", DCP, OTHER)
    assert (result.code, result.err) == (0, "")
    verdict, a, b = result.out.splitlines()
    assert verdict == "equal by recorded checksums: 16 tensors, 5.79 kB; bytes were not read, --full reads them"
    assert a == f"  A  {DCP}  [distributed checkpoint (DCP), 2 ranks]"
    assert b == f"  B  {OTHER}  [distributed checkpoint (DCP), 3 ranks]"
    assert run("diff", DCP, OTHER, "--full").out.splitlines()[0] == "equal: 16 tensors, 5.79 kB; 11.6 kB read"
    assert snapshot(DCP) == before


def test_a_checkpoint_and_what_was_merged_from_it(training: tuple[Path, Path], tmp_path: Path) -> None:
    assert run("merge", training[0], tmp_path / "merged", "-q").code == 0
    result = run("diff", training[0], tmp_path / "merged")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("equal: 110 tensors, ")
    assert "not compared, as B holds models only: optimizer, scheduler of A; to insist, name them: " in result.out
    assert result.out.endswith(" --part optimizer\n")
    insisted = run("diff", training[0], tmp_path / "merged", "--part", "optimizer")
    assert (insisted.code, "only in A: optimizer\n" in insisted.out) == (1, True)


def test_one_changed_element(changed: Path) -> None:
    old = float(load_file(EXPECTED)["layers.0.up.weight"][3, 7])
    result = run("diff", DCP, changed)
    assert (result.code, result.err) == (1, "")
    lines = result.out.splitlines()
    assert lines[0] == "different: 2 tensors; 14 of 16 tensors equal"
    assert "pytorch_model_fsdp_0 | changed: 1 changed, 1 of another dtype, 14 equal" in lines
    (row,) = [line for line in lines if line.startswith("layers.0.up.weight ")]
    assert row.split()[:5] == ["layers.0.up.weight", "1", "of", "192", "0.5"]
    assert f"largest at layers.0.up.weight[3, 7]: {old:.3g} -> {old + 0.5:.3g}" in lines
    assert "layers.1.norm.bias: float32 -> float64, same values" in lines


def test_quiet_says_one_line_or_none(changed: Path) -> None:
    result = run("diff", DCP, changed, "-q")
    assert (result.code, result.out, result.err) == (1, f"{DCP} and {changed} differ\n", "")
    result = run("diff", DCP, OTHER, "-q")
    assert (result.code, result.out, result.err) == (0, "", "")


def test_names_for_scripts(changed: Path, training: tuple[Path, Path]) -> None:
    result = run("diff", DCP, changed, "--name-only")
    assert result.code == 1
    assert result.out == "pytorch_model_fsdp_0\tlayers.0.up.weight\npytorch_model_fsdp_0\tlayers.1.norm.bias\n"
    names = run("diff", *training, "--name-only").out.splitlines()
    assert len(names) == 110 + 110 + 2, "tensors, steps of the optimizer, lr and last_epoch"
    assert names[-2:] == ["optimizer\tparam_groups.0.lr", "scheduler\tlast_epoch"]
    shutil.rmtree(training[1])
    save_dcp(training[1], {"model": {"w": torch.zeros(1)}})
    assert run("diff", *training, "--name-only", "--part", "model").out.count("\n") == 111
    options = ["--part", "model", "--part", "optimizer", "--part", "scheduler"]
    assert run("diff", *training, "--name-only", *options).out.splitlines()[-2:] == ["optimizer", "scheduler"]


def test_json_is_the_same_report_in_exact_numbers(changed: Path) -> None:
    tensors = load_file(EXPECTED)
    result = run("diff", DCP, changed, "--json")
    assert (result.code, result.err) == (1, "")
    report = strict_json(result.out)
    assert report["schema"] == "fsdp-ckpt/diff/1"
    assert (report["a"], report["b"], report["is_equal"]) == (str(DCP), str(changed), False)
    assert (report["num_tensors"], report["num_equal"], report["num_settled"]) == (16, 14, 0)
    (part,) = report["parts"]
    assert (part["part_a"], part["part_b"], part["role"]) == ("pytorch_model_fsdp_0", "changed", "model")
    found = {tensor["name"]: tensor for tensor in part["tensors"]}
    assert set(found) == {"layers.0.up.weight", "layers.1.norm.bias"}
    weight = tensors["layers.0.up.weight"].double()
    stats = found["layers.0.up.weight"]["stats"]
    new = float((tensors["layers.0.up.weight"][3, 7] + 0.5).double())
    apart = new - float(weight[3, 7])
    assert stats["num_changed"] == 1
    assert stats["share_changed"] == 1 / 192
    assert stats["max_abs"] == apart
    assert stats["relative_l2"] == pytest.approx(apart / float(weight.norm()), rel=1e-12)
    assert (stats["largest_at"], stats["largest_a"], stats["largest_b"]) == ([3, 7], float(weight[3, 7]), new)
    bias = found["layers.1.norm.bias"]
    assert (bias["change"], bias["dtype_a"], bias["dtype_b"], bias["cast"]) == ("retyped", "float32", "float64", "both")


def test_what_json_cannot_hold_becomes_text(tmp_path: Path) -> None:
    for name, value in (("a", 1.5e308), ("b", -1.5e308)):
        other = torch.tensor([1.0 if name == "a" else float("nan")])
        tensors = {"w": torch.tensor([value], dtype=torch.float64), "v": other}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    report = strict_json(run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json").out)
    found = {tensor["name"]: tensor["stats"] for tensor in report["parts"][0]["tensors"]}
    assert found["w"]["max_abs"] == "inf"
    assert found["v"]["largest_b"] == "nan"
    text = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors").out
    assert "v: 1 -> nan\n" in text


def test_tolerance(changed: Path) -> None:
    for options, code in ((["--tolerance", "0.51"], 0), (["--tolerance", "0.4"], 1), (["--rtol", "1e9"], 0)):
        result = run("diff", DCP, changed, *options)
        assert result.code == code, result.out
        assert run("diff", DCP, changed, *options, "-q").code == code
    verdict = run("diff", DCP, changed, "--rtol", "1e9").out.splitlines()[0]
    assert verdict.startswith("equal: 16 tensors, ")
    assert "; 2 of them within the tolerance; " in verdict


def test_the_table_fits_80_columns_and_has_no_colour_in_a_pipe(training: tuple[Path, Path]) -> None:
    result = run("diff", *training, cwd=None, env=environment(COLUMNS="80", TERM="xterm-256color"))
    assert result.code == 1
    assert "\x1b" not in result.out
    lines = [line for line in result.out.splitlines() if not line.startswith(("  A", "  B"))]
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("layers.{0..59}.weight  x60 ") for line in lines)
    assert len(lines) < 70
    assert any(line.startswith("… ") and line.endswith(" more; --stat or --json for all") for line in lines)


def test_counters_of_one_value_take_one_line(training: tuple[Path, Path]) -> None:
    text = run("diff", *training, "--part", "optimizer", "--part", "scheduler").out
    assert "state.*.step  x110: 10 -> 20\n" in text
    assert "param_groups.0.lr: 0.1 -> 0.05\n" in text
    assert "scheduler\nlast_epoch: 10 -> 20\n" in text


def test_stat_has_a_bar_for_every_tensor(training: tuple[Path, Path]) -> None:
    result = run("diff", *training, "--stat", "--part", "model")
    assert result.code == 1
    bars = {line.split(" | ")[0].strip(): line.count("█") for line in result.out.splitlines() if " | " in line}
    assert len(bars) == 110
    # The same was added to all: the larger the numbers, the shorter the bar. 1 against 0.01 in the other ones.
    assert bars["odd.aaaaaa"] > 10 * bars["layers.0.weight"] >= bars["layers.59.weight"] > 0
    assert max(map(len, run("diff", *training, "--stat", env=environment(COLUMNS="80")).out.splitlines()[3:])) <= 80


def pair(folder: Path, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[Path, Path]:
    paths = folder / "a.safetensors", folder / "b.safetensors"
    for path, tensors in zip(paths, (a, b), strict=True):
        save_file(tensors, path)
    return paths


def bits(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).view(torch.float32)


def table(text: str) -> dict[str, list[str]]:
    """The cells of each line of a table, by its first one."""
    lines = [re.split(r"\s{3,}", line) for line in text.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if len(cells) > 1}


def test_files_of_the_current_folder_are_shown_as_given(tmp_path: Path) -> None:
    pair(tmp_path, {"w": torch.zeros(2)}, {"w": torch.zeros(2)})
    lines = run("diff", "a.safetensors", "./b.safetensors", cwd=tmp_path).out.splitlines()
    assert lines[1:] == ["  A  a.safetensors  [safetensors file]", "  B  ./b.safetensors  [safetensors file]"]


def test_a_folder_that_was_found_below_the_path_is_shown(training: tuple[Path, Path]) -> None:
    lines = run("diff", training[0].parent, training[1]).out.splitlines()
    assert lines[1].startswith(f"  A  {training[1]}  [")


def test_the_same_file_is_called_that(tmp_path: Path) -> None:
    path = pair(tmp_path, {"w": torch.zeros(2)}, {})[0]
    assert run("diff", path, path).out.startswith("equal: 1 tensor, 8 B; 1 of them the same file on both sides\n")


def test_as_many_digits_as_make_values_differ(tmp_path: Path) -> None:
    a = {"w": bits(0x3F800000, 0), "n": torch.tensor([2**62, 5]), "step": torch.tensor([12345678])}
    b = {"w": bits(0x3F800001, 0), "n": torch.tensor([2**62 + 1, 5]), "step": torch.tensor([12345679])}
    paths = pair(tmp_path, a, b)
    assert "largest at w[0]: 1 -> 1.0000001\n" in run("diff", *paths, "--include", "w").out
    assert f"largest at n[0]: {2**62} -> {2**62 + 1}\n" in run("diff", *paths, "--include", "n").out
    assert "step: 12345678 -> 12345679\n" in run("diff", *paths, "--include", "step").out


def test_large_counts_have_no_letter_that_could_mean_bytes(tmp_path: Path) -> None:
    wide = torch.zeros(20_000_000, dtype=torch.int8)
    paths = pair(
        tmp_path, {"w": torch.tensor([1e30, 0]), "v": wide}, {"w": torch.tensor([-1e30, 0]), "v": wide.clone()}
    )
    tensors = load_file(paths[1])
    tensors["v"][5] = 1
    save_file(tensors, paths[1])
    found = table(run("diff", *paths).out)
    assert found["w"][4] == "3.8e+09"
    assert found["v"][0] == "1 of 2e+07"


def test_numbers_that_are_none(tmp_path: Path) -> None:
    nan = 0x7FC00000
    a = {"bits": bits(nan, 0, 0), "new": bits(1, 0, 0), "old": bits(nan, 0, 0), "one": bits(nan)}
    b = {"bits": bits(nan + 1, 0, 0), "new": bits(nan, 0, 0), "old": bits(1, 0, 0), "one": bits(nan + 1)}
    text = run("diff", *pair(tmp_path, a, b)).out
    found = table(text)
    assert found["tensor"] == ["changed", "max abs", "rel L2", "cosine", "max ulp", "note"]
    assert found["bits"] == ["1 of 3", "-", "-", "-", "-", "1 NaN with other bits"]
    assert found["new"][-1] == "1 became NaN"
    assert found["old"][-1] == "1 was NaN"
    assert "one: NaN with other bits\n" in text
    alone = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--include", "bits").out
    assert "first at bits[0]: NaN with other bits\n" in alone


def test_rows_of_unlike_tensors_show_bounds(tmp_path: Path) -> None:
    a = {f"{i}.w": torch.tensor([3.0, 4.0]) for i in range(2)} | {f"{i}.same": torch.ones(2) for i in range(2)}
    b = {"0.w": torch.tensor([3.0, 4.5]), "1.w": torch.tensor([0.0, 4.0])}
    found = table(run("diff", *pair(tmp_path, a, b | {f"{i}.same": torch.tensor([1.0, 2.0]) for i in range(2)})).out)
    assert found["{0..1}.w  x2"][:4] == ["2 of 4", "≤ 3", "≤ 0.6", "≥ 0.800000"]
    assert found["{0..1}.same  x2"][:2] == ["2 of 4", "1"]


def test_a_narrow_terminal_drops_columns_and_breaks_no_name(training: tuple[Path, Path], tmp_path: Path) -> None:
    a = {f"layers.{i}.self_attention.query_projection.weight": torch.ones(2) for i in range(3)}
    paths = pair(tmp_path, a, {name: value * 2 for name, value in a.items()})
    heads = ["tensor", "changed", "max abs", "rel L2", "cosine", "max ulp"]
    for width, columns in ((160, 6), (100, 5), (90, 4), (80, 3), (60, 3)):
        lines = run("diff", *paths, env=environment(COLUMNS=str(width))).out.splitlines()
        head = next(number for number, line in enumerate(lines) if line.startswith("tensor"))
        assert re.split(r"\s{3,}", lines[head]) == heads[:columns], width
        assert any("layers.{0..2}.self_attention.query_projection.weight  x3" in line for line in lines)
        assert max(map(len, lines[head:])) <= width
        assert not any(line != line.rstrip() for line in lines)
        left = ", ".join(heads[columns:])
        assert (f"no room for {left}: --json has all" in lines) is (columns < 6)
    text = run("diff", *training, "--part", "model", "--part", "optimizer", env=environment(COLUMNS="40")).out
    assert all(len(line) <= 40 for line in text.splitlines() if not line.startswith(("  A", "  B")))


def test_optimizers_that_cannot_be_matched() -> None:
    result = run("diff", ACCELERATE, INDEXED, "--part", "optimizer")
    assert result.code == 1
    assert result.out.startswith("different: optimizer_0 cannot be matched; ")
    assert "B keeps its state by index, A by the names of parameters" in result.out
    assert len(result.out.splitlines()) == 6


@pytest.mark.parametrize("options", [[], ["--full"], ["-q"]])
def test_damage_is_no_difference(options: list[str], tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "bad")
    (tmp_path / "bad/__0_0.distcp").unlink()
    result = run("diff", DCP, tmp_path / "bad", *options)
    assert_refused(result, 4)
    assert "error: B (`" in result.err
    assert result.hint == f"fsdp-ckpt validate {tmp_path / 'bad'}"
    assert result.out == ""


def test_a_flipped_bit(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "bad")
    flip(tmp_path / "bad/__0_0.distcp")
    result = run("diff", tmp_path / "bad", OTHER, "--full")
    assert_refused(result, 4)
    assert "error: A (`" in result.err
    assert "is damaged" in result.err
    assert result.hint == f"fsdp-ckpt validate {tmp_path / 'bad'} --deep"
    assert_refused(run("diff", tmp_path / "bad", OTHER, "--full", "-q"), 4)
    trusting = run("diff", tmp_path / "bad", OTHER)
    assert (trusting.code, trusting.out.startswith("equal by recorded checksums: ")) == (0, True)
    # A side without checksums makes it read.
    for options in ([], ["-q"]):
        assert_refused(run("diff", tmp_path / "bad", EXPECTED, *options), 4)


def test_hostile_pickles_are_refused(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    pickle, _ = next(iter(code_attacks(str(canary)).values()))
    shutil.copytree(DCP, tmp_path / "bad")
    (tmp_path / "bad/.metadata").write_bytes(pickle)
    result = run("diff", DCP, tmp_path / "bad")
    assert_refused(result, 4)
    assert "B (`" in result.err
    assert not canary.exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        ([DCP], 2),
        ([DCP, "nowhere"], 3),
        (["nowhere", DCP], 3),
        ([DCP, Path(__file__).parent], 3),
        ([DCP, OTHER, "--tolerance", "-1"], 2),
        ([DCP, OTHER, "--tolerance", "much"], 2),
        ([DCP, OTHER, "--jobs", "0"], 2),
        ([DCP, OTHER, "--part", "optimizer"], 2),
        ([DCP, OTHER, "--include", "nothing"], 2),
        ([DCP, OTHER, "--rename", "nothing"], 2),
        ([FIXTURES / "torch-2.13.0/local_state_dict_w2", DCP, "--part", "pytorch_model_fsdp"], 8),
    ],
)
def test_exit_codes(arguments: list[str | Path], code: int) -> None:
    result = run("diff", *arguments)
    if arguments:
        assert_refused(result, code)
    assert (result.code, result.out) == (code, "")


def test_no_threads_are_refused_in_the_words_of_validate() -> None:
    refused = run("diff", DCP, OTHER, "--jobs", "0")
    assert (refused.code, refused.err) == (2, run("validate", DCP, "--jobs", "0").err)


def test_help_says_what_is_not_read() -> None:
    text = " ".join(run("diff", "--help", env=environment(COLUMNS="200")).out.replace("│", " ").split())
    assert "-q with --full reads bytes, too" in text
    assert "without it, those with equal recorded checksums are not" in text
    assert "where one side holds models only" in text


def test_names_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tensors = {"evil\x1b[31m\tname": torch.tensor([float(name == "a"), 1.0]), "[red]w": torch.zeros(2)}
        save_file(tensors if name == "a" else {**tensors, "[red]w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for options in ([], ["--stat"], ["--name-only"]):
        text = run("diff", *paths, *options).out
        assert "\x1b" not in text
        assert "evil\\x1b[31m\\tname" in text
        assert "[red]w" in text


def test_neither_torch_nor_numpy_where_nothing_is_read() -> None:
    for options, allowed in (([], set()), (["--full"], {"numpy", "ml_dtypes"})):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", TOOL, "diff", str(DCP), str(OTHER), *options],
            env=environment(), capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        names = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
        assert "fsdp_ckpt" in names
        assert names & HEAVY <= allowed


def sparse(path: Path, num_bytes: int, last: float) -> Path:
    """A safetensors file of zeros and one number at the end, which takes no room on the disk."""
    entry = {"w": {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}}
    header = json.dumps(entry).encode()
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        out.truncate(8 + len(header) + num_bytes)
        out.seek(-4, os.SEEK_END)
        out.write(struct.pack("<f", last))
    return path


def test_memory_does_not_depend_on_sizes(tmp_path: Path) -> None:
    """400 MB on each side within 128 MB, of which Python, NumPy and rich take the most."""
    paths = sparse(tmp_path / "a.safetensors", 400 << 20, 3.0), sparse(tmp_path / "b.safetensors", 400 << 20, 4.0)
    script = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], capture_output=True, text=True);"
        "print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, done.stdout)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, TOOL, "diff", *map(str, paths), "--jobs", "4"],
        env=environment(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    code, peak, text = done.stdout.split(" ", 2)
    assert code == "1"
    assert f"largest at w[{(100 << 20) - 1}]: 3 -> 4" in text
    assert int(peak) < 128 << 10
