"""Which checkpoints of a run stay: the last ones, every so many steps, the best by a number. Steps in, reasons out.

The rule can only add reasons to stay. What it is given are checkpoints that are whole; the newest of them always stays.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_ckpt.errors import UsageError

__all__ = ["Best", "Retention", "choose_kept", "choose_removed", "parse_best"]

_BEST = re.compile(r"(?P<metric>.+?)(?::(?P<mode>min|max))?(?:=(?P<count>[0-9]{1,9}))?", re.DOTALL)
_LOW = re.compile(r"(.*[^a-z])?(loss|perplexity)", re.IGNORECASE | re.DOTALL)
_HIGH = re.compile(r"(.*[^a-z])?accuracy", re.IGNORECASE | re.DOTALL)
_FORM = "write it as METRIC:min=2 or METRIC:max=2, such as eval_loss:min=2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """Keep the best by a number.

    Attributes:
        metric: Its name among the values that were saved with each checkpoint.
        mode: ``min`` where lower is better, ``max`` where higher is.
        count: How many stay, at least 1.
    """

    metric: str
    mode: Literal["min", "max"]
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The rule; a checkpoint stays when any of these asks for it.

    Attributes:
        keep: How many of the last ones stay, at least 1.
        keep_every: Steps that are multiples of this stay for good, step 0 among them; None for no such steps.
        keep_best: The best by these numbers stay, until better ones come.
    """

    keep: int
    keep_every: int | None = None
    keep_best: tuple[Best, ...] = ()

    @classmethod
    def of(
        cls, keep: int | None, keep_every: int | None = None, keep_best: str | Sequence[str] | None = None
    ) -> Retention | None:
        """Check the arguments as users give them; None when everything is to stay.

        Args:
            keep: How many of the last ones stay; None for all.
            keep_every: As the attribute.
            keep_best: ``METRIC[:min|max][=COUNT]``, or several of them.

        Raises:
            UsageError: A number below 1; a text that is no such rule; the others without ``keep``, which could mean
                that nothing is removed or that only these stay.

        Example:
            >>> Retention.of(3, keep_every=1000).keep_every
            1000
        """
        best: Sequence[object] = ()
        if keep_best is not None:
            best = keep_best if isinstance(keep_best, list | tuple) else [keep_best]
        if keep is None:
            if keep_every is not None or best:
                given = "keep_every" if keep_every is not None else "keep_best"
                raise UsageError(
                    f"{given} says what stays beside the last ones, but not how many of those: keep is missing",
                    hint="keep=1 for the newest alone; without any of the three, everything stays",
                )
            return None
        rules = tuple(parse_best(text) for text in best)
        if len({rule.metric for rule in rules}) < len(rules):
            raise UsageError("keep_best names a metric twice", hint=_FORM)
        return cls(
            keep=_whole("keep", keep, "at least one checkpoint has to stay"),
            keep_every=None if keep_every is None else _whole("keep_every", keep_every, "a number of steps, from 1"),
            keep_best=rules,
        )


def _whole(name: str, value: Any, why: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name}={value!r:.60} is no whole number: {why}", hint=f"{name}=3, say") from None
    if number < 1:
        raise UsageError(f"{name}={number}: {why}", hint=f"{name}=1 is the least")
    return number


def parse_best(text: object) -> Best:
    """Read a rule such as ``eval_loss``, ``bleu:max`` or ``eval_loss:min=2``.

    ``min`` and ``max`` can be left out where the name ends with ``loss`` or ``perplexity`` (lower is better), or with
    ``accuracy`` (higher is). For other names they are not guessed: a wrong guess would remove the best checkpoints.

    Raises:
        UsageError: No such rule.

    Example:
        >>> parse_best("eval_loss=2")
        Best(metric='eval_loss', mode='min', count=2)
        >>> parse_best("eval/bleu:max")
        Best(metric='eval/bleu', mode='max', count=1)
    """
    match = _BEST.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(f"keep_best={text!r:.100} is no rule", hint=_FORM)
    metric, count = match["metric"], int(match["count"] or 1)
    if count < 1:
        raise UsageError(f"keep_best={text!r:.100}: at least one has to stay, or leave it out", hint=_FORM)
    if match["mode"]:
        return Best(metric=metric, mode="min" if match["mode"] == "min" else "max", count=count)
    if _LOW.fullmatch(metric) or _HIGH.fullmatch(metric):
        return Best(metric=metric, mode="min" if _LOW.fullmatch(metric) else "max", count=count)
    raise UsageError(
        f"keep_best={text!r:.100}: is a lower or a higher {metric!r:.100} better?",
        hint=f"say {metric:.100}:min or {metric:.100}:max",
    )


def choose_kept(
    rule: Retention, values: Mapping[int, Mapping[str, object]], *, up_to: int | None = None
) -> dict[int, tuple[str, ...]]:
    """Return for each step why its checkpoint stays; no reason means that it can go.

    Args:
        rule: What stays.
        values: By step, the values saved with each checkpoint that is whole. A metric that is missing, no number, not
            a number (NaN) or infinite is never among the best; of equal ones the earlier goes before the later, as in
            Lightning and the Trainer.
        up_to: The step that was just saved. Later ones stay whatever the rule says, and do not count: they are of a
            run that was rolled back, or of another job. None to look at all.

    Returns:
        Reasons by step, newest first. The newest step up to ``up_to`` always has one.

    Example:
        >>> losses = {100: 0.5, 200: 0.2, 300: 0.4, 400: 0.3}
        >>> rule = Retention.of(1, keep_every=300, keep_best="loss")
        >>> kept = choose_kept(rule, {step: {"loss": loss} for step, loss in losses.items()})
        >>> kept[400], kept[300], kept[200], kept[100]
        (('the newest',), ('every 300 steps',), ('best loss: 0.2',), ())
    """
    reasons: dict[int, list[str]] = {step: [] for step in sorted(values, reverse=True)}
    steps = [step for step in reasons if up_to is None or step <= up_to]
    for step in reasons.keys() - set(steps):
        reasons[step].append(f"newer than step {up_to}")
    for place, step in enumerate(steps[: rule.keep]):
        reasons[step].append("the newest" if place == 0 else f"one of the last {rule.keep}")
    for step in steps:
        if rule.keep_every is not None and step % rule.keep_every == 0:
            reasons[step].append(f"every {rule.keep_every} steps")
    for best in rule.keep_best:
        sign = 1 if best.mode == "min" else -1
        found = [(sign * number, step) for step in steps if (number := _number(values[step], best.metric)) is not None]
        for place, (number, step) in enumerate(sorted(found)[: best.count]):
            which = "best" if place == 0 else f"{place + 1}. best"
            reasons[step].append(f"{which} {best.metric}: {sign * number:.4g}")
    return {step: tuple(texts) for step, texts in reasons.items()}


def choose_removed(rule: Retention, nodes: Sequence[Mapping[int, Mapping[str, object]]], *, up_to: int) -> list[int]:
    """Return the steps that go, where each node has a disk of its own.

    What is not on all nodes is no checkpoint that could be resumed from: it does not count among the last ones. But it
    goes as soon as the rule would let it go if it counted, or a job that was killed while it removed a checkpoint would
    leave a part of it for good.

    Args:
        rule: What stays.
        nodes: For each node what lies there, as for ``choose_kept``.
        up_to: The step that was just saved.

    Example:
        >>> choose_removed(Retention(keep=1), [{2: {}}, {1: {}, 2: {}}], up_to=2)
        [1]
    """
    whole = {step: values for step, values in nodes[0].items() if all(step in node for node in nodes)}
    anywhere = {step: values for node in nodes for step, values in node.items()}
    kept, kept_if_whole = (choose_kept(rule, found, up_to=up_to) for found in (whole, anywhere))
    return sorted(step for step in anywhere if not kept.get(step) and (step in whole or not kept_if_whole[step]))


def _number(values: Mapping[str, object], metric: str) -> float | None:
    """Return a finite number, None where there is none."""
    value = values.get(metric)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON's whole numbers have no limit
        return None
    return number if math.isfinite(number) else None
