"""The training driver on real ranks: killed between and within saves, stopped, resumed on any number of ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fsdp_ckpt import merge
from fsdp_ckpt.train.driver import task
from fsdp_ckpt.train.driver.decoder import Decoder, DecoderConfig
from fsdp_ckpt.train.driver.events import (
    Evaluated,
    Event,
    Failed,
    Finished,
    Killed,
    LogReader,
    Saved,
    Saving,
    Started,
    Stepped,
    Stopped,
)
from fsdp_ckpt.train.driver.options import TrainOptions
from tests.build import assert_same, read_safetensors
from tests.cases.launch import REPOSITORY, build_once, run_module
from tests.dist.driver_ranks import OUTCOMES, SHARDINGS, SMALL

pytestmark = [pytest.mark.dist, pytest.mark.timeout(170)]

EVERY = range(1, 13)
AFTER_4 = range(5, 13)
"""Steps that follow the last checkpoint of a run that was killed at step 6 or 8."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_once(
        tmp_path_factory, "driver", lambda folder: run_module("tests.dist.driver_ranks", str(folder), timeout_s=150)
    )


def codes(out: Path, name: str) -> list[int]:
    outcome = json.loads((out / OUTCOMES).read_text())[name]
    assert not any("Traceback" in said for said in outcome["said"]), outcome["said"]
    return list(outcome["codes"])


def events(folder: Path, attempt: str) -> list[Event]:
    return LogReader(folder, attempt).poll()


def started(folder: Path, attempt: str) -> Started:
    (found,) = [event for event in events(folder, attempt) if isinstance(event, Started)]
    return found


def losses(folder: Path, attempt: str) -> dict[int, float]:
    return {event.step: event.loss for event in events(folder, attempt) if isinstance(event, Stepped)}


def only(values: dict[int, float], steps: range) -> dict[int, float]:
    return {step: values[step] for step in steps}


def steps_saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Read model and optimizer with torch's own reader."""
    found: dict[str, Tensor] = {}
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        whole = checkpoint.parent / f"{checkpoint.name}-{part}.pt"
        dcp_to_torch_save(checkpoint / part, whole)
        _flatten(torch.load(whole, weights_only=False), part, found)
    assert sum("exp_avg_sq" in name for name in found) == sum(name.startswith("pytorch_model") for name in found)
    return found


def _flatten(value: Any, name: str, into: dict[str, Tensor]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten(item, f"{name}.{key}", into)
    elif isinstance(value, Tensor):
        into[name] = value


def plain_losses(*, decays_all: bool = False) -> dict[int, float]:
    """Train in one process, without FSDP, on whole batches."""
    model = Decoder(
        DecoderConfig(
            vocab_size=16, hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        ),
        seed=0,
    )  # fmt: skip
    norms = [weight for name, weight in model.named_parameters() if "norm" in name]
    others = [weight for name, weight in model.named_parameters() if "norm" not in name]
    groups = [{"params": norms, "weight_decay": 0.01 if decays_all else 0.0}, {"params": others, "weight_decay": 0.01}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.98))
    found = {}
    for step in EVERY:
        tokens = task.samples(0, step, 0, 12, 3)
        answers = model(tokens[:, :-1])[:, 3:].log_softmax(-1).gather(-1, tokens[:, 4:, None])
        loss = -answers.sum() / (12 * 3)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * step / 21  # all within the warm-up
        optimizer.step()
        found[step] = loss.item()
    return found


def test_a_run_is_what_one_process_without_fsdp_computes(out: Path) -> None:
    assert codes(out, "whole") == [0, 0]
    assert losses(out / "whole", "whole") == pytest.approx(plain_losses(), rel=1e-4)
    assert steps_saved(out / "whole") == ["step-12", "step-4", "step-8"]
    seen = events(out / "whole", "whole")
    assert [type(event) for event in seen if not isinstance(event, Stepped)] == [
        Started, *[Saving, Saved, Evaluated] * 3, Finished,
    ]  # fmt: skip
    saved = [event for event in seen if isinstance(event, Saved)]
    for event in saved:
        assert event.num_bytes == sum(path.stat().st_size for path in Path(event.path).rglob("*") if path.is_file())
    begun = started(out / "whole", "whole")
    assert (begun.world_size, begun.first_step, begun.steps, begun.resumed_from) == (2, 1, 12, None)
    assert begun.num_params == 2 * 16 * 16 + 16 + 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 64 + 2 * 16)


def test_killed_between_saves_a_resumed_run_is_the_whole_one_in_every_bit(out: Path) -> None:
    assert codes(out, "killed") == [-signal.SIGKILL] * 2
    assert events(out / "cut", "killed")[-1] == Killed(step=6, while_saving=False)
    assert codes(out, "on_2") == [0, 0]
    assert started(out / "cut", "on_2").first_step == 5
    assert losses(out / "cut", "on_2") == only(losses(out / "whole", "whole"), AFTER_4)
    assert_same(tensors(out / "cut" / "step-12"), tensors(out / "whole" / "step-12"))


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_resumed_on_another_number_of_ranks(out: Path, ranks: int) -> None:
    folder = out / f"on_{ranks}"
    assert codes(out, folder.name) == [0] * ranks
    begun = started(folder, folder.name)
    assert (begun.world_size, begun.saved_world_size, begun.first_step) == (ranks, 2, 5)
    assert "random states" in " ".join(begun.warnings)
    assert losses(folder, folder.name) == pytest.approx(only(plain_losses(), AFTER_4), rel=1e-4)


def test_a_run_that_was_complete_ends_at_once(out: Path) -> None:
    assert codes(out, "complete") == [0, 0]
    seen = events(out / "cut", "complete")
    assert [type(event) for event in seen] == [Started, Evaluated, Finished]
    (before,) = [one for one in events(out / "cut", "on_2") if isinstance(one, Evaluated) and one.step == 12]
    assert seen[1] == before


def test_killed_within_a_save_the_one_before_is_whole_and_goes_on(out: Path) -> None:
    assert codes(out, "killed_saving") == [-signal.SIGKILL] * 2
    folder = out / "half_as_it_was"
    assert events(folder, "killed_saving")[-2:] == [
        Saving(step=8, path=str(out / "half" / "step-8")),
        Killed(step=8, while_saving=True),
    ]
    assert steps_saved(folder) == ["step-4"]
    (unfinished,) = folder.glob(".step-8.*")
    written = sorted(path.name for path in (unfinished / "optimizer_0").iterdir() if path.stat().st_size)
    assert written == [".metadata", "__0_0.distcp", "__1_0.distcp"]  # both ranks had written everything
    assert not (unfinished / "fsdp_ckpt.json").exists()
    assert_same(tensors(folder / "step-4"), tensors(out / "whole" / "step-4"))

    assert codes(out, "after_half") == [0, 0]
    begun = started(out / "half", "after_half")
    assert (begun.first_step, begun.resumed_from) == (5, str(out / "half" / "step-4"))
    assert losses(out / "half", "after_half") == only(losses(out / "whole", "whole"), AFTER_4)
    assert_same(tensors(out / "half" / "step-12"), tensors(out / "whole" / "step-12"))
    assert not list((out / "half").glob(".step-8.*"))


def test_sigterm_to_one_rank_stops_all_after_a_save(out: Path) -> None:
    assert codes(out, "stopped") == [128 + signal.SIGTERM] * 2
    *_, stepped, saving, saved, stopped = events(out / "stopped", "stopped")
    assert isinstance(stepped, Stepped)
    assert isinstance(saving, Saving)
    assert isinstance(saved, Saved)
    assert stopped == Stopped(step=stepped.step, signal=signal.SIGTERM)
    assert steps_saved(out / "stopped") == [f"step-{stepped.step}"]
    again = events(out / "continued", "continued")
    assert [event.step for event in again if isinstance(event, Stepped)] == [stepped.step + 1, stepped.step + 2]
    assert codes(out, "continued") == [-signal.SIGKILL] * 2


@pytest.mark.parametrize(
    ("name", "folder", "code", "text"),
    [
        ("in_use", "whole", 2, "holds checkpoints already; nothing was changed\nhint: --resume auto"),
        ("in_use_by_another", "whole", 2, "holds checkpoints already"),
        ("uneven", "uneven", 2, "batch_size: 16 is not possible on 3 ranks; allowed: multiples of 3, such as 15 or"),
        ("missing", "missing", 3, "nowhere` does not exist"),
    ],
)
def test_what_cannot_be_ends_all_ranks_alike(out: Path, name: str, folder: str, code: int, text: str) -> None:
    assert set(codes(out, name)) == {code}
    first, *others = json.loads((out / OUTCOMES).read_text())[name]["said"]
    assert first.startswith("fsdp-ckpt: error: ")
    assert text in first
    assert not any(others)
    if (out / folder).exists():
        (failed,) = events(out / folder, name)
        assert isinstance(failed, Failed)
        assert failed.message in first


@pytest.mark.parametrize("name", SHARDINGS)
def test_however_it_is_sharded(out: Path, name: str, tmp_path: Path) -> None:
    assert codes(out, name) == [0, 0]
    found = losses(out / name, name)
    assert found == pytest.approx(plain_losses(decays_all="flat" in name), rel=2e-2 if "bf16" in name else 1e-4)
    assert started(out / name, name).fsdp.startswith(name[:5].upper())
    assert codes(out, f"{name}_again") == [0, 0]
    assert losses(out / name, f"{name}_again") == only(found, range(9, 13))
    for folder in (out / f"{name}-12", out / name / "step-12"):
        merge(folder, tmp_path / folder.name)
    assert_same(read_safetensors(tmp_path / "step-12"), read_safetensors(tmp_path / f"{name}-12"))


def test_from_fsdp1_to_fsdp2(out: Path) -> None:
    # The optimizer's groups are the same, although FSDP1 shows matrices in one dimension.
    assert codes(out, "crossed") == [0, 0]
    assert started(out / "crossed", "crossed").first_step == 9
    assert losses(out / "crossed", "crossed") == pytest.approx(only(plain_losses(), range(9, 13)), rel=1e-4)


def test_merge_takes_the_configuration_along(out: Path, tmp_path: Path) -> None:
    merge(out / "whole" / "step-12", tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["fsdp_ckpt_task"] == {"name": "sort", "num_digits": 3, "seed": 0}
    assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == ("llama", 16, 2)


def torchrun(options: TrainOptions, ranks: int, attempt: str) -> subprocess.CompletedProcess[str]:
    file = Path(f"{options.folder}-{attempt}.json")
    options.write(file)
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdp_ckpt.train.elastic", "--standalone", "--nproc-per-node", str(ranks),
         "-m", "fsdp_ckpt.train.driver", str(file), attempt],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=75)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_under_torchrun(tmp_path: Path) -> None:
    options = replace(SMALL, folder=str(tmp_path / "run"))
    killed = torchrun(replace(options, kill_at=8), 2, "a")
    assert killed.returncode == 128 + signal.SIGKILL, killed.stderr
    assert events(tmp_path / "run", "a")[-1] == Killed(step=8, while_saving=True)
    refused = torchrun(options, 2, "b")
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.count("hint: --resume auto") == 1


@pytest.mark.slow
def test_a_model_of_hugging_face_is_trained_and_resumed(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = transformers.GPT2Config(
        vocab_size=16, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.1, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    sizes.save_pretrained(tmp_path / "sizes")
    options = replace(SMALL, folder=str(tmp_path / "run"), model=str(tmp_path / "sizes"))
    done = torchrun(options, 2, "a")
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "run" / "step-12")
    again = torchrun(replace(options, resume="auto"), 2, "b")
    assert again.returncode == 0, again.stderr
    # Dropout goes on with the random numbers that each rank would have drawn.
    assert losses(tmp_path / "run", "b") == only(losses(tmp_path / "run", "a"), range(9, 13))
    merge(tmp_path / "run" / "step-12", tmp_path / "merged")
    judge = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (type(judge).__name__, judge.config.n_embd) == ("GPT2LMHeadModel", 16)


@pytest.mark.slow
def test_it_learns_and_transformers_gives_the_same_answers(tmp_path: Path) -> None:
    from fsdp_ckpt.train.driver.generate import generate

    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "run"
    assert torchrun(TrainOptions(folder=str(folder), steps=300, durable=False), 2, "a").returncode == 0
    last = [event for event in LogReader(folder, "a").poll() if isinstance(event, Evaluated)][-1]
    assert last.answer_accuracy > 0.9
    merge(folder / "step-300", tmp_path / "merged")
    report = generate(tmp_path / "merged", ["31415926"], num_samples=200)
    assert report.answers == (("31415926", "11234569", True),)
    assert report.accuracy is not None
    assert report.accuracy > 0.9
    judge = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 10]])
    with torch.no_grad():
        for _ in range(8):
            tokens = torch.cat((tokens, judge(tokens).logits[:, -1:].argmax(-1)), -1)
    assert tokens[0, 9:].tolist() == [1, 1, 2, 3, 4, 5, 6, 9]
