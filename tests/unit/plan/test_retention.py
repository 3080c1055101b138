from __future__ import annotations

import doctest
import random
from typing import Any

import pytest

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.plan import retention
from fsdp_ckpt.plan.retention import Best, Retention, choose_kept, choose_removed, parse_best


def kept(values: dict[int, dict[str, Any]], *, up_to: int | None = None, **rule: Any) -> list[int]:
    chosen = Retention.of(**rule)
    assert chosen is not None
    reasons = choose_kept(chosen, values, up_to=up_to)
    assert set(reasons) == set(values), "every step has an answer"
    return sorted(step for step, texts in reasons.items() if texts)


def plain(*steps: int) -> dict[int, dict[str, Any]]:
    return {step: {} for step in steps}


def losses(**values: Any) -> dict[int, dict[str, Any]]:
    return {int(name[1:]): {"loss": value} for name, value in values.items()}


def test_the_examples_are_right() -> None:
    assert doctest.testmod(retention).attempted >= 6
    assert doctest.testmod(retention).failed == 0


@pytest.mark.parametrize(
    ("keep", "expected"), [(1, [100]), (2, [10, 100]), (3, [9, 10, 100]), (4, [1, 9, 10, 100]), (99, [1, 9, 10, 100])]
)
def test_the_last_ones_are_those_of_the_highest_steps(keep: int, expected: list[int]) -> None:
    assert kept(plain(9, 100, 1, 10), keep=keep) == expected


def test_nothing_in_nothing_out() -> None:
    assert kept({}, keep=1, keep_every=5, keep_best="loss") == []


def test_every_so_many_steps_stay_for_good_and_so_does_step_0() -> None:
    assert kept(plain(0, 50, 100, 150, 200, 250, 299), keep=1, keep_every=100) == [0, 100, 200, 299]
    assert kept(plain(1, 2, 3), keep=1, keep_every=1) == [1, 2, 3]
    assert kept(plain(10**30, 10**30 + 1, 3), keep=1, keep_every=10**29) == [10**30, 10**30 + 1]


def test_the_lowest_or_the_highest_stay_beside_the_newest() -> None:
    values = losses(s1=0.5, s2=0.2, s3=0.9, s4=0.3, s5=0.8)
    assert kept(values, keep=1, keep_best="loss") == [2, 5]
    assert kept(values, keep=1, keep_best="loss=2") == [2, 4, 5]
    assert kept(values, keep=1, keep_best="loss:max=2") == [3, 5]
    assert kept(values, keep=1, keep_best="loss:max=3") == [1, 3, 5]
    assert kept(values, keep=1, keep_best="loss:min=99") == [1, 2, 3, 4, 5]


def test_the_newest_counts_among_the_best() -> None:
    assert kept(losses(s1=0.5, s2=0.4, s3=0.1), keep=1, keep_best="loss=2") == [2, 3]


def test_of_equal_ones_the_earlier_stays() -> None:
    values = losses(s1=0.5, s2=0.2, s3=0.2, s4=0.2, s5=0.7)
    assert kept(values, keep=1, keep_best="loss") == [2, 5]
    assert kept(values, keep=1, keep_best="loss:max") == [5]
    assert kept(losses(s1=1, s2=1.0, s3=0), keep=1, keep_best="loss:max") == [1, 3]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf"), None, "0.1", "nan", True, False, [0.1], {"x": 1}, 10**400]
)
def test_what_is_no_finite_number_is_never_best(value: Any, mode: str) -> None:
    assert kept(losses(s1=value, s2=0.5, s3=value), keep=1, keep_best=f"loss:{mode}=3") == [2, 3]


def test_a_checkpoint_without_the_metric_is_never_best() -> None:
    values: dict[int, dict[str, Any]] = {1: {"loss": 9.0}, 2: {}, 3: {"Loss": 0.0}, 4: {"eval_loss": 0.0}}
    assert kept(values, keep=1, keep_best="loss=4") == [1, 4]


def test_a_metric_that_nobody_saved_keeps_the_last_ones_alone() -> None:
    assert kept(plain(1, 2, 3), keep=2, keep_best="loss=3") == [2, 3]


def test_several_metrics_each_keep_their_own() -> None:
    values = {step: {"loss": step, "accuracy": step % 4} for step in range(1, 10)}
    assert kept(values, keep=1, keep_best=["loss", "accuracy=2"]) == [1, 3, 7, 9]


def test_the_newest_stays_however_bad_it_is() -> None:
    assert kept(losses(s1=0.1, s2=0.2, s999=float("nan")), keep=1, keep_every=7, keep_best="loss") == [1, 999]


def test_what_is_newer_than_the_saved_step_stays_and_does_not_count() -> None:
    assert kept(plain(1, 2, 3, 800, 900), up_to=3, keep=1) == [3, 800, 900]
    assert kept(plain(1, 2, 3, 800, 900), up_to=3, keep=2) == [2, 3, 800, 900]
    values = losses(s1=0.5, s2=0.4, s3=0.6, s900=0.1)
    assert kept(values, up_to=3, keep=1, keep_best="loss") == [2, 3, 900]


def test_reasons_are_said() -> None:
    rule = Retention.of(2, 100, ["loss=2", "accuracy"])
    assert rule is not None
    values: dict[int, dict[str, Any]] = {
        100: {"loss": 1.5, "accuracy": 0.25}, 200: {"loss": 1.25}, 300: {}, 301: {}, 302: {}, 400: {},
    }  # fmt: skip
    assert choose_kept(rule, values, up_to=302) == {
        400: ("newer than step 302",),
        302: ("the newest",),
        301: ("one of the last 2",),
        300: ("every 100 steps",),
        200: ("every 100 steps", "best loss: 1.25"),
        100: ("every 100 steps", "2. best loss: 1.5", "best accuracy: 0.25"),
    }
    assert list(choose_kept(rule, values)) == [400, 302, 301, 300, 200, 100]


def test_pruning_after_every_save_keeps_what_pruning_once_would() -> None:
    """A checkpoint that is among the best of all was among the best at every moment before."""
    for seed in range(200):
        chance = random.Random(seed)
        rule = Retention.of(
            chance.randint(1, 4), chance.choice([None, 2, 5]), [f"loss:{chance.choice(['min', 'max'])}={seed % 4 + 1}"]
        )
        assert rule is not None
        numbers = [chance.choice([0.0, 0.5, 1.0, 2.0, float("nan")]) for _ in range(30)]
        there: dict[int, dict[str, float]] = {}
        for step, number in enumerate(numbers):
            there[step] = {"loss": number}
            there = {n: there[n] for n, texts in choose_kept(rule, there, up_to=step).items() if texts}
            assert step in there
        once = choose_kept(rule, {step: {"loss": number} for step, number in enumerate(numbers)})
        assert sorted(there) == sorted(step for step, texts in once.items() if texts)
        assert all(choose_kept(rule, there).values()), "a second time nothing more goes"


@pytest.mark.parametrize(
    ("text", "metric", "mode", "count"),
    [
        ("loss", "loss", "min", 1),
        ("eval_loss", "eval_loss", "min", 1),
        ("eval/Loss=3", "eval/Loss", "min", 3),
        ("perplexity", "perplexity", "min", 1),
        ("answer_accuracy=2", "answer_accuracy", "max", 2),
        ("loss:max", "loss", "max", 1),
        ("bleu:max=10", "bleu", "max", 10),
        ("val:loss", "val:loss", "min", 1),
        ("a:max:min", "a:max", "min", 1),
        ("x=2:min=1", "x=2", "min", 1),
        ("größe:min", "größe", "min", 1),
        ("two\nlines:min", "two\nlines", "min", 1),
    ],
)
def test_rules_are_read(text: str, metric: str, mode: Any, count: int) -> None:
    assert parse_best(text) == Best(metric=metric, mode=mode, count=count)


@pytest.mark.parametrize("text", ["bleu", "gloss", "loss_scale", "tvloss", "lossless", "score=3", "loss:low", "acc"])
def test_what_is_better_is_not_guessed(text: str) -> None:
    with pytest.raises(UsageError, match=r"is a lower or a higher .* better") as caught:
        parse_best(text)
    assert ":min" in str(caught.value.hint)
    assert ":max" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["", "loss=0", "bleu:max=0", 5, None, 0.5, ("loss", 2), b"loss"])
def test_what_is_no_rule_is_refused(text: Any) -> None:
    with pytest.raises(UsageError, match="keep_best="):
        parse_best(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0}, "keep=0: at least one checkpoint has to stay"),
        ({"keep": -3}, "keep=-3"),
        ({"keep": 2.5}, "keep=2.5 is no whole number"),
        ({"keep": "3"}, "keep='3' is no whole number"),
        ({"keep": 1, "keep_every": 0}, "keep_every=0"),
        ({"keep": 1, "keep_every": -100}, "keep_every=-100"),
        ({"keep": 1, "keep_every": 1e3}, r"keep_every=1000.0 is no whole number"),
        ({"keep": 1, "keep_best": ("loss", 2)}, "keep_best=2 is no rule"),
        ({"keep": 1, "keep_best": 2}, "keep_best=2 is no rule"),
        ({"keep": 1, "keep_best": ["loss", "loss:max"]}, "a metric twice"),
        ({"keep": None, "keep_every": 100}, "keep_every .* keep is missing"),
        ({"keep": None, "keep_best": "loss"}, "keep_best .* keep is missing"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Retention.of(**arguments)
    assert caught.value.hint


def test_without_a_rule_everything_stays() -> None:
    assert Retention.of(None) is None
    assert Retention.of(None, None, []) is None


def removed(*nodes: dict[int, dict[str, Any]], up_to: int, **rule: Any) -> list[int]:
    chosen = Retention.of(**rule)
    assert chosen is not None
    return choose_removed(chosen, nodes, up_to=up_to)


def test_where_all_nodes_have_the_same_the_others_go() -> None:
    assert removed(plain(1, 2, 3), up_to=3, keep=2) == [1]
    assert removed(plain(1, 2, 3), plain(1, 2, 3), up_to=3, keep=2) == [1]
    assert removed(plain(1, 2, 3), plain(1, 2, 3), up_to=2, keep=1) == [1], "3 is newer"


def test_what_only_some_nodes_have_does_not_count_and_goes_when_its_time_has_come() -> None:
    assert removed(plain(2), plain(1, 2), up_to=2, keep=1) == [1]
    assert removed(plain(1, 2), plain(2), up_to=2, keep=1) == [1]
    assert removed(plain(1, 4), plain(1, 3, 4), up_to=4, keep=2) == [], "1 is the last whole one but one; 3 may stay"
    assert removed(plain(1, 4, 5), plain(1, 3, 4, 5), up_to=5, keep=2) == [1, 3]
    assert removed(plain(4), plain(4, 9), up_to=4, keep=1) == [], "9 is newer"


def test_the_best_is_among_what_all_nodes_have() -> None:
    here, there = losses(s2=0.2, s3=0.3, s4=0.4), losses(s1=0.1, s2=0.2, s3=0.3, s4=0.4)
    assert removed(here, there, up_to=4, keep=1, keep_best="loss") == [3], "1 may stay as long as it would be the best"
