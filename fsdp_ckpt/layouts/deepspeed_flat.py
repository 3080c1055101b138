"""Where the elements of a parameter lie in DeepSpeed's flat partitions. Arithmetic only.

Up to ZeRO-2 the parameters of a group stand one after the other in one long vector, of which each rank has an equal
part (``stage_1_and_2.py``). In ZeRO-3 every parameter is cut for itself, into W parts of ``ceil(numel / W)`` elements,
and a rank's vectors hold its parts one after the other (``stage3.py``, ``zero_to_fp32.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_ckpt.errors import MalformedFile

__all__ = ["Member", "Segment", "cut_members", "cut_vector"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A parameter in a vector.

    Attributes:
        name: Its name.
        numel: Its elements.
        padding: Elements after it that belong to nobody.
    """

    name: str
    numel: int
    padding: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of a parameter's elements that one rank holds.

    Attributes:
        rank: The rank.
        group: The number of its vector.
        start: First element of the run in that vector.
        first: First element of the run in the parameter, counted in row-major order.
        numel: Elements of the run.
    """

    rank: int
    group: int
    start: int
    first: int
    numel: int


def cut_vector(
    group: int, members: Sequence[Member], sizes: Mapping[int, int], world_size: int
) -> dict[str, list[Segment]]:
    """Return where the parameters of a vector lie that was cut into equal parts (up to ZeRO-2).

    Args:
        group: The vector's number, for the segments.
        members: What stands in it, in order.
        sizes: Elements that each rank has of it, by rank. Some ranks may be missing, and DeepSpeed cuts padding off
            the end of parts, so that the last ones may be shorter than the others, or empty.
        world_size: Ranks that it was cut for.

    Raises:
        MalformedFile: The parts are not of one vector, or not of this one.
    """
    align = 2 * world_size
    needed = sum(member.numel + member.padding for member in members)
    part = max((size for rank, size in sizes.items() if rank < world_size - 1), default=0)
    if world_size == 1 or len(sizes) < world_size:  # those that are here may be the shorter ones
        part = max(part, _aligned(needed, align) // world_size)
    shorter = [rank for rank in sorted(sizes) if sizes[rank] < part]
    if shorter and any(sizes[rank] for rank in sizes if rank > shorter[0]):
        raise MalformedFile(f"group {group}: rank {shorter[0]} has {sizes[shorter[0]]} elements, others {part}")
    if world_size > 1 and any(size > part for size in sizes.values()):
        raise MalformedFile(f"group {group}: the last rank has more elements than the others, {part}")
    have = sum(sizes.values())
    if len(sizes) == world_size and _aligned(have, align) != _aligned(needed, align):
        raise MalformedFile(f"group {group}: its parameters have {needed} elements, those of the ranks {have}")
    found: dict[str, list[Segment]] = {}
    position = 0
    for member in members:
        segments = found.setdefault(member.name, [])
        for rank in range(position // part, -(-(position + member.numel) // part)) if member.numel else ():
            begin = max(position, rank * part)
            end = min(position + member.numel, rank * part + sizes.get(rank, 0))
            if begin < end:
                start = begin - rank * part
                segment = Segment(rank=rank, group=group, start=start, first=begin - position, numel=end - begin)
                segments.append(segment)
        position += member.numel + member.padding
    return found


def cut_members(
    members: Sequence[Member], sizes: Mapping[int, Sequence[int]], world_size: int
) -> dict[str, list[Segment]]:
    """Return where parameters lie that were cut one by one (ZeRO-3).

    Args:
        members: All of them, in order.
        sizes: Elements of each vector of a rank, by rank; together they are one run.
        world_size: Ranks that they were cut for.

    Raises:
        MalformedFile: The vectors have another size.
    """
    needed = sum(-(-member.numel // world_size) for member in members)
    for rank, lengths in sizes.items():
        if sum(lengths) != needed:
            raise MalformedFile(f"rank {rank} has {sum(lengths)} elements of its parameters, {needed} are expected")
    found: dict[str, list[Segment]] = {}
    position = 0
    for member in members:
        share = -(-member.numel // world_size)
        segments = found.setdefault(member.name, [])
        for rank, lengths in sizes.items():
            numel = min(share, member.numel - rank * share)  # the last ranks' parts are padded, or only padding
            segments += _within(rank, lengths, position, numel, rank * share)
        position += share
    return found


def _within(rank: int, lengths: Sequence[int], position: int, numel: int, first: int) -> list[Segment]:
    """Cut a run of all of a rank's vectors at the vectors' ends."""
    found, begin = [], 0
    for group, length in enumerate(lengths):
        low, high = max(position, begin), min(position + numel, begin + length)
        if low < high:
            segment = Segment(rank=rank, group=group, start=low - begin, first=first + low - position, numel=high - low)
            found.append(segment)
        begin += length
    return found


def _aligned(number: int, align: int) -> int:
    return -(-number // align) * align
