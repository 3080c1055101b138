"""Make groups of parameters again where only the options of each parameter were saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_ckpt.catalog import ObjectEntry, TensorEntry
from fsdp_ckpt.codec.value_writer import encode_pickle
from fsdp_ckpt.errors import Incompatible
from fsdp_ckpt.ops.conversion.optimizer_leaves import Leaf, OptimizerLeaves
from fsdp_ckpt.units import counted

__all__ = ["grouped_by_options"]


def grouped_by_options(
    leaves: OptimizerLeaves,
    values: Callable[[ObjectEntry], Any],
    scalars: Callable[[TensorEntry], bytes] | None,
) -> list[list[str]]:
    """Return parameters with equal options together, in the order in which they come.

    Args:
        leaves: A flattened optimizer.
        values: Reads an object.
        scalars: Reads a small tensor.

    Raises:
        Incompatible: A parameter with state has no options; or options are tensors, and there is nobody to read them.
    """
    stateful = [name for name in leaves.state if name not in leaves.options]
    if stateful:
        raise Incompatible(
            f"`{leaves.name}`: `{stateful[0]}` has state, but no options such as a learning rate: they were saved for "
            f"{counted(len(leaves.options), 'parameter')} only",
            hint="take the model alone with --part model; fsdp-ckpt reshard keeps an optimizer as it is",
        )

    def content(leaf: Leaf) -> Any:
        if not isinstance(leaf.source, TensorEntry):
            return leaf.read(values)
        if scalars is None:
            raise Incompatible(f"`{leaf.source.key}` is a tensor: which parameters were one group cannot be told")
        return leaf.source.dtype.name, leaf.source.shape, scalars(leaf.source)

    found: dict[bytes, list[str]] = {}
    for name, options in leaves.options.items():
        # What is equal has equal pickles here, while 1, 1.0 and True are equal to Python, and NaN is not to itself.
        pickles = sorted(
            encode_pickle((option, content(leaf)), what=f"`{leaves.name}`: the options of `{name}`")
            for option, leaf in options.items()
        )
        found.setdefault(b"".join(pickles), []).append(name)
    return list(found.values())
