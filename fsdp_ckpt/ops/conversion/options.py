"""What a conversion can be asked for."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp_ckpt.catalog import DType
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.ops.merge_plan import DEFAULT_SHARD_SIZE, cast_target
from fsdp_ckpt.ops.share import Share
from fsdp_ckpt.plan.reshard import MAX_RANKS, Mesh, Sharding, parse_mesh, parse_placement

__all__ = ["FORMS", "TARGETS", "ConvertOptions", "as_typed", "check_options", "sharding_of", "wants"]

TARGETS: Mapping[str, str] = {
    "safetensors": "model.safetensors and what lies beside it",
    "hf": "a folder that transformers' from_pretrained opens, compared with its config.json",
    "torch": "pytorch_model.bin, optimizer.bin",
    "dcp": "one torch.distributed.checkpoint folder, a file per rank",
    "accelerate": "pytorch_model_fsdp_0/, optimizer_0/ and the rest, as Accelerate's save_state",
    "adapter": "adapter_model.safetensors, adapter_config.json, as PEFT saves",
}
"""What ``--to`` takes, and what it makes."""

_WHOLE = frozenset({"dcp", "accelerate", "torch"})
"""Targets that hold more than a model."""
_SHARDED = frozenset({"dcp", "accelerate"})
_WEIGHTS = ("safetensors", "hf", "torch")
"""Targets whose weights are whole, in files of limited size."""

FORMS = ("by-name", "by-index", "flattened")
_PARTS = ("model", "optimizer", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """How to convert.

    Attributes:
        to: What to make, see ``TARGETS``.
        part: ``model``, ``optimizer``, ``all``, or the name of a part; None for all that the target can hold.
        world_size: Ranks to shard for (``dcp``, ``accelerate``); None for as many as wrote the source, else 1.
        mesh: Or a grid of ranks: ``"2x4"``.
        placements: Where tensors lie on the mesh: ``"GLOB=0,r"``.
        full: For ``accelerate``: FULL_STATE_DICT files rather than sharded folders.
        max_shard_size: Largest weight file (``safetensors``, ``hf``, ``torch``).
        dtype: Convert the model's float tensors. Optimizer state is never converted.
        include: Only tensors whose name fits one of these globs; an optimizer's go with their parameters.
        exclude: No tensors whose name fits one of these.
        rename: Prefixes ``old=new``, or ``s/regex/replacement/``; the optimizer's names change, too.
        tie: Drop an output head that equals the embedding (whole weights only); None follows config.json.
        optimizer_form: How the optimizer is keyed: ``by-name``, ``by-index``, ``flattened``.
        param_names: File with the parameters' names in the optimizer's order, for one that is kept by index.
        shapes_from: File with names and shapes, for FSDP1's flat parameters.
        unstack_layers: Make a tensor of each layer of Megatron's stacks.
        config_from: Folder or model on the hub that has config and tokenizer (``hf``).
        fold_lora: Add the adapter to the weights.
        adapter: Which adapter, where there are several.
        adapter_config: Its adapter_config.json, where it does not lie beside the checkpoint.
        lora_alpha: Its alpha, where there is no such file.
        rslora: With ``lora_alpha``: divided by the root of the rank.
        dry_run: Say what would be written, and stop.
        overwrite: Replace a destination with content, in one step at the end.
        resume: Keep files that an interrupted run finished.
        verify: Compare recorded checksums.
        fsync: Return when the disk has everything.
        jobs: Threads.
        share: This process's share of the files.
        remove_source: Delete what was converted, after the result was read back and compared.
    """

    to: str = "safetensors"
    part: str | None = None
    world_size: int | None = None
    mesh: str | None = None
    placements: Sequence[str] = ()
    full: bool = False
    max_shard_size: str | int = DEFAULT_SHARD_SIZE
    dtype: str | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Sequence[str] = ()
    tie: bool | None = None
    optimizer_form: str = "by-name"
    param_names: str | os.PathLike[str] | None = None
    shapes_from: str | os.PathLike[str] | None = None
    unstack_layers: bool = False
    config_from: str | None = None
    fold_lora: bool = False
    adapter: str | None = None
    adapter_config: str | os.PathLike[str] | None = None
    lora_alpha: float | None = None
    rslora: bool = False
    dry_run: bool = False
    overwrite: bool = False
    resume: bool = False
    verify: bool = True
    fsync: bool = True
    jobs: int | None = None
    share: Share | None = None
    remove_source: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether the result is a distributed checkpoint."""
        return self.to in _SHARDED and not self.full

    @property
    def target_dtype(self) -> DType | None:
        """What float tensors are converted to."""
        return cast_target(self.dtype)


def check_options(options: ConvertOptions) -> None:
    """Refuse options that contradict each other, before anything is read.

    Raises:
        UsageError: They do.
    """
    if options.to not in TARGETS:
        raise UsageError(f"--to {options.to} is not possible", hint=f"choose one of: {', '.join(TARGETS)}")
    if options.optimizer_form not in FORMS:
        raise UsageError(
            f"--optimizer-form {options.optimizer_form} is not possible", hint=f"choose one of: {', '.join(FORMS)}"
        )
    _check_sharding(options)
    if options.to == "accelerate" and options.optimizer_form != FORMS[0]:
        raise UsageError(
            f"--optimizer-form {options.optimizer_form} does not go with --to accelerate: neither Accelerate nor "
            "load_state would load it",
            hint="leave it out, or: --to dcp, --to torch",
        )
    if options.full and options.to != "accelerate":
        raise UsageError("--full is for --to accelerate", hint="--to torch makes pytorch_model.bin")
    if options.to not in _WHOLE and options.part in ("optimizer", "all"):
        raise UsageError(
            f"--to {options.to} holds a model only, not --part {options.part}",
            hint=f"choose one of: {', '.join(sorted(_WHOLE))}",
        )
    if options.fold_lora and options.to == "adapter":
        raise UsageError("--fold-lora adds the adapter to the model: --to adapter does not go with it")
    for option, where in _without_effect(options):
        raise UsageError(f"{option} is for {where}: here it would change nothing", hint=f"leave out {option}")
    if options.jobs is not None and options.jobs < 1:
        raise UsageError("--jobs must be at least 1")
    if options.remove_source and not options.verify:
        raise UsageError("--remove-source compares the result first: it cannot go with --no-verify")
    cast_target(options.dtype)


def _check_sharding(options: ConvertOptions) -> None:
    if options.world_size is not None and options.mesh is not None:
        raise UsageError("--world-size and --mesh say the same thing: give one of them")
    sharding = options.world_size is not None or options.mesh is not None or bool(options.placements)
    if sharding and not options.is_sharded:
        what = "--full files" if options.full else f"--to {options.to}"
        raise UsageError(f"{what} is not sharded: --world-size, --mesh and --placement do not go with it",
                         hint="--to dcp, or --to accelerate")  # fmt: skip
    if options.world_size is not None and not 1 <= options.world_size <= MAX_RANKS:
        raise UsageError(f"--world-size must be at least 1, and at most {MAX_RANKS}")


def _without_effect(options: ConvertOptions) -> Iterator[tuple[str, str]]:
    """Yield options that were given and that nothing looks at, with what they are for."""
    to, folds = options.to, options.fold_lora
    if options.config_from is not None and to != "hf":
        yield "--config-from", "--to hf"
    if options.tie and to not in _WEIGHTS:
        yield "--tie", f"--to {' or '.join(_WEIGHTS)}"
    if options.max_shard_size != DEFAULT_SHARD_SIZE and to not in _WEIGHTS:
        yield "--max-shard-size", f"--to {' or '.join(_WEIGHTS)}"
    if options.optimizer_form != FORMS[0] and (to not in _WHOLE or options.part == "model"):
        yield "--optimizer-form", "results with an optimizer"
    if options.lora_alpha is not None and not folds and to != "adapter":
        yield "--lora-alpha", "--fold-lora or --to adapter"
    if options.adapter_config is not None and not folds and to != "adapter":
        yield "--adapter-config", "--fold-lora or --to adapter"
    if options.rslora and options.lora_alpha is None:
        yield "--rslora", "--lora-alpha; an adapter_config.json says it itself"
    if options.adapter is not None and not folds and to not in (*_WEIGHTS, "adapter"):
        yield "--adapter", "--fold-lora, or a result without PEFT's names"


def wants(options: ConvertOptions) -> str:
    """Return which parts are asked for: ``model``, ``optimizer``, ``all``, or the name of one."""
    return options.part or ("all" if options.to in _WHOLE else "model")


def as_typed(options: ConvertOptions, command: str) -> str:
    """Return ``convert`` or ``reshard`` with the options that say what is made, for messages."""
    words = ["convert", "--to", options.to] if command == "convert" else ["reshard"]
    if options.mesh is not None:
        words += ["--mesh", options.mesh]
    elif options.world_size is not None:
        words += ["--world-size", str(options.world_size)]
    for placement in options.placements:
        words += ["--placement", placement]
    if options.full:
        words.append("--full")
    return shlex.join(words)


def sharding_of(options: ConvertOptions, saved: int | None) -> Sharding:
    """Return how the result is sharded.

    Args:
        options: The options.
        saved: Ranks that wrote the source, where that is known.

    Raises:
        UsageError: A mesh or a placement that is none, or a source of more ranks than there can be.
    """
    if options.mesh is not None:
        mesh = parse_mesh(options.mesh)
    elif options.world_size is not None:
        mesh = parse_mesh(str(options.world_size))
    elif saved is not None and saved > MAX_RANKS:
        raise UsageError(f"the source says that {saved} ranks wrote it, more than {MAX_RANKS}", hint="--world-size 8")
    else:
        mesh = Mesh(shape=(saved or 1,))
    return Sharding(mesh=mesh, placements=[parse_placement(text, mesh) for text in options.placements])
