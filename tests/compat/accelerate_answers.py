"""`accelerate config` and `accelerate launch` without a terminal or GPUs: answers in, a file and variables out.

Nothing of Accelerate's is replaced but what asks a person, and what asks the machine for devices and free ports.
"""

from __future__ import annotations

import functools
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate.commands.config.cluster as questions
import accelerate.commands.launch as launcher
import accelerate.utils.dataclasses as plugins
import accelerate.utils.launch as environments
import torch

Answers = Mapping[str, str | int]
"""What to answer, by a part of the question: a text for a field, a position for a menu."""


def ask(answers: Answers) -> Any:
    """Return what Accelerate makes of the answers; every question that is not named gets its default.

    An answer to a question that is never asked is a mistake of the test.
    """
    used: set[str] = set()

    def answer(question: str) -> str | int | None:
        fitting = [part for part in answers if part in question]
        assert len(fitting) <= 1, f"{fitting} all fit {question!r}"
        used.update(fitting)
        return answers[fitting[0]] if fitting else None

    def field(question: str, convert: Callable[[str], Any] | None = None, default: Any = None, **_: Any) -> Any:
        given = answer(question)
        if given is None and default is not None:
            return default
        return convert(str(given or "")) if convert else given

    def menu(question: str, options: Any, convert: Callable[[int], Any], default: int = 0) -> Any:
        given = answer(question)
        position = default if given is None else int(given)
        assert 0 <= position < len(options)
        return convert(position)

    with ExitStack() as stack:
        for name in (
            "is_fp8_available",
            "is_transformer_engine_available",
            "is_msamp_available",
            "is_torchao_available",
        ):
            stack.enter_context(mock.patch.object(questions, name, return_value=True))
        stack.enter_context(mock.patch.object(questions, "is_mps_available", return_value=False))
        stack.enter_context(mock.patch.object(questions, "_ask_field", field))
        stack.enter_context(mock.patch.object(questions, "_ask_options", menu))
        stack.enter_context(mock.patch("builtins.print"))
        config = questions.get_cluster_input()
    assert used == set(answers), f"never asked: {set(answers) - used}"
    return config


def write(answers: Answers, path: Path) -> None:
    """Write the file that `accelerate config` writes for these answers."""
    ask(answers).to_yaml_file(str(path))


def launch(path: Path, *options: str) -> tuple[Namespace, dict[str, str]]:
    """Return Accelerate's arguments and the variables that `accelerate launch --config_file PATH` adds."""
    with mock.patch.dict(os.environ, {}, clear=True), ExitStack() as stack:
        stack.enter_context(mock.patch.object(environments, "is_fp8_available", return_value=True))
        stack.enter_context(mock.patch.object(environments, "is_port_in_use", return_value=False))
        command = ["--config_file", str(path), *options, "train.py"]
        args, _, _ = launcher._validate_launch_command(_parser().parse_args(command))
        return args, dict(environments.prepare_multi_gpu_env(args))


@functools.cache
def _parser() -> Any:
    return launcher.launch_command_parser()


@contextmanager
def process_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Be a process that was started with these variables, on a machine with a GPU."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables, clear=True))
        stack.enter_context(mock.patch.object(plugins, "is_cuda_available", return_value=True))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=0))
        yield


def plugin_of(variables: Mapping[str, str]) -> Any:
    """Return the plugin as `Accelerator()` builds it in such a process, precision included."""
    with process_with(variables):
        plugin = plugins.FullyShardedDataParallelPlugin()
        precision = variables["ACCELERATE_MIXED_PRECISION"]
        if precision != "no":
            plugin.set_mixed_precision(precision)
        return plugin
