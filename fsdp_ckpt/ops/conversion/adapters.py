"""Part a model that PEFT wrapped into the model and its adapter, or fold the adapter into the model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdp_ckpt.errors import AmbiguousPart, Incompatible, NameCollision, UsageError
from fsdp_ckpt.ops.conversion.adapter_config import ADAPTER_CONFIG, AdapterConfig, write_adapter_config
from fsdp_ckpt.ops.conversion.adapter_sums import additions, is_turned
from fsdp_ckpt.ops.validation.wording import counted, few
from fsdp_ckpt.plan.lora import PREFIX, Adapter, PeftKind, PeftModel, has_adapter, is_wrapped, parse_name, sort_tensors
from fsdp_ckpt.plan.merge import find_tie_candidates
from fsdp_ckpt.plan.output import OutputTensor

__all__ = ["ADAPTER_FILE", "AdapterExport", "BaseModel", "base_of", "export_adapter", "holds_wrapped_model"]

ADAPTER_FILE = "adapter_model.safetensors"
"""What PEFT calls the file of an adapter's tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterExport:
    """An adapter as PEFT saves it.

    Attributes:
        tensors: For ``adapter_model.safetensors``.
        config: Bytes of ``adapter_config.json``: the known one unchanged, or one made from what is known; None where
            too little is.
        notes: What became of every tensor that is not among them.
        warnings: What keeps the adapter from being loaded as it is.
    """

    tensors: Sequence[OutputTensor]
    config: bytes | None
    notes: Sequence[str] = field(default=())
    warnings: Sequence[str] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A model under the names that it had before PEFT wrapped it.

    Attributes:
        tensors: In the order of the checkpoint; those with a folded adapter have an ``addition``.
        notes: What was folded, and what became of every tensor that is not among them.
        warnings: What the user should know.
        left_out: What of an adapter is not in it, as it was not to be folded; None for nothing.
    """

    tensors: Sequence[OutputTensor]
    notes: Sequence[str] = field(default=())
    warnings: Sequence[str] = field(default=())
    left_out: str | None = None


def export_adapter(
    tensors: Sequence[OutputTensor], *, config: AdapterConfig | None, adapter: str | None = None
) -> AdapterExport:
    """Take the adapter out of a model, named as PEFT names it in files.

    Args:
        tensors: All tensors of the model, or of an adapter alone.
        config: What is known of the adapter, see ``find_adapter_config``.
        adapter: Which one, where there are several.

    Raises:
        Incompatible: There is no adapter.
        AmbiguousPart: There are several, and none was chosen.
        UsageError: There is none of that name.
        NameCollision: Two tensors would get one name.
    """
    model = sort_tensors(tensors)
    chosen = _choose(model, adapter)
    notes: list[str] = []
    warnings: list[str] = []
    parts = [chosen.tuned, chosen.trained]
    left = dict(model.base)
    if model.has_base:
        biases = {name: left.pop(name) for name in _trained_biases(model, chosen, config)}
    else:
        biases, left = left, {}
    parts.append({model.inner[name]: tensor for name, tensor in biases.items()})
    if left:
        notes.append(f"{counted(len(left), 'tensor')} of the base model left out, such as `{next(iter(left))}`")
    notes += _about_others(model, chosen)
    if model.originals:
        notes.append(f"left out, as they were before training: {few(list(model.originals))}")
    alone = [name for name in chosen.unpaired if (partner := _partner(name)) and partner not in chosen.tuned]
    if alone:
        warnings.append(f"one of a pair of matrices is missing, the other is written: {few(alone)}")
    data = config.data if config is not None else None
    if data is None and config is not None and chosen.pairs and not _strangers(chosen):
        are_turned = is_turned(model, chosen, config)
        modules = {name.rpartition(".")[0] for name in model.base if name.endswith(".weight")}
        data = write_adapter_config(chosen, config, is_turned=are_turned, modules=sorted(modules))
        notes.append(f"{ADAPTER_CONFIG} was made from the shapes and {config.source}")
    if data is None:
        warnings.append(
            f"no {ADAPTER_CONFIG} was found beside the checkpoint, and none is written: PEFT needs it. "
            "Give it with --adapter-config, or --lora-alpha"
        )
    elif config is not None:
        warnings += _contradictions(chosen, config)
    return AdapterExport(
        tensors=[_renamed(tensor, PREFIX + inner) for part in parts for inner, tensor in _disjoint(part, parts)],
        config=data,
        notes=notes,
        warnings=warnings,
    )


def base_of(
    tensors: Sequence[OutputTensor], *, fold: bool, config: AdapterConfig | None = None, adapter: str | None = None
) -> BaseModel:
    """Return the model without what PEFT put around it; of modules that were trained as a whole, the trained copy.

    Args:
        tensors: All tensors of the model.
        fold: Add the adapter to the weights.
        config: What is known of the adapter; needed to fold it.
        adapter: Which one, where there are several.

    Raises:
        Incompatible: There is an adapter only, or none to fold; it is no plain sum with the weights; shapes do not fit.
        AmbiguousPart: There are several adapters, and none was chosen.
        UsageError: There is none of that name, or nothing is known of how much it counts.
        NameCollision: Two tensors would get one name.
    """
    if fold and not has_adapter(tensor.name for tensor in tensors):
        raise Incompatible(
            "there is no adapter to fold: no tensor is called lora_A or lora_B", hint="leave out --fold-lora"
        )
    if not is_wrapped(tensor.name for tensor in tensors):
        return BaseModel(tensors=tensors)
    model = sort_tensors(tensors)
    if not model.has_base:
        raise Incompatible(
            f"{counted(len(tensors), 'tensor')} of an adapter, without the model that it is for",
            hint="write it as an adapter: --to adapter",
        )
    needs_choice = fold or sum(bool(one.trained) for one in model.adapters.values()) > 1
    chosen = _choose(model, adapter) if needs_choice or len(model.adapters) == 1 or adapter is not None else None
    trained = dict(chosen.trained) if chosen is not None else _any_trained(model)
    found = _together(tensors, model, trained)
    notes: list[str] = []
    warnings: list[str] = []
    left_out: str | None = None
    if trained:
        notes.append(f"as trained, from modules_to_save: {few(list(trained))}")
    replaced = [name for name in model.originals if name in trained]
    if replaced:
        notes.append(f"left out, as they were before training: {few(replaced)}")
    kept = [name for name in model.originals if name not in trained]
    if kept:
        notes.append(f"as they were before training, for the trained copies are not there: {few(kept)}")
    if fold:
        assert chosen is not None
        sums = additions(model, chosen, config)
        found = {name: replace(tensor, addition=sums.get(name)) for name, tensor in found.items()}
        scales = Counter(f"{addition.scale:g}" for addition in sums.values())
        weights = counted(len(sums), "weight")
        notes.append(f"folded adapter `{chosen.name}` into {weights}, times {', '.join(scales)}")
        warnings += _untied(found)
    else:
        dropped = [tensor.name for one in model.adapters.values() for tensor in one.tuned.values()]
        if dropped:
            left_out = f"{counted(len(dropped), 'tensor')} of the adapter left out, such as `{dropped[0]}`"
    if chosen is not None and fold:
        notes += _about_others(model, chosen)
    inner = [_renamed(tensor, name) for name, tensor in found.items()]
    return BaseModel(tensors=inner, notes=notes, warnings=warnings, left_out=left_out)


def holds_wrapped_model(tensors: Sequence[OutputTensor]) -> bool:
    """Tell whether there is a model in PEFT's wrapping, rather than a plain one or an adapter alone."""
    names = [tensor.name for tensor in tensors]
    if any(name.startswith("prompt_encoder.") for name in names) or not is_wrapped(names):
        return False
    return sort_tensors(tensors).has_base


def _disjoint(
    part: Mapping[str, OutputTensor], parts: Sequence[Mapping[str, OutputTensor]]
) -> Iterable[tuple[str, OutputTensor]]:
    """Yield what is in a part and in no other one."""
    for name, tensor in part.items():
        for other in parts:
            if other is not part and name in other:
                raise NameCollision(f"`{tensor.name}` and `{other[name].name}` would both be named `{PREFIX}{name}`")
        yield name, tensor


def _choose(model: PeftModel, asked: str | None) -> Adapter:
    names = list(model.adapters)
    if not names:
        raise Incompatible(
            "there is no adapter: no tensor is called lora_A, lora_B or modules_to_save",
            hint="--to hf or --to safetensors for a model without one",
        )
    if asked is not None:
        if asked not in names:
            raise UsageError(f"there is no adapter `{asked}`", hint=f"there are: {', '.join(names)}")
        return model.adapters[asked]
    if len(names) > 1:
        raise AmbiguousPart(
            f"there are {len(names)} adapters: {few(names)}", hint=f"choose one: --adapter {names[0]}"
        )  # fmt: skip
    return model.adapters[names[0]]


def _any_trained(model: PeftModel) -> dict[str, OutputTensor]:
    return next((dict(one.trained) for one in model.adapters.values() if one.trained), {})


def _together(
    tensors: Sequence[OutputTensor], model: PeftModel, trained: Mapping[str, OutputTensor]
) -> dict[str, OutputTensor]:
    """Return the model's tensors by their names in it, in the order of the checkpoint."""
    for name, tensor in trained.items():
        if name in model.base:
            raise NameCollision(f"`{model.base[name].name}` and `{tensor.name}` would both be named `{name}`")
    all_of_it = {**model.originals, **model.base, **trained}
    names = [parse_name(tensor.name) for tensor in tensors]
    order = dict.fromkeys(name.base for name in names if name.kind is not PeftKind.TUNED)
    return {name: all_of_it[name] for name in order if name in all_of_it}


def _renamed(tensor: OutputTensor, name: str) -> OutputTensor:
    return tensor if tensor.name == name else replace(tensor, name=name, path=())


def _about_others(model: PeftModel, chosen: Adapter) -> list[str]:
    return [
        f"{counted(len(one.tuned) + len(one.trained), 'tensor')} of adapter `{one.name}` left out"
        for one in model.adapters.values()
        if one is not chosen
    ]


def _trained_biases(model: PeftModel, chosen: Adapter, config: AdapterConfig | None) -> list[str]:
    """Return the biases of the base model that the configuration says were trained along."""
    bias = config.bias if config is not None else "none"
    if bias == "all":
        return [name for name in model.base if name.rpartition(".")[2] == "bias"]
    if bias == "lora_only":
        return [f"{module}.bias" for module in chosen.pairs if f"{module}.bias" in model.base]
    return []


def _partner(name: str) -> str | None:
    """Return what the other matrix of a pair is called in an adapter's files; None for what is none of a pair."""
    match = re.fullmatch(r"(.*\.lora_(?:embedding_)?)([AB])((?:\.weight)?)", name)
    return match[1] + ("B" if match[2] == "A" else "A") + match[3] if match is not None else None


def _strangers(chosen: Adapter) -> list[str]:
    """Return tensors of other methods than LoRA."""
    return [name for name in chosen.unpaired if ".lora_" not in name]


def _contradictions(chosen: Adapter, config: AdapterConfig) -> list[str]:
    found = []
    if config.changed_base is not None:
        found.append(
            f"{config.source} says init_lora_weights {config.changed_base}, which changes the base model as well: the "
            "adapter fits the weights of this checkpoint only"
        )
    for module, pair in chosen.pairs.items():
        try:
            config.scale(module, pair.rank)
        except Incompatible as error:
            found.append(error.message)
            break
    return found


def _untied(found: Mapping[str, OutputTensor]) -> Iterable[str]:
    """Warn of a pair that may be one tensor, of which only one gets an adapter."""
    pair = find_tie_candidates([replace(tensor, name=name) for name, tensor in found.items()])
    if pair is not None and (pair[0].addition is None) != (pair[1].addition is None):
        changed, same = pair if pair[0].addition is not None else pair[::-1]
        yield (
            f"the adapter changes `{changed.name}` and not `{same.name}`: they are no longer one tensor, should they "
            "have been"
        )
