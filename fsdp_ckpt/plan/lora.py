"""Tell apart what a model holds that PEFT wrapped: the base model, adapters, modules that were trained as a whole.

In such a model the weight of a layer with an adapter is called ``base_model.model.q_proj.base_layer.weight``, beside
``….q_proj.lora_A.default.weight``; a module that is trained as a whole is there twice, as ``score.original_module``
and ``score.modules_to_save.default``. In the files of an adapter the adapter's name (``default``) is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fsdp_ckpt.errors import Incompatible, NameCollision
from fsdp_ckpt.names import clean_fqn
from fsdp_ckpt.plan.output import OutputTensor

__all__ = [
    "Adapter",
    "Pair",
    "PeftKind",
    "PeftModel",
    "PeftName",
    "has_adapter",
    "is_wrapped",
    "parse_name",
    "sort_tensors",
]

PREFIX = "base_model.model."
"""What PEFT puts before the names of the model that it wraps."""

DEFAULT = "default"
"""PEFT's name for an adapter that nobody named."""

_PREFIX = re.compile(r"(?:.*?\.)??base_model\.model\.")
_TUNED = re.compile(
    r"lora_(?:embedding_)?[AB]|lora_magnitude_vector|trainable_tokens_delta"
    r"|ia3_l|(?:lokr_(?:w[12](?:_[ab])?|t2))|hada_(?:w[12]_[ab]|t[12])|oft_[rRs]|boft_[RsS]|vera_lambda_[bd]"
)
_LORA = re.compile(r"lora_(?:embedding_)?[AB]")
_LEAVES = ("weight", "bias")


class PeftKind(StrEnum):
    """What a tensor is to PEFT."""

    BASE = "base"
    """Of the model itself."""
    TUNED = "tuned"
    """Of an adapter: what is added to, or multiplied with, a weight."""
    TRAINED = "trained"
    """The copy of a module that was trained as a whole (``modules_to_save``)."""
    ORIGINAL = "original"
    """The copy of such a module as it was before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftName:
    """A name, taken apart.

    Attributes:
        kind: What it is.
        module: The module that it belongs to, as the base model calls it.
        part: What of an adapter it is (``lora_A``); empty for others.
        leaf: The last component (``weight``); empty where a name ends with the part.
        adapter: The adapter, ``default`` where none is named; empty for tensors that belong to none.
        inner: The name without PEFT's prefix, adapter and copy, as in the files of an adapter.
    """

    kind: PeftKind
    module: str
    part: str = ""
    leaf: str = ""
    adapter: str = ""
    inner: str = ""

    @property
    def base(self) -> str:
        """The tensor's name in the base model."""
        return f"{self.module}.{self.leaf}" if self.module else self.leaf


def parse_name(name: str) -> PeftName:
    """Take a name apart; wrappers (``_orig_mod.``) are taken off first.

    Example:
        >>> found = parse_name("base_model.model.layers.0.q_proj.lora_A.default.weight")
        >>> found.module, found.part, found.adapter, found.inner
        ('layers.0.q_proj', 'lora_A', 'default', 'layers.0.q_proj.lora_A.weight')
        >>> parse_name("base_model.model.score.modules_to_save.default.weight").base
        'score.weight'
    """
    name = clean_fqn(name)
    prefix = _PREFIX.match(name)
    words = (name[prefix.end() :] if prefix is not None else name).split(".")
    for place, word in enumerate(words):
        if place and _TUNED.fullmatch(word) is not None and (found := _tuned(words, place)) is not None:
            return found
        if place and word == "modules_to_save" and len(words) > place + 2:
            rest = [*words[:place], *words[place + 2 :]]
            return _plain(PeftKind.TRAINED, rest, adapter=words[place + 1])
        if place and word == "original_module" and len(words) > place + 1:
            return _plain(PeftKind.ORIGINAL, [*words[:place], *words[place + 1 :]])
    return _plain(PeftKind.BASE, words)


def _tuned(words: Sequence[str], place: int) -> PeftName | None:
    rest = list(words[place + 1 :])
    leaf = rest.pop() if rest and rest[-1] in _LEAVES else ""
    if len(rest) > 1:
        return None
    # PEFT leaves the last component of magnitude vectors out of its files.
    shown = leaf if words[place] != "lora_magnitude_vector" else ""
    inner = [*words[: place + 1], *([shown] if shown else [])]
    return PeftName(
        kind=PeftKind.TUNED,
        module=".".join(_unwrapped(words[:place])),
        part=words[place],
        leaf=leaf,
        adapter=rest[0] if rest else DEFAULT,
        inner=".".join(inner),
    )


def _plain(kind: PeftKind, words: Sequence[str], *, adapter: str = "") -> PeftName:
    own = _unwrapped(words)
    return PeftName(
        kind=kind, module=".".join(own[:-1]), leaf=own[-1], adapter=adapter, inner=".".join(words)
    )  # fmt: skip


def _unwrapped(words: Sequence[str]) -> list[str]:
    return [word for word in words if word not in ("base_layer", "token_adapter")]


def has_adapter(names: Iterable[str]) -> bool:
    """Tell whether PEFT has wrapped a model that has tensors of these names, or whether they are an adapter's."""
    return any(parse_name(name).kind in (PeftKind.TUNED, PeftKind.TRAINED) for name in names)


def is_wrapped(names: Iterable[str]) -> bool:
    """Tell whether PEFT has wrapped a model, be it that its adapters were left out."""
    for name in names:
        clean = clean_fqn(name)
        if _PREFIX.match(clean) is not None or parse_name(clean).kind is not PeftKind.BASE:
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What an adapter adds to a matrix.

    Attributes:
        down: ``lora_A``, of shape (rank, in).
        up: ``lora_B``, of shape (out, rank).
        is_embedding: They are of an embedding, whose weight is (in, out).
    """

    down: OutputTensor
    up: OutputTensor
    is_embedding: bool = False

    @property
    def rank(self) -> int:
        """Rows of ``lora_A``."""
        return self.down.shape[0] if self.down.shape else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter.

    Attributes:
        name: How PEFT calls it.
        tuned: Its tensors by name in the files of an adapter, without prefix.
        pairs: LoRA's pairs by module, as the base model calls it.
        trained: Copies of whole modules, by name in the base model.
        unpaired: Tensors of ``tuned`` that are in no pair: other methods, magnitude vectors, one of a pair alone.
    """

    name: str
    tuned: Mapping[str, OutputTensor] = field(default_factory=dict)
    pairs: Mapping[str, Pair] = field(default_factory=dict)
    trained: Mapping[str, OutputTensor] = field(default_factory=dict)
    unpaired: Mapping[str, OutputTensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftModel:
    """A model that PEFT wrapped, or an adapter alone.

    Attributes:
        base: Tensors of the model by their names in it, without those that are trained as a whole.
        originals: Copies of those as they were before, likewise.
        adapters: By name.
        inner: Name in the files of an adapter, without prefix, by name in ``base``.
    """

    base: Mapping[str, OutputTensor]
    originals: Mapping[str, OutputTensor]
    adapters: Mapping[str, Adapter]
    inner: Mapping[str, str]

    @property
    def has_base(self) -> bool:
        """Whether the model is there, rather than an adapter alone.

        Where no module with an adapter has a weight, the other tensors are those that an adapter's files hold beside
        its own: whole modules, biases.
        """
        tuned = [name for adapter in self.adapters.values() for name in adapter.tuned]
        modules = {parse_name(name).module for name in tuned}
        return any(f"{module}.weight" in self.base for module in modules) if modules else bool(self.base)


def sort_tensors(tensors: Sequence[OutputTensor]) -> PeftModel:
    """Tell apart base model, adapters and copies; no tensor is left out.

    Args:
        tensors: All tensors of a model.

    Raises:
        NameCollision: Two tensors would get one name.
        Incompatible: It is a prompt-tuned model, of whose names the prefix is not certain.
    """
    base: dict[str, OutputTensor] = {}
    originals: dict[str, OutputTensor] = {}
    inner: dict[str, str] = {}
    tuned: dict[str, dict[str, tuple[PeftName, OutputTensor]]] = {}
    trained: dict[str, dict[str, OutputTensor]] = {}
    for tensor in tensors:
        if tensor.name.startswith("prompt_encoder."):
            raise Incompatible(f"`{tensor.name}` is of prompt tuning, not of an adapter", hint="save it with PEFT")
        name = parse_name(tensor.name)
        match name.kind:
            case PeftKind.BASE:
                _put(base, name.base, tensor)
                inner[name.base] = name.inner
            case PeftKind.ORIGINAL:
                _put(originals, name.base, tensor)
            case PeftKind.TRAINED:
                _put(trained.setdefault(name.adapter, {}), name.base, tensor)
            case PeftKind.TUNED:
                group = tuned.setdefault(name.adapter, {})
                if name.inner in group:
                    raise _collision(group[name.inner][1], tensor, name.inner)
                group[name.inner] = name, tensor
    adapters = {
        name: _adapter(name, tuned.get(name, {}), trained.get(name, {})) for name in dict.fromkeys([*tuned, *trained])
    }
    return PeftModel(base=base, originals=originals, adapters=adapters, inner=inner)


def _put(group: dict[str, OutputTensor], name: str, tensor: OutputTensor) -> None:
    if name in group:
        raise _collision(group[name], tensor, name)
    group[name] = tensor


def _collision(first: OutputTensor, second: OutputTensor, name: str) -> NameCollision:
    return NameCollision(
        f"`{first.name}` and `{second.name}` would both be named `{name}`",
        hint="keep them apart with --rename, or leave one out with --exclude",
    )


def _adapter(
    name: str, tuned: Mapping[str, tuple[PeftName, OutputTensor]], trained: Mapping[str, OutputTensor]
) -> Adapter:
    sides: dict[tuple[str, str], dict[str, OutputTensor]] = {}
    for parsed, tensor in tuned.values():
        if _LORA.fullmatch(parsed.part) is not None and parsed.leaf != "bias":
            place = parsed.inner.partition(f".{parsed.part}")[0], parsed.part[:-1]
            sides.setdefault(place, {})[parsed.part[-1]] = tensor
    pairs: dict[str, Pair] = {}
    paired: set[int] = set()
    for (where, part), both in sides.items():
        module = ".".join(_unwrapped(where.split(".")))
        if both.keys() == {"A", "B"} and module not in pairs:  # a second one is of another parameter of the module
            pairs[module] = Pair(down=both["A"], up=both["B"], is_embedding="embedding" in part)
            paired |= {id(both["A"]), id(both["B"])}
    return Adapter(
        name=name,
        tuned={inner: tensor for inner, (_, tensor) in tuned.items()},
        pairs=pairs,
        trained=trained,
        unpaired={inner: tensor for inner, (_, tensor) in tuned.items() if id(tensor) not in paired},
    )
