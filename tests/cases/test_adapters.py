"""Cases of theme 9: LoRA, PEFT, vocabulary."""

from __future__ import annotations

from pathlib import Path

import fsdp_ckpt
from tests.cases.check import assert_same, merge_and_load, run
from tests.cases.models import adapted


def test_p49_rank_zeros_slice_is_not_the_model(built: Path, tmp_path: Path) -> None:
    """accelerate#4206, huggingface/peft#3251: the full file holds shard 0 of 2 of every tensor.

    Neither (2, 8) nor a zero-filled (4, 8) is written. Left out: validate, and that it exits with non-zero; inspect
    describes damaged checkpoints and exits with 0.
    """
    for source in (built / "p49", built / "p49/pytorch_model_fsdp.bin"):
        described = fsdp_ckpt.inspect(source)
        assert not described.complete
        told = {problem.where: problem.message for part in described.parts for problem in part.problems}
        assert sorted(told) == ["lora_A.weight", "lora_B.weight"]
        assert "shard of 2 (2 of 4 rows)" in told["lora_A.weight"]
        assert "shard of 2 (4 of 8 rows)" in told["lora_B.weight"]
        result = run("merge", source, tmp_path / "out")
        assert result.returncode == 4
        assert "2 of 4 rows" in result.stderr
        assert not (tmp_path / "out").exists()


def test_p49_inspect_shows_both_on_the_terminal(built: Path) -> None:
    """With the global shapes."""
    shown = run("inspect", built / "p49").stdout
    assert "INCOMPLETE" in shown
    assert "2 of 4 rows" in shown
    assert "4 of 8 rows" in shown
    assert "4 x 8" in shown
    assert "8 x 4" in shown


def test_p51_no_tensor_of_an_adapter_is_dropped(built: Path, tmp_path: Path) -> None:
    """huggingface/peft#2945, accelerate#3732.

    Splitting into base model and adapter: test_convert_adapters. A merge keeps all six tensors and their names.
    """
    report, found = merge_and_load(built / "p51", tmp_path / "out")
    assert_same(found, adapted())
    assert (report.excluded, dict(report.tied), dict(report.aliases)) == (0, {}, {})


def test_p51_what_is_left_out_is_counted(built: Path, tmp_path: Path) -> None:
    """A report line for whatever --exclude drops."""
    result = run("merge", built / "p51", tmp_path / "out", "--exclude", "*lora*", "--exclude", "*original_module*")
    assert result.returncode == 0, result.stderr
    assert "3 left out" in result.stdout


def test_p52_inspect_shows_the_whole_vocabulary(built: Path) -> None:
    """X-Square-Robot/wall-x#114, torchtune#2542, transformers#40382: global shapes, not those of a rank.

    Loading into another vocabulary: test_state_model.
    """
    (part,) = fsdp_ckpt.inspect(built / "p52").parts
    assert [(tensor.name, tensor.shape, tensor.shards) for tensor in part.tensors] == [("embed.weight", (12, 4), 2)]
