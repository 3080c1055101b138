"""The questions of ``config init``: those of ``accelerate config``, each with help and a default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.config.fsdp import FSDPConfig, read_value
from fsdp_ckpt.config.launch import LaunchConfig
from fsdp_ckpt.config.options import OPTIONS, default_of
from fsdp_ckpt.config.values import as_boolean, as_integer, as_text

__all__ = ["QUESTIONS", "Question", "config_of_answers"]

Answers = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question.

    Attributes:
        name: Field of ``FSDPConfig`` or ``LaunchConfig``.
        text: The question.
        help: What to consider.
        choices: Allowed names with a few words on each; empty for other kinds.
        read: Reads an answer; raises ``ValueError`` saying what is allowed.
        default: Of the answers before; None when there is none and an answer is needed.
        is_asked: Whether it makes sense after the answers before.
        of_job: It is a field of ``LaunchConfig``.
    """

    name: str
    text: str
    help: str = ""
    choices: Mapping[str, str]
    read: Callable[[Any], Any]
    default: Callable[[Answers], Any]
    is_asked: Callable[[Answers], bool]
    of_job: bool = False


def _always(_: Answers) -> bool:
    return True


def _of_version(version: int) -> Callable[[Answers], bool]:
    return lambda answers: answers["fsdp_version"] == version


def _option(
    name: str, text: str, *, choices: Mapping[str, str] | None = None, asked: Callable[[Answers], bool] = _always
) -> Question:
    option = OPTIONS[name]

    def default(answers: Answers) -> Any:
        return default_of(option, answers.get("fsdp_version", 2))

    return Question(
        name=name, text=text, help=option.meaning, choices=choices or {}, default=default, is_asked=asked,
        read=lambda value: read_value(option, value),
    )  # fmt: skip


def _job(
    name: str, text: str, read: Callable[[Any], Any], default: Any, *, help: str = "",  # noqa: A002  # as the field
    asked: Callable[[Answers], bool] = _always,
) -> Question:  # fmt: skip
    return Question(
        name=name, text=text, help=help, choices={}, read=read, default=lambda _: default, is_asked=asked, of_job=True
    )


def _several(answers: Answers) -> bool:
    return bool(answers["num_machines"] > 1)


def _number(minimum: int) -> Callable[[Any], int]:
    return lambda value: as_integer(value, minimum=minimum)


QUESTIONS: tuple[Question, ...] = (
    _job("num_machines", "How many machines?", _number(1), 1),
    _job("machine_rank", "Which of them is this one, from 0?", _number(0), 0, asked=_several,
         help="Each machine has its own file, or is started with --machine-rank N."),
    _job("main_process_ip", "What is the address of machine 0?", as_text, None, asked=_several),
    _job("main_process_port", "On which port do ranks meet there?", _number(0), 29500, asked=_several),
    _job("same_network", "Do all machines reach that address directly?", as_boolean, True, asked=_several),
    _job("rdzv_backend", "Which rendezvous backend of torchrun?", as_text, "static",
         asked=lambda answers: _several(answers) and not answers["same_network"]),
    _job("num_processes", "How many ranks on all machines together?", _number(1), 1,
         help="One per GPU. With CPUs, as many as you want."),
    _option("fsdp_version", "Which version of FSDP?",
            choices={"1": "FullyShardedDataParallel: older, deprecated in torch", "2": "fully_shard"}),
    _option("sharding_strategy", "What is cut?", asked=_of_version(1), choices={
        "FULL_SHARD": "parameters, gradients, optimizer state (ZeRO-3)",
        "SHARD_GRAD_OP": "gradients, optimizer state (ZeRO-2)",
        "NO_SHARD": "nothing (DDP)",
        "HYBRID_SHARD": "as FULL_SHARD within a node, a whole copy per node",
        "HYBRID_SHARD_ZERO2": "as SHARD_GRAD_OP within a node, a whole copy per node"}),
    _option("reshard_after_forward", "Free gathered parameters after forward?", asked=_of_version(2)),
    _option("offload_params", "Keep parameters and gradients in CPU memory?"),
    _option("auto_wrap_policy", "Which modules become units that are gathered together?", choices={
        "TRANSFORMER_BASED_WRAP": "the layers of the model",
        "SIZE_BASED_WRAP": "modules of at least some size",
        "NO_WRAP": "only the model as a whole"}),
    _option("transformer_layer_cls_to_wrap", "Class names of the layers, separated by commas?",
            asked=lambda answers: answers["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"),
    _option("min_num_params", "Least number of parameters of a unit?",
            asked=lambda answers: answers["auto_wrap_policy"] == "SIZE_BASED_WRAP"),
    _option("backward_prefetch", "When is the next unit gathered in backward?", asked=_of_version(1), choices={
        "BACKWARD_PRE": "before the current one's gradients: fastest",
        "BACKWARD_POST": "after them: less memory",
        "NO_PREFETCH": "not ahead"}),
    _option("state_dict_type", "What do checkpoints look like?", choices={
        "FULL_STATE_DICT": "one whole file",
        "LOCAL_STATE_DICT": "FSDP1's flat parameters; loads on the same number of ranks only",
        "SHARDED_STATE_DICT": "a file per rank: fast, any number of ranks"}),
    _option("forward_prefetch", "Gather the next unit during forward?", asked=_of_version(1)),
    _option("use_orig_params", "Show the model's own parameters?", asked=_of_version(1)),
    _option("cpu_ram_efficient_loading", "Does only rank 0 hold the initial weights?"),
    _option("sync_module_states", "Broadcast rank 0's weights?",
            asked=lambda answers: answers["fsdp_version"] == 1 and not answers["cpu_ram_efficient_loading"]),
    _option("activation_checkpointing", "Compute activations again in backward to save memory?"),
    _option("dp_replicate_size", "How many whole copies of the model (HSDP)?", asked=_of_version(2)),
    _option("mixed_precision", "Mixed precision?", choices={
        "no": "float32", "fp16": "float16 with a gradient scaler", "bf16": "bfloat16", "fp8": "8 bit, by Accelerate"}),
)  # fmt: skip


def config_of_answers(answers: Answers) -> LaunchConfig:
    """Make the configuration of some answers.

    Raises:
        UsageError: They contradict each other.
    """
    of_job = {question.name for question in QUESTIONS if question.of_job}
    fsdp = FSDPConfig.of({name: value for name, value in answers.items() if name not in of_job})
    job = {name: value for name, value in answers.items() if name in of_job}
    return LaunchConfig(**job, fsdp=fsdp, mixed_precision=fsdp.mixed_precision)
