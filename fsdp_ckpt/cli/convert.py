"""``fsdp-ckpt convert``."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdp_ckpt.cli import out
from fsdp_ckpt.cli.guard import guard

EXAMPLES = """\b
Examples:
  fsdp-ckpt convert run/step-1000 out/ --to safetensors
  fsdp-ckpt convert verl/global_step_20/actor out/ --to accelerate --world-size 8
  fsdp-ckpt convert zero3-run out/ --to dcp --world-size 16   optimizer included
  fsdp-ckpt convert run/step-1000 out/ --to hf --config-from meta-llama/Llama-3.2-1B
  fsdp-ckpt convert Llama-3.2-1B start/ --to accelerate --world-size 8
  fsdp-ckpt convert checkpoint-500 lora/ --to adapter
  fsdp-ckpt convert checkpoint-500 out/ --to hf --fold-lora
  fsdp-ckpt convert local/ out/ --to safetensors --shapes-from config.json
\b
Targets:
  safetensors  model.safetensors and what lies beside the checkpoint
  hf           a folder for transformers, compared with config.json
  torch        pytorch_model.bin, optimizer.bin
  dcp          one torch.distributed.checkpoint folder, a file per rank
  accelerate   pytorch_model_fsdp_0/, optimizer_0/, … as save_state
  adapter      adapter_model.safetensors, adapter_config.json, as PEFT
"""

Many = list[str]
Sources = Annotated[
    Many,
    typer.Argument(
        metavar="SRC",
        help="Checkpoint in any layout, or a folder above it; or that folder of every node, where nodes saved to disks "
        "of their own.",
    ),
]
Output = Annotated[str, typer.Argument(metavar="DST", help="Folder to make, or a URL.")]
WorldSize = Annotated[int | None, typer.Option(help="Ranks to shard for.", show_default="as the source")]
Mesh = Annotated[
    str | None, typer.Option(help="Grid of ranks, such as 2x4: the last dimension shards, others replicate.")
]
Placements = Annotated[
    Many | None,
    typer.Option(
        "--placement",
        metavar="GLOB=DIMS",
        help="Per mesh dimension the tensor dimension it shards, r to replicate: '*.up.weight=r,0'; repeatable.",
    ),
]
ParamNames = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Names in the optimizer's order (JSON), where it is kept by index."),
]
ShapesFrom = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Shapes for flat parameters (LOCAL_STATE_DICT): config.json, JSON, weights."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and stop.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST, in one step at the end.")]
Resume = Annotated[bool, typer.Option("--resume", help="Keep files that an interrupted run finished.")]
RemoveSource = Annotated[
    bool, typer.Option("--remove-source", help="Delete what was read, after the result was read back and compared.")
]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Do not compare recorded checksums.")]
NoFsync = Annotated[bool, typer.Option("--no-fsync", help="Leave it to the system when data reach the disk.")]
Jobs = Annotated[int | None, typer.Option(help="Threads.", show_default="cores, at most 4")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print the output folder only.")]


@guard
def convert(
    src: Sources,
    dst: Output,
    to: Annotated[str, typer.Option(help="What to make; see below.")],
    part: Annotated[str | None, typer.Option(help="model, optimizer, all, or the name of a part.")] = None,
    world_size: WorldSize = None,
    mesh: Mesh = None,
    placement: Placements = None,
    full: Annotated[bool, typer.Option("--full", help="accelerate: FULL_STATE_DICT files, not folders.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file: 5GB is 10^9 bytes.")] = "50GB",
    dtype: Annotated[str | None, typer.Option(help="Convert the model's float tensors: bfloat16, float16, …")] = None,
    include: Annotated[Many | None, typer.Option(metavar="GLOB", help="Only tensors of this name; repeatable.")] = None,
    exclude: Annotated[Many | None, typer.Option(metavar="GLOB", help="No tensors of this name; repeatable.")] = None,
    rename: Annotated[Many | None, typer.Option(metavar="OLD=NEW", help="Prefix, or s/REGEX/NEW/; repeatable.")] = None,
    tie: Annotated[bool | None, typer.Option("--tie/--no-tie", help="Drop a head equal to the embedding.")] = None,
    config_from: Annotated[str | None, typer.Option(help="hf: folder or hub id with config and tokenizer.")] = None,
    fold_lora: Annotated[bool, typer.Option("--fold-lora", help="Add the adapter to the weights.")] = False,
    adapter: Annotated[str | None, typer.Option(help="Which adapter, where there are several.")] = None,
    adapter_config: Annotated[str | None, typer.Option(metavar="FILE", help="Its adapter_config.json.")] = None,
    lora_alpha: Annotated[float | None, typer.Option(help="Its alpha, where there is no such file.")] = None,
    rslora: Annotated[bool, typer.Option("--rslora", help="With --lora-alpha: divided by the root of r.")] = False,
    optimizer_form: Annotated[
        str, typer.Option(help="Keys of the optimizer: by-name, by-index, flattened.")
    ] = "by-name",
    param_names: ParamNames = None,
    shapes_from: ShapesFrom = None,
    unstack_layers: Annotated[
        bool, typer.Option("--unstack-layers", help="A tensor for each layer of Megatron's stacks.")
    ] = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
    remove_source: RemoveSource = False,
    no_verify: NoVerify = False,
    no_fsync: NoFsync = False,
    jobs: Jobs = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Convert a checkpoint into another layout, optimizer included.

    Names, dtypes and values stay what they are unless you say otherwise; checksums are compared while bytes are copied,
    and DST appears complete or not at all. Memory does not depend on the size of the model.
    """
    from fsdp_ckpt.cli.convert_view import show_conversion
    from fsdp_ckpt.ops.convert import ConvertOptions
    from fsdp_ckpt.ops.convert import convert as run
    from fsdp_ckpt.ops.share import process_share

    share = process_share()
    options = ConvertOptions(
        to=to,
        part=part,
        world_size=world_size,
        mesh=mesh,
        placements=placement or (),
        full=full,
        max_shard_size=max_shard_size,
        dtype=dtype,
        include=include or (),
        exclude=exclude or (),
        rename=rename or (),
        tie=tie,
        optimizer_form=optimizer_form,
        param_names=param_names,
        shapes_from=shapes_from,
        unstack_layers=unstack_layers,
        config_from=config_from,
        fold_lora=fold_lora,
        adapter=adapter,
        adapter_config=adapter_config,
        lora_alpha=lora_alpha,
        rslora=rslora,
        dry_run=dry_run,
        overwrite=overwrite,
        resume=resume,
        verify=not no_verify,
        fsync=not no_fsync,
        jobs=jobs,
        share=share,
        remove_source=remove_source,
    )
    with out.progress("convert", quiet=quiet or dry_run) as listener:
        report = run(src, dst, options=options, listener=listener)
    show_conversion(report, "convert", as_json=as_json, quiet=quiet, share=share)
