"""Tell which saved optimizer belongs to which live one: that of the same parameters, in whatever order they come.

Two models may have the same names (a generator and its average, an actor and a critic), so that a wrong pair would
load without a word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from fsdp_ckpt.layouts.manifest import Manifest
from fsdp_ckpt.train.modules import LiveModel
from fsdp_ckpt.train.optimizers import find_slots
from fsdp_ckpt.train.subjects import all_slots, models_of

__all__ = ["digest_of", "pair_optimizers"]


def digest_of(names: Iterable[str]) -> str:
    """Return a short text that tells sets of parameters apart."""
    return hashlib.sha256("\n".join(sorted(names)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def pair_optimizers(
    optimizers: Mapping[str, torch.optim.Optimizer], models: Mapping[str, LiveModel], manifest: Manifest | None
) -> list[int]:
    """Return the number of the saved optimizer for each live one.

    Args:
        optimizers: The live ones.
        models: The live models.
        manifest: What the checkpoint says, where we wrote it. Accelerate's optimizer ``i`` is that of model ``i``.

    Raises:
        UsageError: An optimizer holds parameters that cannot be told apart.
    """
    held = [tuple(models_of(optimizer, models)) for optimizer in optimizers.values()]
    order = list(range(len(held)))
    numbers = {name: number for number, name in enumerate(models)}
    if manifest is None:
        found = [numbers[names[0]] if len(names) == 1 else order[index] for index, names in enumerate(held)]
        return found if len(set(found)) == len(found) else order
    saved_names = [member.name for member in manifest.models]
    saved = {
        name: name if name in saved_names or not name.isdecimal() else dict(enumerate(saved_names)).get(number)
        for name, number in numbers.items()
    }
    slots = all_slots(models)
    pairs: list[int] = []
    for index, (names, optimizer) in enumerate(zip(held, optimizers.values(), strict=True)):
        wanted = {saved[name] for name in names}
        fits = [number for number, member in enumerate(manifest.optimizers) if set(member.of) == wanted]
        mine = digest_of(name for row in find_slots(optimizer, slots) for slot in row for name in slot.names)
        same = [number for number in fits if manifest.optimizers[number].facts.get("parameters") == mine]
        free = [number for number in same or fits if number not in pairs]
        pairs.append(free[0] if free else order[index])
    return pairs if len(set(pairs)) == len(pairs) else order
