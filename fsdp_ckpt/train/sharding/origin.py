"""Where the first values of a model come from; decided alike on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch.distributed.tensor import DTensor

from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.sharding.tensors import Held

__all__ = ["Holding", "Origin", "choose_origin"]


class Origin(StrEnum):
    """Where values come from."""

    OWN = "each rank has them"
    FIRST = "rank 0 sends them"
    MADE = "rank 0 makes and sends them"
    FILE = "each rank reads them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a rank has of a model.

    Attributes:
        num_tensors: Parameters and buffers, tied ones once.
        num_meta: Those on the meta device.
        example: One of these; ``""`` if there is none.
        parallel: Whether some are DTensors already (tensor parallelism).
    """

    num_tensors: int
    num_meta: int
    example: str
    parallel: bool

    @classmethod
    def of(cls, tensors: Sequence[Held]) -> Holding:
        """Look at the tensors of a model."""
        meta = [held.name for held in tensors if held.is_meta]
        return cls(
            num_tensors=len(tensors),
            num_meta=len(meta),
            example=meta[0] if meta else "",
            parallel=any(isinstance(held.tensor, DTensor) for held in tensors),
        )

    def __str__(self) -> str:
        rest = self.num_meta - 1
        return f"`{self.example}`" + (f" and {rest} more tensors are" if rest else " is") + " on the meta device"


def choose_origin(
    config: FSDPConfig, holdings: Sequence[Holding], *, has_weights: bool, has_initialize: bool
) -> Origin:
    """Decide where values come from.

    Args:
        config: The configuration.
        holdings: What each rank has, by rank.
        has_weights: A checkpoint was given.
        has_initialize: A function was given that makes values.

    Raises:
        UsageError: Some rank would have none.
    """
    if has_weights:
        return Origin.FILE
    first, empty = holdings[0], [rank for rank, holding in enumerate(holdings) if holding.num_meta]
    parallel = any(holding.parallel for holding in holdings)
    if not empty:
        sends = config.cpu_ram_efficient_loading or bool(config.sync_module_states)
        return Origin.FIRST if sends and not parallel else Origin.OWN
    if parallel:
        raise UsageError(
            f"rank {empty[0]}: {holdings[empty[0]]}, in a model that is tensor-parallel already: no rank could send "
            "values of all of it",
            hint="pass weights=, a checkpoint from which each rank reads its own values",
        )
    if first.num_meta:
        _check_making(config, holdings, has_initialize=has_initialize)
        return Origin.MADE
    if config.cpu_ram_efficient_loading:
        return Origin.FIRST
    raise UsageError(
        f"rank {empty[0]}: {holdings[empty[0]]}, and cpu_ram_efficient_loading is false: nobody would give it values",
        hint="set cpu_ram_efficient_loading: true (rank 0 sends its values), or pass weights=",
    )


def _check_making(config: FSDPConfig, holdings: Sequence[Holding], *, has_initialize: bool) -> None:
    """Random values are what was asked for, or the model was not loaded on the rank that should have done so."""
    if has_initialize:
        return
    everywhere = all(holding.num_meta == holding.num_tensors for holding in holdings)
    if not config.cpu_ram_efficient_loading and everywhere:
        return
    raise UsageError(
        f"rank 0: {holdings[0]}, but it is the one that gives values to all ranks",
        hint="load the model on rank 0, or pass weights= (a checkpoint) or initialize= (a function that makes values)",
    )
