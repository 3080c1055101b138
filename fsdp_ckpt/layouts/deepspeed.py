"""DeepSpeed's checkpoints: ZeRO 1 to 3, without ZeRO, and universal ones.

The model is the fp32 weights that the optimizer works on, cut out of the ranks' flat vectors; buffers and frozen
parameters keep the type that they are stored in. The optimizer is by name. What decides where elements lie is what
``zero_to_fp32.py`` and ``ds_to_universal.py`` go by; where the ranks also wrote addresses, they have to agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fsdp_ckpt.catalog import Checkpoint, Part, Problem, Role, Severity, Shape, TensorEntry
from fsdp_ckpt.errors import CorruptCheckpoint, IncompleteCheckpoint, MalformedFile
from fsdp_ckpt.layouts.composite import step_of
from fsdp_ckpt.layouts.deepspeed_files import DeepSpeedFiles, list_deepspeed_files
from fsdp_ckpt.layouts.deepspeed_flat import Member, Segment, cut_members, cut_vector
from fsdp_ckpt.layouts.deepspeed_model import Pieces, model_tensors, nested_part, side_parts
from fsdp_ckpt.layouts.deepspeed_optimizer import ByName, optimizer_entries
from fsdp_ckpt.layouts.deepspeed_state import ModuleState, RankState, read_module_state, read_rank_state
from fsdp_ckpt.layouts.deepspeed_universal import read_universal
from fsdp_ckpt.layouts.elsewhere import note_elsewhere
from fsdp_ckpt.layouts.faults import coverage_problems, tolerate
from fsdp_ckpt.store.local import Folder, LocalStore

__all__ = ["read_deepspeed"]

_DIALECT = "deepspeed"
_SHOWN = 8


@dataclass(slots=True)
class _Facts:
    """What the files say about the whole."""

    title: str = "DeepSpeed checkpoint"
    steps: int | None = None
    world_size: int | None = None
    facts: tuple[tuple[str, str], ...] = ()


def read_deepspeed(folder: Folder, *, tolerant: bool = False) -> Checkpoint:
    """Read the folder that a tag names.

    Args:
        folder: The folder.
        tolerant: Describe what cannot be read, too, instead of raising.

    Raises:
        Incompatible: Tensors are cut over model-parallel ranks, pipeline stages or experts.
        IncompleteCheckpoint: The files that say what is where are missing.
        CorruptCheckpoint: Files contradict each other.
        UnsafePickle: A pickle asks for code.
    """
    files = list_deepspeed_files(folder)
    found = _Facts()
    read = partial(_read_parts, files, found)
    parts = list(tolerate(read, folder, "model", Role.MODEL, files.sizes)) if tolerant else read()
    place = folder.path.resolve()
    step = step_of(Folder(LocalStore(place.with_name(place.name.removesuffix("_universal")))))
    return Checkpoint(
        root=folder.store.root,
        other_roots=folder.store.roots[1:],
        layout=_DIALECT,
        title=found.title,
        parts=parts,
        step=found.steps if step is None else step,
        world_size=found.world_size,
        facts=found.facts,
    )


def _read_parts(files: DeepSpeedFiles, found: _Facts) -> list[Part]:
    modules = _read_modules(files)
    first = next(iter(modules.values()))
    found.steps, found.world_size = first.steps, first.world_size
    if files.is_universal:
        found.title = "DeepSpeed universal checkpoint"
        parts = read_universal(files, modules)
    elif files.optims:
        parts = _read_ranks(files, modules, found)
    else:
        parts = _read_module_only(files, first, found)
    writer = f"DeepSpeed {first.version}" if first.version else "DeepSpeed"
    return [replace(part, writer=writer) for part in (*parts, *side_parts(first))]


def _read_modules(files: DeepSpeedFiles) -> dict[int, ModuleState]:
    """Read the model files that are needed: of all ranks where each has a part of frozen parameters."""
    store = files.folder.store
    names = {0: files.whole} if files.whole else dict(files.models)
    if 0 not in names:  # the other ranks do not know which parameters share a name
        some = files.path(next(iter((*files.models.values(), *files.optims.values()))))
        raise IncompleteCheckpoint(
            f"{some}: the model file of rank 0 is missing (mp_rank_00_model_states.pt, in ZeRO-3 "
            "zero_pp_rank_0_mp_rank_00_model_states.pt), which has the names and shapes of all parameters"
        )
    first = read_module_state(store, files.path(names[0]))
    others = [rank for rank in names if rank and first.frozen_shapes]
    return {0: first} | {rank: read_module_state(store, files.path(names[rank])) for rank in others}


def _read_module_only(files: DeepSpeedFiles, first: ModuleState, found: _Facts) -> list[Part]:
    """Read what was saved without ZeRO, or what is left after the optimizer's files were removed."""
    if files.whole is None:
        raise IncompleteCheckpoint(
            f"{first.file}: the weights of ZeRO-3 are in the ranks' *_optim_states.pt files, and there is none",
            hint="a model that was saved with save_16bit_model, or from an earlier step, is all that can help",
        )
    if first.shapes is not None:
        found.facts = (("weights", "as the module holds them: the files with its fp32 weights are not there"),)
    tensors, problems = model_tensors({}, {0: first}, 1, is_cut=False)
    part = _part("model", Role.MODEL, files, [first.file], first.world_size)
    parts = [replace(part, tensors=tensors, problems=[*problems, *coverage_problems(tensors.values())])]
    if first.optimizer:
        parts.append(nested_part("optimizer", Role.OPTIMIZER, first.optimizer, first))
    return parts


def _read_ranks(files: DeepSpeedFiles, modules: Mapping[int, ModuleState], found: _Facts) -> list[Part]:
    """Read the ranks' vectors."""
    first = modules[0]
    ranks = {rank: read_rank_state(files.folder.store, files.path(name)) for rank, name in files.optims.items()}
    lead = next(iter(ranks.values()))
    _demand_one_save(ranks, lead, first, is_cut=files.whole is None)
    stage = lead.stage or first.stage
    found.title = f"DeepSpeed ZeRO-{stage} checkpoint" if stage else found.title
    found.world_size = lead.world_size
    shapes, segments = _cut(ranks, lead, first)
    pieces = Pieces()
    weights: dict[str, TensorEntry] = {}
    for name, shape in shapes.items():
        entry = pieces.entry(name, shape, segments[name], lambda segment: ranks[segment.rank].weights[segment.group])
        if entry is None:  # all of its ranks are missing: what is left of it is its shape
            dtype = lead.weights[0].tensor.dtype
            entry = TensorEntry(key=name, name=name, dtype=dtype, shape=shape, chunks=())
        weights[name] = entry
    tensors, problems = model_tensors(weights, modules, lead.world_size, is_cut=files.whole is None)
    missing = list(_missing_ranks(files, lead.world_size, has_frozen=bool(first.frozen_shapes)))
    problems = [*missing, *problems, *coverage_problems(tensors.values())]
    parts = [
        replace(
            _part("model", Role.MODEL, files, files.sizes, lead.world_size),
            tensors=tensors,
            problems=problems,
        )
    ]
    by_name = optimizer_entries(shapes, segments, ranks)
    if by_name.tensors or by_name.objects:
        optims = [state.file for state in ranks.values()]
        parts.append(
            _optimizer_part(_part("optimizer", Role.OPTIMIZER, files, optims, lead.world_size), by_name, missing)
        )
    return parts


def _optimizer_part(part: Part, by_name: ByName, missing: Sequence[Problem]) -> Part:
    problems = [*missing, *by_name.problems, *coverage_problems(by_name.tensors.values())]
    return replace(part, tensors=by_name.tensors, objects=by_name.objects, problems=problems)


def _demand_one_save(ranks: Mapping[int, RankState], lead: RankState, first: ModuleState, *, is_cut: bool) -> None:
    """Make sure that the ranks' files are of one save."""
    for rank, state in ranks.items():
        if (state.world_size, state.stage) != (lead.world_size, lead.stage):
            raise CorruptCheckpoint(
                f"{state.file} is of a save of {state.world_size} ranks with ZeRO-{state.stage}, {lead.file} of one of "
                f"{lead.world_size} with ZeRO-{lead.stage}: a save into the folder of an older one"
            )
        if rank >= state.world_size:
            raise MalformedFile(f"{state.file} is of rank {rank}, and says that there were {state.world_size}")
    if (lead.stage == 3) != is_cut:
        raise CorruptCheckpoint(f"{lead.file} and {first.file} are of different ZeRO stages")
    if not first.shapes:
        raise MalformedFile(f"{first.file}: `param_shapes` is missing: nothing tells what the flat vectors hold")
    for state in ranks.values():
        if len(state.weights) != len(lead.weights) or (lead.stage != 3 and len(first.shapes) != len(state.weights)):
            raise MalformedFile(f"{state.file}: {len(state.weights)} flat vectors, not {len(first.shapes)}")


def _cut(
    ranks: Mapping[int, RankState], lead: RankState, first: ModuleState
) -> tuple[dict[str, Shape], dict[str, list[Segment]]]:
    """Return the shapes of all trained parameters, and where they lie."""
    assert first.shapes is not None
    names = [name for group in first.shapes for name in group]
    if len(set(names)) < len(names):
        raise MalformedFile(f"{first.file}: a parameter stands in two flat vectors")
    shapes = {name: shape for group in first.shapes for name, shape in group.items()}
    paddings = lead.paddings or [[0] * len(group) for group in first.shapes]
    if [len(group) for group in paddings] != [len(group) for group in first.shapes] and lead.stage != 3:
        raise MalformedFile(f"{lead.file}: `param_alignment_paddings` are of other parameters")
    segments: dict[str, list[Segment]] = {}
    try:
        if lead.stage == 3:
            sizes = {rank: [item.tensor.shape[0] for item in state.weights] for rank, state in ranks.items()}
            members = [_member(name, shape, 0) for name, shape in shapes.items()]
            segments = cut_members(members, sizes, lead.world_size)
        else:
            for number, group in enumerate(first.shapes):
                parts = {rank: state.weights[number].tensor.shape[0] for rank, state in ranks.items()}
                members = [_member(*item, pad) for item, pad in zip(group.items(), paddings[number], strict=True)]
                segments |= cut_vector(number, members, parts, lead.world_size)
    except MalformedFile as error:
        raise MalformedFile(f"{lead.file}: {error.message}") from None
    _compare_addresses(ranks, segments)
    return shapes, segments


def _member(name: str, shape: Shape, padding: int) -> Member:
    numel = 1
    for length in shape:
        numel *= length
    return Member(name=name, numel=numel, padding=padding)


def _compare_addresses(ranks: Mapping[int, RankState], segments: Mapping[str, Sequence[Segment]]) -> None:
    """Compare with the addresses that ranks wrote of their own parts."""
    here: dict[int, dict[tuple[int, str], tuple[int, int]]] = {rank: {} for rank in ranks}
    for name, held in segments.items():
        for segment in held:
            here[segment.rank][segment.group, name] = segment.start, segment.numel
    for rank, state in ranks.items():
        if state.addresses is None:
            continue
        said = {
            (number, name): place
            for number, group in enumerate(state.addresses)
            for name, place in group.items()
            if place[1]
        }
        for number, name in sorted(said.keys() | here[rank].keys()):
            first, second = said.get((number, name)), here[rank].get((number, name))
            if first != second:
                raise MalformedFile(
                    f"{state.file}: by its own account, {_place(first)} of vector {number} are `{name}`; by the shapes "
                    f"in the model file, {_place(second)} are"
                )


def _place(address: tuple[int, int] | None) -> str:
    return "no elements" if address is None else f"elements {address[0]} to {sum(address)}"


def _missing_ranks(files: DeepSpeedFiles, world_size: int, *, has_frozen: bool) -> Iterator[Problem]:
    for what, names, needed in (("optim", files.optims, True), ("model", files.models, has_frozen)):
        gone = [rank for rank in range(world_size) if rank not in names]
        if not gone or not names:
            continue
        shown = ", ".join(map(str, gone[:_SHOWN])) + (", …" if len(gone) > _SHOWN else "")
        some = re.sub(r"(zero_pp_rank_)\d+", rf"\g<1>{gone[0]}", next(iter(names.values())))
        message = f"{len(names)} of {world_size} {what} files are there; missing: rank{'s'[: len(gone) > 1]} {shown}"
        severity = Severity.ERROR if needed else Severity.WARNING
        yield Problem(severity=severity, code="missing-rank", where=files.path(some), message=message)
        yield from note_elsewhere(files.folder, gone, names)


def _part(
    name: str, role: Role, files: DeepSpeedFiles, held: Mapping[str, int] | Sequence[str], world_size: int | None
) -> Part:
    sizes = files.sizes
    return Part(
        name=name,
        role=role,
        dialect=_DIALECT,
        folder=files.folder.prefix.rstrip("/"),
        files={file: sizes[file] for file in held},
        world_size=world_size,
    )
