"""The space of FSDP files that `accelerate config` can write, and a sample of it that has every pair of answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

from tests.compat.accelerate_answers import Answers

Axes = Mapping[str, Sequence[Answers]]

_START: Answers = {
    "Which type of machine": 4,
    "Do you want to use FullyShardedDataParallel?": "yes",
    "How many GPU(s) should be used": "8",
}
_WRAP: Sequence[Answers] = (
    {"auto wrap policy": 0, "`_no_split_modules`": "yes"},
    {"auto wrap policy": 0, "comma-separated list of transformer layer class": "BertLayer"},
    {"auto wrap policy": 0, "comma-separated list of transformer layer class": "BertLayer,T5Block,BertSelfOutput"},
    {"auto wrap policy": 1},
    {"auto wrap policy": 1, "minimum number of parameters": "2000"},
    {"auto wrap policy": 2},
)
_FP8 = {"mixed precision?": 3}
_CUSTOM_DYNAMO = {"torch dynamo": "yes", "customize the defaults": "yes"}
_JOB: Axes = {
    "precision": (
        {},
        {"mixed precision?": 1},
        {"mixed precision?": 2},
        {**_FP8, "Which FP8 backend": 0},
        {**_FP8, "Which FP8 backend": 0, "float8 all gather": "no", "pad the inner": "no"},
        {**_FP8, "Which FP8 backend": 1, "autocast during eval": "yes", "What margin": "2", "weight format": 1},
        {**_FP8, "Which FP8 backend": 1, "GEMMS in higher precision": "yes", "Should `dgrad`": "yes"},
        {**_FP8, "Which FP8 backend": 2, "optimization level": 0},
    ),
    "machines": (
        {},
        {
            "How many different machines": "2",
            "rank of this machine": 1,
            "IP address": "10.0.0.1",
            "What is the port": "0",
        },
        {
            "How many different machines": "4",
            "rank of this machine": 0,
            "IP address": "node-0",
            "What is the port": "29400",
            "same local network": "no",
            "rendezvous backend": "c10d",
        },
    ),
    "dynamo": (
        {},
        {"torch dynamo": "yes"},
        {"torch dynamo": "yes", "Which dynamo backend": 1},
        {**_CUSTOM_DYNAMO, "Which mode": 2, "fullgraph mode": "yes", "dynamic shape": "yes"},
        {**_CUSTOM_DYNAMO, "Which mode": 1, "regional compilation": "yes"},
    ),
    "debug": ({}, {"checked while running for errors": "yes"}),
}
_BOTH: Axes = {
    "offload": ({}, {"offload parameters and gradients": "yes"}),
    "wrap": _WRAP,
    "checkpointing": ({}, {"FSDP activation checkpointing": "yes"}),
    **_JOB,
}
_SIZES = "use the parallelism config?"
FSDP1: Axes = {
    "version": ({"FSDP version": 0},),
    "strategy": tuple({"your sharding strategy": i} for i in range(5)),
    "backward": tuple({"backward prefetch policy": i} for i in range(3)),
    "state": tuple({"state dict type": i} for i in range(3)),
    "forward": ({}, {"forward prefetch": "yes"}),
    "original": ({}, {"`use_orig_params`": "no"}),
    "loading": (
        {},
        {"CPU RAM efficient": "no"},
        {"CPU RAM efficient": "no", "broadcast module parameters": "no"},
    ),
    **_BOTH,
}
FSDP2: Axes = {
    "version": ({"FSDP version": 1},),
    "reshard": ({}, {"resharding after forward": "no"}),
    "state": tuple({"state dict type": i} for i in range(2)),
    "loading": ({}, {"CPU RAM efficient": "no"}),
    "sizes": (
        {},
        {_SIZES: "yes", "FSDP shard size": "8"},
        {_SIZES: "yes", "replicate size": "2", "FSDP shard size": "4"},
        {_SIZES: "yes", "FSDP shard size": "2", "tensor parallelism size": "2", "context parallelism size": "2"},
        {_SIZES: "yes", "context parallelism size": "8", "communication strategy": 1},
    ),
    **_BOTH,
}


def _merged(parts: Sequence[Answers]) -> Answers:
    answers = {**_START, **{key: value for part in parts for key, value in part.items()}}
    return answers if "auto wrap policy" in answers else {**answers, **_WRAP[1]}


def every(axes: Axes, *names: str) -> Iterator[Answers]:
    """Yield every combination of some axes, the others at their defaults."""
    for choice in product(*(axes[name] for name in ("version", *names))):
        yield _merged(choice)


def pairwise(axes: Axes) -> Iterator[Answers]:
    """Yield files among which every two answers of different axes come together at least once."""
    chance = random.Random(20)
    sizes = [len(axis) for axis in axes.values()]
    missing = {
        (a, i, b, j) for a, b in combinations(range(len(sizes)), 2) for i in range(sizes[a]) for j in range(sizes[b])
    }
    while missing:
        a, i, b, j = min(missing)
        tries = [[chance.randrange(size) for size in sizes] for _ in range(30)]
        for choice in tries:
            choice[a], choice[b] = i, j
        best = max(tries, key=lambda choice: len(missing & _pairs(choice)))
        missing -= _pairs(best)
        yield _merged([axis[k] for axis, k in zip(axes.values(), best, strict=True)])


def _pairs(choice: Sequence[int]) -> set[tuple[int, int, int, int]]:
    return {(a, choice[a], b, choice[b]) for a, b in combinations(range(len(choice)), 2)}


ANSWERS: Sequence[Answers] = (
    *pairwise(FSDP1),
    *every(FSDP1, "strategy", "backward", "state"),
    *every(FSDP1, "strategy", "loading", "original", "forward"),
    *every(FSDP1, "wrap", "precision"),
    *pairwise(FSDP2),
    *every(FSDP2, "reshard", "offload", "state", "loading", "checkpointing"),
    *every(FSDP2, "wrap", "reshard", "sizes"),
    *every(FSDP2, "machines", "dynamo", "debug"),
)
