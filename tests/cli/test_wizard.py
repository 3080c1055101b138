"""``config init`` by keyboard, in a real terminal, and what it says without one."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml
from accelerate.commands.config.config_args import load_config_from_file

from tests.cli.terminal import Terminal
from tests.cli.tool import assert_refused, run


def _section(path: Path) -> dict[str, object]:
    """Return what Accelerate's own reader finds under ``fsdp_config``."""
    section: dict[str, object] = load_config_from_file(str(path)).fsdp_config
    return section


def test_enter_alone_takes_the_defaults(tmp_path: Path) -> None:
    terminal = Terminal(["config", "init", "job.yaml"], tmp_path)
    terminal.wait_for("How many machines?")
    for _ in range(12):
        terminal.type("\n")
    terminal.answer("Write job.yaml?", "")
    assert terminal.end() == 0, terminal.screen
    assert _section(tmp_path / "job.yaml") == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_activation_checkpointing": False,
    }


def test_names_numbers_help_mistakes_and_a_step_back(tmp_path: Path) -> None:
    terminal = Terminal(["config", "init", "job.yaml"], tmp_path)
    terminal.answer("How many machines?", "<")
    terminal.wait_for("this is the first question")
    terminal.answer("How many machines?", "")
    terminal.answer("How many ranks", "eight")
    terminal.wait_for("allowed: a whole number from 1")
    terminal.type("8\n")
    terminal.answer("Which version", "2")
    terminal.answer("Free gathered parameters", "<")
    terminal.answer("Which version", "1")
    terminal.answer("What is cut?", "?")
    terminal.wait_for("SHARD_GRAD_OP keeps")
    terminal.type("2\n")
    terminal.answer("CPU memory?", "yes")
    terminal.answer("Which modules become units", "size_based_wrap")
    terminal.answer("Least number", "1e6")
    terminal.answer("gathered in backward?", "3")
    terminal.answer("checkpoints look like?", "full_shard")
    terminal.wait_for("allowed: 1 FULL_STATE_DICT")
    terminal.type("1\n")
    terminal.answer("during forward?", "")
    terminal.answer("own parameters?", "no")
    terminal.answer("hold the initial weights?", "n")
    terminal.answer("Broadcast rank 0's weights?", "n")
    terminal.answer("Compute activations again", "y")
    terminal.answer("Mixed precision?", "bf16")
    terminal.answer("Write job.yaml?", "y")
    assert terminal.end() == 0, terminal.screen
    assert _section(tmp_path / "job.yaml") == {
        "fsdp_version": 1,
        "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_offload_params": True,
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_min_num_params": 1_000_000,
        "fsdp_backward_prefetch": "NO_PREFETCH",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_forward_prefetch": False,
        "fsdp_use_orig_params": False,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_sync_module_states": False,
        "fsdp_activation_checkpointing": True,
    }
    top = yaml.safe_load((tmp_path / "job.yaml").read_text())
    assert (top["num_processes"], top["mixed_precision"], top["distributed_type"]) == (8, "bf16", "FSDP")


def test_several_machines(tmp_path: Path) -> None:
    terminal = Terminal(["config", "init", "job.yaml", "-n", "16", "--set", "fsdp_version=2"], tmp_path)
    terminal.answer("How many machines?", "2")
    terminal.answer("Which of them is this one", "1")
    terminal.answer("address of machine 0?", "")
    terminal.wait_for("an answer is needed")
    terminal.type("10.0.0.1\n")
    terminal.answer("On which port", "")
    terminal.answer("directly?", "no")
    terminal.answer("rendezvous backend", "c10d")
    terminal.wait_for("Free gathered parameters")  # neither ranks nor version are asked: they were given
    terminal.type("\n" * 9)
    terminal.answer("Write job.yaml?", "")
    assert terminal.end() == 0, terminal.screen
    job = load_config_from_file(str(tmp_path / "job.yaml"))
    assert (job.num_machines, job.machine_rank, job.num_processes) == (2, 1, 16)
    assert (job.main_process_ip, job.main_process_port) == ("10.0.0.1", 29500)
    assert (job.same_network, job.rdzv_backend) == (False, "c10d")


def test_ctrl_c_and_ctrl_d_and_no_write_nothing(tmp_path: Path) -> None:
    for keys in ("\x03", "\x04", "\n" * 12 + "no\n"):
        terminal = Terminal(["config", "init", "job.yaml"], tmp_path)
        terminal.wait_for("How many machines?")
        terminal.wait_for("] ")
        terminal.type(keys)
        assert terminal.end() == 130, terminal.screen
        assert "Traceback" not in terminal.screen
        assert list(tmp_path.iterdir()) == []


def test_without_a_terminal_the_hint_is_a_command_that_works(tmp_path: Path) -> None:
    refused = run("config", "init", "job.yaml", "-n", "4", "--set", "offload_params=yes", cwd=tmp_path)
    assert_refused(refused, 2)
    assert "no terminal" in refused.err
    assert not (tmp_path / "job.yaml").exists()
    assert refused.hint is not None
    words = shlex.split(refused.hint)
    assert words[:2] == ["fsdp-ckpt", "config"]
    done = run(*words[1:], cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out == "job.yaml\n"
    assert _section(tmp_path / "job.yaml")["fsdp_offload_params"] is True


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text("mine")
    refused = run("config", "init", "--yes", cwd=tmp_path)
    assert_refused(refused, 5)
    assert (tmp_path / "fsdp.yaml").read_text() == "mine"
    assert run("config", "init", "--yes", "--overwrite", cwd=tmp_path).code == 0
    assert _section(tmp_path / "fsdp.yaml")["fsdp_version"] == 2
