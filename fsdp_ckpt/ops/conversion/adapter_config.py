"""Read ``adapter_config.json``: by how much an adapter counts, and whether it can be folded at all."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_ckpt.errors import CheckpointNotFound, Incompatible, UsageError
from fsdp_ckpt.ops.side_files import SideFiles
from fsdp_ckpt.plan.lora import Adapter
from fsdp_ckpt.store.remote.mirrors import materialise

__all__ = ["ADAPTER_CONFIG", "AdapterConfig", "find_adapter_config", "read_adapter_config", "write_adapter_config"]

ADAPTER_CONFIG = "adapter_config.json"

_LIMIT_BYTES = 4 << 20
_LONGEST_PATTERN = 1000
_MOST_REPEATS = 3
_LONGEST_NAME = 300

_NOT_A_SUM = {
    "use_dora": "DoRA scales the columns of the weight",
    "use_qalora": "QA-LoRA pools its input",
    "use_bdlora": "BD-LoRA is block-diagonal",
    "kasa_config": "KaSA has singular values of its own",
    "alora_invocation_tokens": "an activated LoRA counts after certain tokens only",
    "arrow_config": "Arrow chooses an adapter for each token",
    "monteclora_config": "MonteCLoRA's matrices are random",
    "trainable_token_indices": "it puts rows of the embedding in the place of others",
}
"""Fields of PEFT's LoraConfig with which the result is more than the weight and a product of two matrices."""

_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of ``init_lora_weights`` with which PEFT changes the weights of the base model before training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """How an adapter was made.

    Attributes:
        source: The file, or the option, for messages.
        values: What it says.
        data: The file as it is; None where there is none.
    """

    source: str
    values: Mapping[str, Any] = field(default_factory=dict)
    data: bytes | None = None

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of ``lora_B @ lora_A`` for a module: alpha / r, or alpha / sqrt(r).

        Args:
            module: The module, as the base model calls it.
            rank: Rows of its ``lora_A``.

        Raises:
            Incompatible: The configuration does not tell, or tells of another rank.
        """
        said = self._of_module("r", "rank_pattern", module)
        if said is not None and said != rank:
            raise Incompatible(f"`{module}` has an adapter of rank {rank}; by {self.source} it is {_short(said)}")
        alpha = self._of_module("lora_alpha", "alpha_pattern", module)
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            raise Incompatible(
                f"{self.source} tells no lora_alpha of `{module}`: how much the adapter counts is not known",
                hint="give a whole adapter_config.json with --adapter-config, or --lora-alpha",
            )
        return float(alpha) / (math.sqrt(rank) if self.values.get("use_rslora") is True else rank)

    def _of_module(self, name: str, pattern: str, module: str) -> Any:
        """Look up a value as PEFT does: the first pattern that the module's name ends with, else the common value."""
        patterns = self.values.get(pattern)
        if isinstance(patterns, dict):
            for key, value in patterns.items():
                if _matches(key, module, self.source):
                    return value
        return self.values.get(name)

    @property
    def method(self) -> str:
        """The kind of adapter (``LORA``)."""
        return str(self.values.get("peft_type", "LORA")).upper()[:40]

    @property
    def fan_in_fan_out(self) -> bool:
        """Whether weights are said to be stored as (in, out)."""
        return self.values.get("fan_in_fan_out") is True

    @property
    def bias(self) -> str:
        """Which biases were trained: ``none``, ``all`` or ``lora_only``."""
        return str(self.values.get("bias", "none"))[:40]

    def why_not_foldable(self) -> str | None:
        """Return why the adapter is no plain sum with the weights; None when it is one."""
        if self.method != "LORA":
            return f"it is of the kind {self.method}, not LORA"
        return next((why for name, why in _NOT_A_SUM.items() if self.values.get(name)), None)

    @property
    def changed_base(self) -> str | None:
        """How the base model was changed when the adapter was made; None where it was not."""
        said = self.values.get("init_lora_weights")
        text = said.lower() if isinstance(said, str) else ""
        return next((name for name in _CHANGED_BASE if text.startswith(name)), None)


def _matches(pattern: str, module: str, source: str) -> bool:
    if re.fullmatch(r"[\w.-]+", pattern):
        # PEFT reads the dots as any character; a name that differs in nothing else is the one that is meant.
        return module == pattern or module.endswith(f".{pattern}")
    repeats = len(re.findall(r"[*+{]", pattern))
    # Time grows with the name's length to the power of the repeats; both may come from anybody.
    is_long = len(pattern) > _LONGEST_PATTERN or (repeats and len(module) > _LONGEST_NAME)
    if is_long or repeats > _MOST_REPEATS or re.search(r"\)\s*[*+{]", pattern):
        raise Incompatible(f"{source} has a pattern that is too intricate: {pattern[:80]}")
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error as error:
        raise Incompatible(f"{source}: `{pattern[:80]}` is no pattern: {error}") from None


def _short(value: object) -> str:
    return str(value)[:40]


def read_adapter_config(path: Path) -> AdapterConfig:
    """Read a configuration.

    Args:
        path: The file, or the folder that it is in.

    Raises:
        CheckpointNotFound: There is none.
        UsageError: It is no JSON object.
    """
    file = path / ADAPTER_CONFIG if path.is_dir() else path
    try:
        with materialise(file).open("rb") as opened:
            data = opened.read(_LIMIT_BYTES + 1)
    except OSError as error:
        raise CheckpointNotFound(f"`{file}` cannot be read: {error.strerror}") from None
    try:
        values = json.loads(data) if len(data) <= _LIMIT_BYTES else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"`{file}` is no configuration of an adapter")
    return AdapterConfig(source=f"`{file}`", values=values, data=data)


def find_adapter_config(
    asked: Path | None, side: SideFiles, *, alpha: float | None = None, use_rslora: bool = False
) -> AdapterConfig | None:
    """Return what is known of an adapter, None for nothing.

    Args:
        asked: File or folder that the user named (``--adapter-config``).
        side: Files beside the checkpoint.
        alpha: What the user says (``--lora-alpha``), where there is no file.
        use_rslora: Likewise: alpha is divided by sqrt(r).

    Raises:
        CheckpointNotFound: The file that was named is not there.
        UsageError: File and options contradict each other, or the file is no JSON object.
    """
    beside = side.files.get(ADAPTER_CONFIG)
    path = asked if asked is not None else beside
    if path is None:
        if alpha is None:
            return None
        return AdapterConfig(source="--lora-alpha", values={"lora_alpha": alpha, "use_rslora": use_rslora})
    found = read_adapter_config(path)
    said = found.values.get("lora_alpha")
    if alpha is not None and alpha != said:
        raise UsageError(f"--lora-alpha is {alpha:g}, but {found.source} says {_short(said)}", hint="leave it out")
    if use_rslora and found.values.get("use_rslora") is not True:
        raise UsageError(f"--rslora, but {found.source} does not say use_rslora", hint="leave it out")
    return found


def write_adapter_config(adapter: Adapter, config: AdapterConfig, *, is_turned: bool, modules: Sequence[str]) -> bytes:
    """Return an ``adapter_config.json`` for an adapter of which no such file is known.

    Ranks and modules are those of its tensors.

    Args:
        adapter: The adapter.
        config: What else is known: alpha.
        is_turned: Weights are stored as (in, out).
        modules: All modules that have a weight, as far as they are known.
    """
    ranks = {module: pair.rank for module, pair in adapter.pairs.items()}
    common = Counter(ranks.values()).most_common(1)[0][0]
    values: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": common,
        "lora_alpha": config.values["lora_alpha"],
        "use_rslora": config.values.get("use_rslora", False),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": is_turned,
        "target_modules": _targets(list(ranks), modules),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in adapter.trained}) or None,
        "rank_pattern": {re.escape(module): rank for module, rank in ranks.items() if rank != common},
        "alpha_pattern": {},
        "use_dora": any("lora_magnitude_vector" in name for name in adapter.tuned),
    }
    return (json.dumps(values, indent=2) + "\n").encode()


def _targets(tuned: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Return the last components of names where these mean the same modules, else whole names."""
    last = sorted({module.rpartition(".")[2] for module in tuned})
    meant = [module for module in modules if module.rpartition(".")[2] in last]
    return last if modules and set(meant) == set(tuned) else sorted(tuned)
