"""Random states of this process: Python, NumPy, torch, and every device, under Accelerate's and the Trainer's names.

One file per rank. A rank gets its own states back, all of them or, with the reason, none: streams of several ranks
are never mixed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from fsdp_ckpt.errors import MalformedFile

__all__ = ["RNG_FILE", "collect_random_state", "restore_random_state"]

RNG_FILE = "random_states_{rank}.pkl"

_TRAINER_NAMES = {"python": "random_state", "numpy": "numpy_random_seed", "cpu": "torch_manual_seed"}
"""transformers/trainer.py by accelerate/checkpointing.py; devices are ``cuda`` by ``torch_cuda_manual_seed``."""


def collect_random_state(step: int | None) -> dict[str, Any]:
    """Return all states of this process, as ``accelerate.checkpointing.save_accelerator_state`` names them."""
    found: dict[str, Any] = {
        "step": step or 0,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    for kind, module in _devices():
        found[f"torch_{kind}_manual_seed"] = module.get_rng_state_all()
    return found


def restore_random_state(saved: Mapping[str, Any], where: str) -> tuple[Callable[[], None], list[str]]:
    """Check the states in a file.

    Returns:
        A function that sets them, and sentences about what it will not set.

    Raises:
        MalformedFile: A state is missing or has another form.
    """
    states = {_TRAINER_NAMES.get(name, name): value for name, value in saved.items()}
    states |= {f"torch_{kind}_manual_seed": saved[kind] for kind, _ in _devices() if kind in saved}
    lacking = [name for name in _TRAINER_NAMES.values() if name not in states]
    if lacking:
        raise MalformedFile(f"{where}: no {', '.join(lacking)}; it holds: {', '.join(map(str, saved)) or 'nothing'}")
    try:
        random.Random().setstate(states["random_state"])
        np.random.RandomState().set_state(states["numpy_random_seed"])
        torch.Generator().set_state(states["torch_manual_seed"].cpu())
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise MalformedFile(f"{where}: not a random state: {error}") from None
    notes: list[str] = []
    devices: list[tuple[Any, int, Any]] = []
    for kind, module in _devices():
        device_states = states.get(f"torch_{kind}_manual_seed")
        if device_states is None:
            notes.append(f"no random states of {kind} devices were saved; theirs are left as they are")
            continue
        if isinstance(device_states, torch.Tensor):  # the Trainer saves one where it drives one device
            device_states = [device_states]
        count = module.device_count()
        if len(device_states) != count:
            notes.append(
                f"random states of {len(device_states)} {kind} devices were saved, this process sees {count}: "
                f"the first {min(count, len(device_states))} are restored"
            )
        devices += [(module, index, state) for index, state in enumerate(device_states[:count])]

    def restore() -> None:
        random.setstate(states["random_state"])
        np.random.set_state(states["numpy_random_seed"])
        torch.set_rng_state(states["torch_manual_seed"].cpu())
        for module, index, state in devices:
            module.set_rng_state(state.cpu(), index)

    return restore, notes


def _devices() -> Iterator[tuple[str, Any]]:
    """Yield the kinds of accelerator at hand, and their modules (torch.cuda, torch.xpu)."""
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            yield kind, module
