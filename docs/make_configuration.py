"""Write docs/configuration.md: every option of an FSDP setup, from the table that the code follows."""

# ruff: noqa: E501  # most of it is the text of a page

import sys
from pathlib import Path

from fsdp_ckpt.config.options import OPTIONS, Option, default_of
from fsdp_ckpt.config.rules import shown

TARGET = Path(__file__).parent / "configuration.md"

HEAD = """# Configuration

The table is written by `docs/make_configuration.py` from the fields.

A configuration is the YAML of `accelerate config`, read strictly: an unknown key, a value that is not allowed, a key that is
there twice, options that contradict each other are errors at once, with file and line. Names may be written in any case, or as
the numbers of Accelerate's guide; `1e8` is a number.

```console
$ fsdp-ckpt config init                     # asks, and writes fsdp.yaml
$ fsdp-ckpt config show fsdp.yaml           # every value, and where it comes from
$ fsdp-ckpt config check fsdp.yaml          # exit code 2, file and line when something is wrong
$ fsdp-ckpt launch --config fsdp.yaml train.py
```

What goes before what: `--set NAME=VALUE` and other flags, then the file, then the default. A file that does not mention an option
means what it means to `accelerate launch`; where that is not the default of `FSDPConfig()`, both are given below.

In Python:

```py
from fsdp_ckpt import FSDPConfig, wrap

config = FSDPConfig(fsdp_version=1, sharding_strategy="SHARD_GRAD_OP", mixed_precision="bf16")
config = FSDPConfig.from_file("fsdp.yaml")
config = FSDPConfig.from_env()  # in a script started by `fsdp-ckpt launch` or `accelerate launch`
model = wrap(model, config)  # FSDP1 or FSDP2, as it says
```

## Options

| option | default | FSDP | YAML key | environment |
|---|---|---|---|---|
"""

TAIL = """
`state_dict_config`, `optim_state_dict_config` and `param_init_fn` of Accelerate's plugin have no counterpart: `save_state`
gathers nothing, so there is nothing to offload, and `wrap(initialize=…)` takes the function.

## What goes together

Each of these is an error where the configuration is made or read, not at the first save.

- `fsdp_version` 3 and above; FSDP2 with `sharding_strategy`, `LOCAL_STATE_DICT`, `forward_prefetch: true`, `use_orig_params: false`, or
  a `backward_prefetch` other than BACKWARD_PRE, which is what FSDP2 does; FSDP1 with a truth value for `fsdp_reshard_after_forward`.
- FSDP1's `cpu_ram_efficient_loading` without `sync_module_states`: all ranks but the first would train on random weights.
- `activation_checkpointing_offload` without `activation_checkpointing`, or with FSDP1.
- Class names without TRANSFORMER_BASED_WRAP; `fsdp_config` or `parallelism_config` with another `distributed_type`.
- `dp_replicate_size` above 1 with an FSDP1 strategy that is not HYBRID; sizes whose product is not the number of processes.
- `fsdp_sharding_strategy` and `fsdp_reshard_after_forward` (FSDP1) that name two strategies.

`config check` and `launch` also say what is allowed and yet may surprise. The first of these is worth knowing: Accelerate 1.15
ignores `fsdp_reshard_after_forward: SHARD_GRAD_OP` under FSDP1, the key that its own `config` writes, and shards fully.
`fsdp-ckpt launch` exports the strategy so that Accelerate follows it.

## FSDP1 to FSDP2, and DeepSpeed

`config to-fsdp2 OLD NEW` rewrites a file and lists what changed. NO_SHARD is refused (FSDP2 always shards), LOCAL_STATE_DICT becomes
SHARDED_STATE_DICT, and HYBRID_SHARD keeps its two dimensions.

| FSDP | DeepSpeed | back |
|---|---|---|
| FULL_SHARD; `reshard_after_forward: true` | ZeRO stage 3 | `reshard_after_forward: true` |
| SHARD_GRAD_OP; `reshard_after_forward: false` | ZeRO stage 2 | `reshard_after_forward: false` |
| NO_SHARD | ZeRO stage 0 | FSDP1, NO_SHARD |
| HYBRID_SHARD; `dp_replicate_size` > 1 | ZeRO stage 3, `zero_hpz_partition_size` = ranks of one copy | `dp_replicate_size` x `dp_shard_size` |
| HYBRID_SHARD_ZERO2 | refused: ZeRO++ cuts within a node only in stage 3 | |
| refused: FSDP cuts gradients with optimizer state | ZeRO stage 1 | |
| `offload_params` | `offload_param`, `offload_optimizer` on cpu; in stage 2 the optimizer only | `offload_params` |
| FULL_STATE_DICT | `stage3_gather_16bit_weights_on_model_save` | FULL_STATE_DICT |

`config to-deepspeed FSDP.yaml DS.json` and `config from-deepspeed DS.json FSDP.yaml -n RANKS` do this, and list every option that has
no counterpart.

## launch

`fsdp-ckpt launch` runs torchrun, with the variables that `accelerate launch` sets: `ACCELERATE_USE_FSDP`, `FSDP_*`,
`ACCELERATE_MIXED_PRECISION`, `ACCELERATE_DYNAMO_*`, `PARALLELISM_CONFIG_*`, `OMP_NUM_THREADS`. Scripts made for it need no change. On one
machine a free port is taken; on several, every machine is given the same `--main-process-ip` and its own `--machine-rank`. The exit
code is that of the rank that failed first, or 128 + the signal that killed it. `--dry-run` prints variables and command.

DeepSpeed, Megatron-LM, TPUs and SageMaker are left to `accelerate launch`.
"""


def line(option: Option) -> str:
    """Return an option's line in the overview."""
    keys = f"`{option.key}`" if option.key else "Python only"
    variable = f"`{option.variable}`" if option.variable else ""
    versions = " and ".join(map(str, option.versions))
    return f"| [`{option.name}`](#{option.name}) | {_default(option)} | {versions} | {keys} | {variable} |"


def block(option: Option) -> str:
    """Return what is said of an option."""
    allowed = {"boolean": "true, false", "names": "names separated by commas, or a list", "text": "a text"}.get(
        option.kind
    )
    if option.kind == "choice":
        numbered = enumerate(option.choices, 1)
        allowed = ", ".join(
            option.choices if option.name == "mixed_precision" else (f"{n} {name}" for n, name in numbered)
        )
    elif option.kind == "integer":
        allowed = "1, 2" if option.name == "fsdp_version" else f"a whole number from {option.minimum}"
    elif option.kind == "mapping":
        allowed = "a dictionary of float32, bfloat16, float16"
    lines = [f"### {option.name}", "", option.meaning, "", f"- allowed: {allowed}", f"- default: {_default(option)}"]
    if len(option.versions) == 1:
        lines.append(f"- FSDP{option.versions[0]} only")
    if option.aliases:
        lines.append(f"- also written {', '.join(f'`{alias}`' for alias in option.aliases)}")
    lines += [f"- in torch: {option.torch}", f"- in DeepSpeed: {option.deepspeed}", ""]
    return "\n".join(lines)


def _default(option: Option) -> str:
    version = option.versions[-1]
    own = _shown(default_of(option, version))
    of_file = {v: _shown(default_of(option, v, of_file=True)) for v in option.versions}
    if all(value == own for value in of_file.values()):
        return own
    if len(set(of_file.values())) == 1:
        return f"{own}; of a file: {next(iter(of_file.values()))}"
    return f"{own}; of a file: " + ", ".join(f"{value} (FSDP{v})" for v, value in of_file.items())


def _shown(value: object) -> str:
    return "none" if value in (None, ()) else shown(value)


def render() -> str:
    """Return the page."""
    overview = "\n".join(line(option) for option in OPTIONS.values())
    return f"{HEAD}{overview}\n\n" + "\n".join(block(option) for option in OPTIONS.values()) + TAIL


if __name__ == "__main__":
    TARGET.write_text(render())
    sys.stdout.write(f"wrote {TARGET.name}\n")
