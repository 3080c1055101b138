"""Files as people and machines leave them: broken, hostile, spelled otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_ckpt.config.accelerate_yaml import read_config, to_yaml
from fsdp_ckpt.config.document import read_document
from fsdp_ckpt.config.environment import environment_of
from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.config.launch import LaunchConfig
from fsdp_ckpt.errors import UsageError

HEAD = "distributed_type: FSDP\nnum_processes: 2\n"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)


def write(tmp_path: Path, text: str | bytes, name: str = "c.yaml") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are no keys"),
        ("# nothing\n", "there are no keys"),
        ("- a\n- b\n", "there are no keys"),
        ("just text\n", "there are no keys"),
        (f"{HEAD}num_processes: 4\n", "c.yaml:3: num_processes is there twice; the other one is on line 2"),
        (f"{HEAD}fsdp_config:\n  fsdp_version: 1\n  fsdp_version: 2\n", "c.yaml:5: fsdp_version is there twice"),
        (f"{HEAD}a: [1\nb: 2\n", "c.yaml:4: this is no YAML"),
        (f"{HEAD}\tb: 2\n", "c.yaml:3: this is no YAML"),
        (f"{HEAD}--- \nb: 2\n", "this is no YAML"),
        (b"\xff\xfe\x00\x01", "no text in UTF-8"),
        (b"PK\x03\x04\x00\x00", "this is no YAML"),
        ("a" * (1 << 20) + "b", "larger than 1 MiB"),
        ("[" * 20000, "no "),
        (f"{HEAD}fsdp_config: [1, 2]\n", "c.yaml:3: fsdp_config: .* is not possible; allowed: keys"),
        (f"{HEAD}fsdp_confg: {{}}\n", "c.yaml:3: fsdp_confg is no key of a configuration; did you mean fsdp_config"),
        (BOMB, "a0 is no key of a configuration"),
        ("num_processes: 2\n", "distributed_type is missing"),
        ("distributed_type: FSPD\n", "c.yaml:1: distributed_type: 'FSPD' is not possible; .*did you mean FSDP"),
        (f"compute_environment: AMAZON_SAGEMAKER\n{HEAD}", "c.yaml:1: compute_environment: AMAZON_SAGEMAKER"),
        (f"{HEAD}machine_rank: 2\nnum_machines: 2\n", "c.yaml:3: machine_rank: 2 .* allowed: 0 to 1"),
        (f"{HEAD}machine_rank: -1\n", "c.yaml:3: machine_rank: -1 is not possible"),
        ("distributed_type: FSDP\nnum_processes: 0\n", "c.yaml:2: num_processes: 0 is not possible"),
        (f"{HEAD}mixed_precision: bf32\n", "c.yaml:3: mixed_precision: 'bf32' is not possible; allowed: no, fp16"),
        ("distributed_type: NO\nfsdp_config:\n  fsdp_version: 2\n", "c.yaml:2: fsdp_config has no effect"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_config(write(tmp_path, text))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.yaml: cannot be read: No such file"):
        read_config(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir", "!!python/name:os.mkdir", "!own"]
)
def test_a_tag_is_refused_and_nothing_runs(tmp_path: Path, tag: str) -> None:
    victim = tmp_path / "made"
    with pytest.raises(UsageError, match=r"c.yaml:3: this is no YAML: could not determine a constructor"):
        read_document(write(tmp_path, f"{HEAD}debug: {tag} ['{victim}']\n"))
    assert not victim.exists()


def test_lines_are_those_of_the_keys(tmp_path: Path) -> None:
    document = read_document(write(tmp_path, f"# first\n{HEAD}fsdp_config:\n\n  version: 2\n"))
    assert document.lines == {"distributed_type": 2, "num_processes": 3, "fsdp_config": 4, "fsdp_config.version": 6}


def test_json_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    values = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}
    config = read_config(write(tmp_path, json.dumps(values, indent=2), "c.json"))
    assert config == read_config(write(tmp_path, b"\xef\xbb\xbf" + json.dumps(values).encode()))
    assert config.fsdp is not None
    assert config.fsdp.fsdp_version == 2


def read(tmp_path: Path, *lines: str, head: str = HEAD) -> FSDPConfig:
    config = read_config(write(tmp_path, head + "fsdp_config:\n" + "".join(f"  {line}\n" for line in lines)))
    assert config.fsdp is not None
    return config.fsdp


@pytest.mark.parametrize("spelling", ["no", "'no'", "NO", "No", "", "null", "none"])
def test_no_precision_is_read_in_every_spelling(tmp_path: Path, spelling: str) -> None:
    assert read(tmp_path, "fsdp_version: 2", head=f"{HEAD}mixed_precision: {spelling}\n").mixed_precision == "no"


@pytest.mark.parametrize(
    ("lines", "name", "value"),
    [
        (["fsdp_sharding_strategy: 2"], "sharding_strategy", "SHARD_GRAD_OP"),
        (["fsdp_sharding_strategy: '5'"], "sharding_strategy", "HYBRID_SHARD_ZERO2"),
        (["sharding_strategy: no_Shard"], "sharding_strategy", "NO_SHARD"),
        (["fsdp_auto_wrap_policy: 2"], "auto_wrap_policy", "SIZE_BASED_WRAP"),
        (["auto_wrap_policy: size_based_wrap"], "auto_wrap_policy", "SIZE_BASED_WRAP"),
        (["fsdp_state_dict_type: 3"], "state_dict_type", "SHARDED_STATE_DICT"),
        (["state_dict_type: local_state_dict"], "state_dict_type", "LOCAL_STATE_DICT"),
        (["backward_prefetch: 2"], "backward_prefetch", "BACKWARD_POST"),
        (["version: 2", "reshard_after_forward: 'False'"], "reshard_after_forward", False),
        (["fsdp_version: '2'", "reshard_after_forward: no"], "reshard_after_forward", False),
        (["fsdp_offload_params: 'on'"], "offload_params", True),
        (["fsdp_offload_params: "], "offload_params", False),
        (["fsdp_offload_params: ''"], "offload_params", False),
        (["fsdp_state_dict_type: None"], "state_dict_type", "FULL_STATE_DICT"),
        (["fsdp_auto_wrap_policy: 1", "transformer_layer_cls_to_wrap: 'A, B'"], "transformer_layer_cls_to_wrap",
         ("A", "B")),
        (["fsdp_auto_wrap_policy: 1", "transformer_layer_cls_to_wrap: [A, B]"], "transformer_layer_cls_to_wrap",
         ("A", "B")),
        (["fsdp_auto_wrap_policy: 1", "fsdp_transformer_layer_cls_to_wrap: ''"], "transformer_layer_cls_to_wrap", ()),
    ],
)  # fmt: skip
def test_a_value_is_read_in_every_spelling(tmp_path: Path, lines: list[str], name: str, value: Any) -> None:
    assert getattr(read(tmp_path, *lines), name) == value


def test_an_open_number_of_processes_stays_open(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, "distributed_type: FSDP\nnum_processes: -1\nfsdp_config: {fsdp_version: 2}\n"))
    assert config.num_processes is None
    assert "num_processes: -1\n" in to_yaml(config)
    with pytest.raises(UsageError, match="num_processes is not given"):
        config.processes_per_machine()


@pytest.mark.parametrize(
    ("processes", "sizes", "fits"),
    [
        (8, {"dp_replicate_size": 2, "dp_shard_size": 4}, True),
        (8, {"dp_replicate_size": 2, "dp_shard_size": 2}, False),
        (8, {"dp_replicate_size": 2}, True),
        (8, {"dp_replicate_size": 3}, False),
        (8, {"dp_shard_size": 2, "tp_size": 2, "cp_size": 2}, True),
        (4, {"dp_shard_size": 2, "tp_size": 2, "cp_size": 2}, False),
    ],
)
def test_sizes_have_to_multiply_to_the_number_of_processes(processes: int, sizes: dict[str, int], fits: bool) -> None:
    config = LaunchConfig(num_processes=processes, fsdp=FSDPConfig.of(sizes))
    if fits:
        config.check_sizes()
        assert environment_of(config)["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    else:
        with pytest.raises(UsageError, match=f"does not fit num_processes: {processes}"):
            environment_of(config)


def test_processes_have_to_divide_by_machines() -> None:
    assert LaunchConfig(num_processes=8, num_machines=2).processes_per_machine() == 4
    with pytest.raises(UsageError, match="num_processes: 7 does not divide by num_machines: 2"):
        LaunchConfig(num_processes=7, num_machines=2).processes_per_machine()
