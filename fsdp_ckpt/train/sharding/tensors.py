"""The tensors of a model, each of them once, with every place where a module holds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Held", "Signature", "held_tensors"]

Signature = tuple[str, ...]
"""What has to be the same on all ranks of a tensor: names, kind, shape, dtype."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """A parameter or buffer.

    Attributes:
        names: Full names; several when it is tied.
        places: Modules that hold it, and the name that it has there.
        is_param: Parameter or buffer.
        persistent: Whether checkpoints hold it.
    """

    names: Sequence[str]
    places: Sequence[tuple[nn.Module, str]]
    is_param: bool
    persistent: bool

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def tensor(self) -> Tensor:
        """What is there now."""
        return next(self.everywhere())

    def everywhere(self) -> Iterator[Tensor]:
        """Yield what is at each of its places."""
        for module, name in self.places:
            found = (module._parameters if self.is_param else module._buffers)[name]
            assert found is not None
            yield found

    @property
    def is_meta(self) -> bool:
        """Whether it has no values."""
        return self.tensor.is_meta

    def put(self, tensor: Tensor) -> None:
        """Replace it at all of its places, so that what is tied stays tied."""
        for module, name in self.places:
            if self.is_param:
                module._parameters[name] = tensor  # type: ignore[assignment]
            else:
                module._buffers[name] = tensor

    def like(self, values: Tensor) -> Tensor:
        """Return values as what it is: a parameter that is trained or not, with attributes that were set on it."""
        if not self.is_param:
            return values
        old: Any = self.tensor
        param: Any = nn.Parameter(values, requires_grad=old.requires_grad)
        param.__dict__.update(old.__dict__)
        return param  # type: ignore[no-any-return]

    def materialize(self, device: torch.device, fill: Any = None) -> None:
        """Give it memory; its values are whatever is there, or all alike."""
        held: Any = self.tensor.detach()
        values = torch.empty_like(held, device=device)
        if fill is not None:
            values.fill_(fill)
        self.put(self.like(values))

    def signature(self) -> Signature:
        """Return what all ranks must agree on."""
        held = self.tensor
        kind = "parameter" if self.is_param else "buffer" if self.persistent else "buffer that is not saved"
        trained = "trained" if held.requires_grad else "not trained"
        return (" = ".join(self.names), kind, str(tuple(held.shape)), str(held.dtype), trained)


def held_tensors(model: nn.Module) -> list[Held]:
    """Return the parameters and buffers of a model, in the order of its modules."""
    names: dict[int, list[str]] = {}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    first: dict[int, tuple[bool, bool]] = {}
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for is_param, tensors in ((True, module._parameters), (False, module._buffers)):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                names.setdefault(id(tensor), []).append(prefix + name)
                places.setdefault(id(tensor), []).append((module, name))
                persistent = name not in module._non_persistent_buffers_set
                _, before = first.setdefault(id(tensor), (is_param, persistent))
                first[id(tensor)] = (is_param, before or persistent)
    return [
        Held(names=names[key], places=places[key], is_param=is_param, persistent=persistent)
        for key, (is_param, persistent) in first.items()
    ]
