"""What an adapter adds to which weight of its base model."""

from __future__ import annotations

import re

from fsdp_ckpt.errors import Incompatible, UsageError
from fsdp_ckpt.ops.conversion.adapter_config import ADAPTER_CONFIG, AdapterConfig
from fsdp_ckpt.ops.validation.wording import few, shape_text
from fsdp_ckpt.plan.lora import Adapter, Pair, PeftModel
from fsdp_ckpt.plan.output import LowRank, OutputTensor

__all__ = ["additions", "is_turned"]

_CONV1D = re.compile(r"(?:^|\.)c_(?:attn|proj|fc)$")
"""Modules of GPT-2, whose matrices are (in, out), and of some other models, whose matrices are not."""


def additions(model: PeftModel, chosen: Adapter, config: AdapterConfig | None) -> dict[str, LowRank]:
    """Return what an adapter adds, by name of the weight in the base model.

    Args:
        model: The model.
        chosen: The adapter.
        config: What is known of it.

    Raises:
        UsageError: Nothing is known of how much it counts.
        Incompatible: It is no plain sum with the weights, or shapes do not fit.
    """
    if config is None:
        raise UsageError(
            f"how much the adapter counts (lora_alpha) is in {ADAPTER_CONFIG}, which is not beside the checkpoint",
            hint=f"give it with --adapter-config FOLDER/{ADAPTER_CONFIG}, or --lora-alpha",
        )
    why = config.why_not_foldable()
    if why is None and chosen.unpaired:
        why = f"there is more to it than pairs of matrices: {few(list(chosen.unpaired))}"
    if why is not None:
        raise Incompatible(
            f"adapter `{chosen.name}` cannot be folded: {why}",
            hint="write it as an adapter (--to adapter), or fold it with peft: merge_and_unload()",
        )
    if not chosen.pairs:
        raise Incompatible(f"adapter `{chosen.name}` has no matrices to fold")
    are_turned = is_turned(model, chosen, config)
    found = {}
    for module, pair in chosen.pairs.items():
        weight = model.base.get(f"{module}.weight")
        if weight is None:
            raise Incompatible(f"`{pair.down.name}` changes `{module}.weight`, which is not in the checkpoint")
        _refuse_misfit(module, weight, pair)
        turned = pair.is_embedding or (are_turned if _is_square(pair) else weight.shape != _straight(pair))
        scale = config.scale(module, pair.rank)
        found[f"{module}.weight"] = LowRank(
            up=pair.up.source, down=pair.down.source, scale=scale, transposed=turned
        )  # fmt: skip
    return found


def _straight(pair: Pair) -> tuple[int, ...]:
    return pair.up.shape[0], pair.down.shape[1]


def _is_square(pair: Pair) -> bool:
    return pair.up.shape[0] == pair.down.shape[1]


def _refuse_misfit(module: str, weight: OutputTensor, pair: Pair) -> None:
    strange = next((one.source for one in (weight, pair.up, pair.down) if one.source.dtype.kind != "float"), None)
    if strange is not None:
        raise Incompatible(
            f"`{strange.key}` is of {strange.dtype}: an adapter is folded into float weights only",
            hint="fold it into the base model as it was before it was quantized",
        )
    fits = len(weight.shape) == len(pair.up.shape) == len(pair.down.shape) == 2 and weight.window is None
    fits = fits and 0 < pair.rank == pair.up.shape[1]
    straight = _straight(pair) if fits else ()
    allowed = {straight[::-1]} if pair.is_embedding else {straight, straight[::-1]}
    if not fits or weight.shape not in allowed:
        shapes = ", ".join(shape_text(one.shape) for one in (weight, pair.up, pair.down))
        raise Incompatible(f"shapes of `{module}`: weight, lora_B and lora_A ({shapes}) do not fit together")


def is_turned(model: PeftModel, chosen: Adapter, config: AdapterConfig) -> bool:
    """Tell whether square weights are stored as (in, out): as the others are, or as the configuration says.

    Raises:
        Incompatible: There are square ones, and the shapes of the others contradict the configuration; or nothing is
            known of modules whose names are those of GPT-2's.
    """
    seen: set[bool] = set()
    square = []
    for module, pair in chosen.pairs.items():
        weight = model.base.get(f"{module}.weight")
        if pair.is_embedding or weight is None or len(pair.up.shape) != 2 or len(pair.down.shape) != 2:
            continue
        if _is_square(pair):
            square.append(module)
        else:
            seen.add(weight.shape != _straight(pair))
    said = config.values.get("fan_in_fan_out")
    believed = {said} if isinstance(said, bool) else set()
    if square and len(seen | believed) > 1:
        raise Incompatible(
            f"whether {few(square)} are stored as (in, out) or (out, in) cannot be told: shapes of other weights "
            f"contradict fan_in_fan_out in {config.source}",
            hint="fold it with peft: merge_and_unload()",
        )
    if not seen and not believed and any(_CONV1D.search(module) for module in square):
        raise Incompatible(
            f"whether {few(square)} are stored as (in, out) or (out, in) cannot be told from {config.source}",
            hint=f"give a whole {ADAPTER_CONFIG} with --adapter-config: it says fan_in_fan_out",
        )
    return next(iter(seen | believed)) if len(seen | believed) == 1 else False
