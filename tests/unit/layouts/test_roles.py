from __future__ import annotations

import pytest

from fsdp_ckpt.catalog import Role
from fsdp_ckpt.layouts.roles import KeyPath, role_of, split_roles


def split(*paths: KeyPath, default: Role = Role.MODEL) -> list[tuple[str, Role, dict[str, str]]]:
    """Split as torch names things: the key is the path, joined."""
    keyed = [(".".join(map(str, path)), path) for path in paths]
    return [(part.name, part.role, part.names) for part in split_roles(keyed, default=default)]


@pytest.mark.parametrize(
    ("head", "role"),
    [
        ("model", Role.MODEL), ("pytorch_model_fsdp_0", Role.MODEL), ("pytorch_model_1", Role.MODEL),
        ("state_dict", Role.MODEL),
        ("model_state_dict", Role.MODEL), ("model_part_3", Role.MODEL), ("network", Role.MODEL),
        ("optimizer", Role.OPTIMIZER), ("optim", Role.OPTIMIZER), ("optimizer_0", Role.OPTIMIZER),
        ("optimizers", Role.OPTIMIZER),
        ("optimizer_state_dict", Role.OPTIMIZER), ("optimizer_states", Role.OPTIMIZER),
        ("scheduler", Role.SCHEDULER), ("lr_scheduler", Role.SCHEDULER), ("sched", Role.SCHEDULER),
        ("lr_schedulers", Role.SCHEDULER),
        ("dataloader", Role.DATALOADER), ("sampler", Role.DATALOADER), ("rng", Role.RNG), ("rng_state", Role.RNG),
        ("random_states_0", Role.RNG), ("train_state", Role.OTHER), ("epoch", Role.OTHER),
        ("hyper_parameters", Role.OTHER),
        ("layers", None), ("", None), ("embed_tokens", None), ("modeling", None), ("optimizer_x", None),
    ],
)  # fmt: skip
def test_what_a_head_says(head: str, role: Role | None) -> None:
    assert role_of(head) is role


def test_accelerate() -> None:
    assert split(("model", "layers.0.weight"), ("model", "norm.weight")) == [
        ("model", Role.MODEL, {"model.layers.0.weight": "layers.0.weight", "model.norm.weight": "norm.weight"})
    ]
    found = split(
        ("optimizer", "state", "w", "exp_avg"), ("optimizer", "param_groups", 0, "lr"), default=Role.OPTIMIZER
    )
    assert found == [
        ("optimizer", Role.OPTIMIZER, {
            "optimizer.state.w.exp_avg": "state.w.exp_avg", "optimizer.param_groups.0.lr": "param_groups.0.lr",
        })
    ]  # fmt: skip


def test_model_and_optimizer_in_one_folder() -> None:
    found = split(("optim", "state", "w", "step"), ("model", "w"), ("epoch",), ("rng", "cpu"))
    assert [(name, role) for name, role, _ in found] == [
        ("model", Role.MODEL), ("optim", Role.OPTIMIZER), ("rng", Role.RNG), ("other", Role.OTHER),
    ]  # fmt: skip
    assert found[0][2] == {"model.w": "w"}


def test_the_torch_tutorial() -> None:
    found = split(("app", "model", "w"), ("app", "optim", "state", "w", "step"))
    assert [(name, role) for name, role, _ in found] == [("model", Role.MODEL), ("optim", Role.OPTIMIZER)]
    assert found[0][2] == {"app.model.w": "w"}


def test_composer() -> None:
    found = split(
        ("state", "model", "model.w"),
        ("state", "optimizers", "AdamW", "state", "w", "step"),
        ("state", "timestamp", "epoch"),
    )
    assert found[0][:2] == ("model", Role.MODEL)
    assert found[0][2] == {"state.model.model.w": "model.w"}


COMPOSER = [
    ("state", "model", "model.w"), ("state", "optimizers", "AdamW", "state", "model.w", "step"),
    ("state", "optimizers", "AdamW", "param_groups", 0, "lr"), ("state", "schedulers", "LambdaLR", "last_epoch"),
    ("state", "timestamp", "Timestamp", "batch"), ("state", "run_name"), ("rng", 0, "torch"),
]  # fmt: skip


def test_composer_with_random_states_beside_the_rest() -> None:
    found = split(*COMPOSER)
    assert [(name, role) for name, role, _ in found] == [
        ("model", Role.MODEL), ("optimizers", Role.OPTIMIZER), ("schedulers", Role.SCHEDULER), ("rng", Role.RNG),
        ("timestamp", Role.OTHER), ("other", Role.OTHER),
    ]  # fmt: skip
    assert found[0][2] == {"state.model.model.w": "model.w"}
    assert list(found[1][2].values()) == ["state.model.w.step", "param_groups.0.lr"]


def test_several_optimizers_under_one_head_are_parts_of_their_own() -> None:
    found = split(*COMPOSER, ("state", "optimizers", "SGD", "state", "model.v", "momentum_buffer"))
    assert [(name, list(names.values())) for name, role, names in found if role is Role.OPTIMIZER] == [
        ("optimizers.AdamW", ["state.model.w.step", "param_groups.0.lr"]),
        ("optimizers.SGD", ["state.model.v.momentum_buffer"]),
    ]


def test_optimizers_in_a_list() -> None:
    found = split(("model", "w"), ("optimizers", 0, "state", "w", "step"), ("optimizers", 1, "state", "v", "step"))
    assert [(name, list(names.values())) for name, _, names in found[1:]] == [
        ("optimizers.0", ["state.w.step"]), ("optimizers.1", ["state.v.step"]),
    ]  # fmt: skip


def test_an_optimizer_is_not_taken_for_what_wraps_a_model() -> None:
    found = split(("state", "model", "exp_avg"), ("state", "w", "exp_avg"), ("param_groups", 0, "lr"),
                  default=Role.OPTIMIZER)  # fmt: skip
    assert [name for _, _, names in found for name in names.values()] == [
        "state.model.exp_avg", "state.w.exp_avg", "param_groups.0.lr",
    ]  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "chained_0."])
def test_megatron_names_the_kind_before_the_parameter(prefix: str) -> None:
    found = split(("decoder.w",), (f"{prefix}optimizer.state.exp_avg.decoder.w",),
                  (f"{prefix}optimizer.param_groups",))  # fmt: skip
    assert [(name, role, list(names.values())) for name, role, names in found] == [
        ("model", Role.MODEL, ["decoder.w"]),
        ("optimizer", Role.OPTIMIZER, ["state.decoder.w.exp_avg", f"{prefix}optimizer.param_groups"]),
    ]


def test_torchtitan_has_the_model_at_the_top() -> None:
    found = split(
        ("layers.0.weight",), ("tok_embeddings.weight",), ("optimizer", "state.layers.0.weight.exp_avg"),
        ("lr_scheduler", "last_epoch"), ("train_state", "step"),
    )  # fmt: skip
    assert found[0] == (
        "model", Role.MODEL, {"layers.0.weight": "layers.0.weight", "tok_embeddings.weight": "tok_embeddings.weight"},
    )  # fmt: skip
    assert {role for _, role, _ in found} == {Role.MODEL, Role.OPTIMIZER, Role.SCHEDULER, Role.OTHER}


def test_dots_within_a_key_do_not_split() -> None:
    assert split(("model", "dotted.key", "a.b")) == [("model", Role.MODEL, {"model.dotted.key.a.b": "dotted.key.a.b"})]


def test_lists_in_a_model() -> None:
    assert split(("model", "blocks", 0, "w"), ("model", "blocks", 1, "w"))[0][2] == {
        "model.blocks.0.w": "blocks.0.w", "model.blocks.1.w": "blocks.1.w",
    }  # fmt: skip


# A bare state dict is all weights, whatever its modules are called: leaving one out would lose it silently.
BARE = ["weight", "step", "epoch", "meta", "config", "scale", "rng", "sampler.weight", "dataset_embedding.weight",
        "scheduler.w", "extra.weight", "args.bias", "step.weight", "loops.0.w", "module.w", "net.w", "timestamp",
        "state.weight", "app.w", "lm_head.weight", "model.embed.weight"]  # fmt: skip


@pytest.mark.parametrize("name", BARE)
def test_every_weight_of_a_bare_state_dict_belongs_to_the_model(name: str) -> None:
    found = split(("layers.0.weight",), (name,), ("norm.bias",))
    assert found == [
        ("model", Role.MODEL, {"layers.0.weight": "layers.0.weight", name: name, "norm.bias": "norm.bias"})
    ]


def test_a_flat_optimizer_state_dict() -> None:
    found = split(
        ("state.layers.0.weight.exp_avg",), ("state.layers.0.weight.step",), ("param_groups.layers.0.weight.lr",)
    )
    assert [(name, role) for name, role, _ in found] == [("optimizer", Role.OPTIMIZER)]


def test_nothing() -> None:
    assert split() == []


@pytest.mark.parametrize("default", [Role.MODEL, Role.OPTIMIZER])
def test_keys_that_say_nothing_have_the_role_of_their_part(default: Role) -> None:
    assert [(role, len(names)) for _, role, names in split(("a",), ("b.c",), default=default)] == [(default, 2)]


def test_keys_keep_their_order_and_none_is_lost() -> None:
    paths: list[KeyPath] = [("model", f"w{i}") for i in (3, 1, 2)] + [("optim", "x"), ("stuff", "y"), ("z",)]
    found = split(*paths)
    assert list(found[0][2]) == ["model.w3", "model.w1", "model.w2"]
    assert sorted(key for _, _, names in found for key in names) == sorted(".".join(map(str, path)) for path in paths)
