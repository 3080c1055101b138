"""``config show``, ``check`` and the conversions, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.cli.tool import assert_refused, environment, run

FSDP1 = """\
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 8
fsdp_config:
  fsdp_sharding_strategy: hybrid_shard
  fsdp_backward_prefetch_policy: BACKWARD_POST
  fsdp_offload_params: true
  fsdp_state_dict_type: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: BertLayer
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.yaml"
    path.write_text(FSDP1)
    return path


def test_show_gives_values_with_their_origins(old: Path) -> None:
    rows = [line.split(maxsplit=2) for line in run("config", "show", old).out.splitlines()]
    shown = {row[0]: tuple(row[1:]) for row in rows}
    assert shown["sharding_strategy"] == ("HYBRID_SHARD", f"{old}:6")
    assert shown["backward_prefetch"] == ("BACKWARD_POST", f"{old}:7")
    assert shown["mixed_precision"] == ("bf16", f"{old}:2")
    assert shown["use_orig_params"] == ("true", "default")
    assert shown["fsdp_version"][0] == "1"
    assert "does not say" in shown["fsdp_version"][1]
    assert "reshard_after_forward" not in shown


def test_flags_go_before_the_file(old: Path) -> None:
    out = run("config", "show", old, "--set", "sharding_strategy=2", "--set", "fsdp_offload_params=false").out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert rows["sharding_strategy"] == ["SHARD_GRAD_OP", "--set"]
    assert rows["offload_params"] == ["false", "--set"]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("{fsdp_version: 1, fsdp_sharding_strategy: SHARD_GRAD_OP}", 2, {"reshard_after_forward": "false"}),
        (
            "{fsdp_version: 1, fsdp_sharding_strategy: HYBRID_SHARD}",
            2,
            {"dp_replicate_size": "2", "dp_shard_size": "4"},
        ),
        ("{fsdp_version: 2, fsdp_reshard_after_forward: false}", 1, {"sharding_strategy": "SHARD_GRAD_OP"}),
        ("{fsdp_version: 1, fsdp_sharding_strategy: NO_SHARD}", 2, None),
    ],
)
def test_another_version_shards_alike(tmp_path: Path, before: str, after: int, expected: dict[str, str] | None) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"distributed_type: FSDP\nnum_machines: 2\nnum_processes: 8\nfsdp_config: {before}\n")
    done = run("config", "show", path, "--set", f"fsdp_version={after}")
    if expected is None:
        assert_refused(done, 8)
        return
    shown = {line.split()[0]: line.split()[1] for line in done.out.splitlines()}
    assert shown["fsdp_version"] == str(after)
    assert shown | expected == shown


def test_what_cannot_reach_a_script_is_refused(old: Path) -> None:
    assert_refused(run("config", "show", old, "--set", "limit_all_gathers=false"), 2)


def test_json_has_the_values_of_the_file(old: Path) -> None:
    report = json.loads(run("config", "show", old, "--json").out)
    assert report["schema"] == "fsdp-ckpt/config-show/1"
    assert report["config"]["fsdp_config"]["fsdp_sharding_strategy"] == "HYBRID_SHARD"
    assert report["origins"]["state_dict_type"] == f"{old}:9"
    assert any("fsdp_backward_prefetch_policy" in note for note in report["notes"])


def test_check_names_file_line_key_value_and_what_is_allowed(old: Path) -> None:
    assert run("config", "check", old).out == "ok\n"
    old.write_text(FSDP1.replace("hybrid_shard", "hybrid"))
    refused = run("config", "check", old)
    assert_refused(refused, 2)
    for part in (f"{old}:6:", "fsdp_sharding_strategy", "'hybrid'", "FULL_SHARD", "HYBRID_SHARD_ZERO2"):
        assert part in refused.err
    old.write_text(FSDP1.replace("fsdp_offload_params", "fsdp_ofload_params"))
    refused = run("config", "check", old)
    assert_refused(refused, 2)
    assert f"{old}:8:" in refused.err
    assert "did you mean fsdp_offload_params?" in refused.err


def test_check_finds_sizes_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "distributed_type: FSDP\nnum_processes: 6\nfsdp_config: {fsdp_version: 2}\n"
        "parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 4}\n"
    )
    refused = run("config", "check", path)
    assert_refused(refused, 2)
    assert "dp_replicate_size 2 x dp_shard_size 4 = 8 does not fit num_processes: 6" in refused.err


def test_the_file_is_found_here_or_where_accelerate_puts_it(old: Path, tmp_path: Path) -> None:
    home = tmp_path / "cache"
    (home / "accelerate").mkdir(parents=True)
    (home / "accelerate" / "default_config.yaml").write_text(FSDP1.replace("num_processes: 8", "num_processes: 4"))
    env = environment(HF_HOME=str(home))
    found = run("config", "check", cwd=tmp_path, env=env)
    assert "default_config.yaml" in found.err
    (tmp_path / "fsdp.yaml").write_text(FSDP1)
    assert "configuration: fsdp.yaml" in run("config", "check", cwd=tmp_path, env=env).err


def test_check_refuses_what_launch_would(tmp_path: Path) -> None:
    path = tmp_path / "ds.yaml"
    path.write_text("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 2}\n")
    refused = run("config", "check", path)
    assert_refused(refused, 2)
    assert refused.hint is not None
    assert "from-deepspeed" in refused.hint


def test_init_writes_nothing_that_check_would_refuse(tmp_path: Path) -> None:
    refused = run("config", "init", "--yes", "-n", "6", "--set", "dp_replicate_size=4", cwd=tmp_path)
    assert_refused(refused, 2)
    assert not (tmp_path / "fsdp.yaml").exists()


def test_to_fsdp2_keeps_what_it_can_and_lists_the_rest(old: Path, tmp_path: Path) -> None:
    done = run("config", "to-fsdp2", old, tmp_path / "new.yaml")
    assert done.code == 0, done.err
    assert done.out.strip() == str(tmp_path / "new.yaml")
    new = yaml.safe_load((tmp_path / "new.yaml").read_text())
    assert new["fsdp_config"]["fsdp_version"] == 2
    assert new["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert new["fsdp_config"]["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
    assert new["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2
    assert new["parallelism_config"]["parallelism_config_dp_shard_size"] == 4
    assert "no counterpart: backward_prefetch: BACKWARD_POST" in done.err
    assert run("config", "check", tmp_path / "new.yaml").code == 0
    assert_refused(run("config", "to-fsdp2", old, tmp_path / "new.yaml"), 5)


def test_no_shard_cannot_become_fsdp2(old: Path, tmp_path: Path) -> None:
    old.write_text(FSDP1.replace("hybrid_shard", "3"))
    refused = run("config", "to-fsdp2", old, tmp_path / "new.yaml")
    assert_refused(refused, 8)
    assert not (tmp_path / "new.yaml").exists()


def test_to_deepspeed_and_back(old: Path, tmp_path: Path) -> None:
    done = run("config", "to-deepspeed", old)
    zero = json.loads(done.out)["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["zero_hpz_partition_size"] == 4  # 8 ranks on 2 machines
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu"}
    (tmp_path / "ds.json").write_text(done.out)
    back = run("config", "from-deepspeed", tmp_path / "ds.json", "-n", "8")
    new = yaml.safe_load(back.out)
    assert new["mixed_precision"] == "bf16"
    assert new["fsdp_config"]["fsdp_offload_params"] is True
    assert new["parallelism_config"]["parallelism_config_dp_shard_size"] == 4
    assert_refused(run("config", "from-deepspeed", old), 2)
