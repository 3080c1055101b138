"""torch's own dcp.save and dcp.load with our writer and reader, crosswise with torch's: what each rank got."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_ckpt.train.dcp_lanes
from fsdp_ckpt import FastFileSystemReader, FastFileSystemWriter, FsdpCkptError
from tests.dist.stage import main, scenario
from tests.dist.wrappers import fsdp1

DTYPES = (
    "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "complex32", "bool",
    "int8", "uint8", "int16", "uint16", "int64", "uint64",
)  # fmt: skip
OBJECTS = {"step": 7, "lr": 0.1, "name": "run", "betas": (0.9, 0.95), "none": None, "nested": {"list": [1, [2, "x"]]}}
WRITERS: Mapping[str, Callable[..., Any]] = {
    "ours": FastFileSystemWriter,
    "ours, 3 files": lambda path: FastFileSystemWriter(path, files_per_rank=3, durable=False),
    "torch": dcp.FileSystemWriter,
}
READERS: Mapping[str, Callable[..., Any]] = {
    "ours": FastFileSystemReader,
    "ours, 3 threads": lambda path: FastFileSystemReader(path, num_threads=3),
    "ours, unverified": lambda path: FastFileSystemReader(path, verify=False),
    "torch": dcp.FileSystemReader,
}


def bits(value: Any) -> Any:
    """This rank's elements, as bytes; anything else as it is."""
    if isinstance(value, Mapping):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    if isinstance(value, ShardedTensor):
        return [bits(shard.tensor) for shard in value.local_shards()]
    if isinstance(value, DTensor):
        return bits(value.to_local())
    if isinstance(value, Tensor):
        held = value.detach().resolve_conj().resolve_neg().contiguous()
        return str(held.dtype), tuple(held.shape), held.reshape(-1).view(torch.uint8).numpy().tobytes()
    return value


def random(shape: tuple[int, ...], dtype: str, seed: int) -> Tensor:
    """Any bits; booleans are 0 or 1."""
    kind = getattr(torch, dtype)
    count = int(torch.tensor(shape).prod()) * kind.itemsize
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(kind).reshape(shape)


def tensors(seed: int, *, whole: bool = False) -> dict[str, Any]:
    """Replicated tensors, and DTensors over all ranks, of all kinds; or the same with whole tensors."""
    mesh = None if whole else init_device_mesh("cpu", (dist.get_world_size(),))

    def spread(tensor: Tensor, placement: Any) -> Tensor:
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [placement], src_data_rank=None)

    base = random((12, 10), "float32", seed)
    found: dict[str, Any] = {
        "0-d": random((), "float32", seed + 1),
        "empty": random((0, 3), "float32", seed + 2),
        "large": spread(random((700, 1031), "float32", seed + 3), Shard(0)),
        "odd": spread(random((7, 3, 5), "float32", seed + 4), Shard(0)),
        "one row": spread(random((1, 9), "float32", seed + 5), Shard(0)),
        "columns": spread(random((300, 513), "float32", seed + 6), Shard(1)),
        "replicated": spread(random((4, 4), "float32", seed + 7), Replicate()),
        "transposed": base.t(),
        "every other": base[::2, 1::3],
        "conjugate": random((5, 6), "complex64", seed + 8).conj(),
        "negative": random((5, 6), "complex64", seed + 9).conj().imag,
    }
    for number, dtype in enumerate(DTYPES):
        found[dtype] = spread(random((9, 5), dtype, seed + 20 + number), Shard(0))
    return found


def blank(state: Any) -> Any:
    """The same with other values; strides stay."""
    if isinstance(state, Mapping):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        return DTensor.from_local(
            blank(state.to_local()), state.device_mesh, state.placements, shape=state.shape, stride=state.stride()
        )
    if isinstance(state, Tensor):
        found = state.detach().resolve_conj().resolve_neg().clone(memory_format=torch.preserve_format)
        torch.empty(0, dtype=torch.uint8).set_(found.untyped_storage()).fill_(1)
        return found
    return "blank" if isinstance(state, str) else 0


def differing(found: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """The keys, of mappings in mappings, whose values are not the same bits."""
    result = []
    for part, values in right.items():
        mine, theirs = bits(found[part]), bits(values)
        result += [f"{part}.{key}" for key in theirs if mine[key] != theirs[key]]
    return result


class Net(nn.Module):
    """Two layers and an odd vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(33, 70)
        self.second = nn.Linear(70, 33)
        self.odd = nn.Parameter(torch.randn(7))
        self.register_buffer("steps", torch.tensor(5, dtype=torch.int64))

    def forward(self, data: Tensor) -> Tensor:
        return cast(Tensor, self.second(self.first(data).relu())) * self.odd.sum()


def trained(seed: int, wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed, foreach=False)
    model(torch.randn(4, 33)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def fsdp2(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


def job(seed: int) -> dict[str, Any]:
    """The state dict of a trained FSDP2 job."""
    model, optim = get_state_dict(*trained(seed, fsdp2))
    return {"model": model, "optim": optim}


def failure(call: Callable[[], Any]) -> dict[Any, tuple[str, str]]:
    """What torch says of a failed save or load: our errors, by rank."""
    try:
        call()
    except CheckpointException as error:
        return {rank: (type(found).__name__, str(found)) for rank, (found, _) in error.failures.items()}
    except FsdpCkptError as error:  # use_collectives=False: each rank's own
        return {"alone": (type(error).__name__, str(error))}
    return {}


def hidden(place: Path) -> list[str]:
    dist.barrier()
    return sorted(path.name for path in place.iterdir() if path.name.startswith("."))


def crosswise(place: Path, make: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Save with every writer, load with every reader; which of the values did not come back, bit by bit."""
    state, other = make(1), make(2)
    right, wrong = bits(state), bits(other)
    assert right != wrong
    result = {}
    for number, (writer, write) in enumerate(WRITERS.items()):
        folder = place / f"saved {number}"
        dcp.save(state, storage_writer=write(folder))
        for reader, read in READERS.items():
            target = make(2)
            assert bits(target) == wrong
            dcp.load(target, storage_reader=read(folder))
            result[f"{writer} -> {reader}"] = bits(target) == right
    return result


@scenario(ranks=2)
def of_an_fsdp2_job(place: Path) -> Any:
    """Model and AdamW."""
    return crosswise(place, lambda seed: job(seed) | {"extra": {**OBJECTS, "step": seed}})


@scenario(ranks=2)
def of_all_kinds(place: Path) -> Any:
    """Tensors of all kinds, into tensors of all kinds of strides."""
    result = {}
    state = {"tensors": tensors(1), "objects": OBJECTS}
    right = bits(state)
    for number, (writer, write) in enumerate(WRITERS.items()):
        folder = place / f"saved {number}"
        dcp.save(state, storage_writer=write(folder))
        for reader, read in READERS.items():
            target = blank(state)
            before = bits(target)["tensors"]
            assert not [key for key, value in right["tensors"].items() if value == before[key] and value[2]]
            dcp.load(target, storage_reader=read(folder))
            found = bits(target)
            result[f"{writer} -> {reader}"] = [
                key for key in right["tensors"] if found["tensors"][key] != right["tensors"][key]
            ] + [key for key in OBJECTS if found["objects"][key] != bits(OBJECTS)[key]]
    return result


@scenario(ranks=2)
def of_fsdp1(place: Path) -> Any:
    """ShardedTensors of use_orig_params=True."""

    def make(seed: int) -> dict[str, Any]:
        model, _ = trained(seed, fsdp1)
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
        ):
            return {"model": model.state_dict()}

    found = crosswise(place, make)
    kinds = {type(value).__name__ for value in make(1)["model"].values()}
    return found | {"kinds": sorted(kinds)}


@scenario(ranks=4)
def of_tensor_parallel_fsdp(place: Path) -> Any:
    """FSDP2 within tensor parallelism: strided shards."""

    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        return {"model": model.state_dict()}

    placements = {type(one).__name__ for value in make(1)["model"].values() for one in value.placements}
    return crosswise(place, make) | {"placements": sorted(placements)}


@scenario(ranks=2)
def from_two_ranks(place: Path) -> Any:
    """Saved here, loaded by one process in the test."""
    state = {"model": trained(1, fsdp2)[0].state_dict(), "tensors": tensors(1), "objects": OBJECTS}
    for number, write in enumerate(WRITERS.values()):
        dcp.save(state, storage_writer=write(place / f"saved {number}"))
    return {key: bits(value.full_tensor()) for key, value in state["model"].items() if isinstance(value, DTensor)}


@scenario(ranks=2)
def from_one_rank(place: Path) -> Any:
    """Whole tensors, saved by one process, into shards."""
    state = {"tensors": tensors(1), "objects": OBJECTS}
    right, result = bits(state), {}
    for number, (writer, write) in enumerate(WRITERS.items()):
        folder = place / f"saved {number}"
        if dist.get_rank() == 0:
            whole = {"tensors": tensors(1, whole=True), "objects": OBJECTS}
            dcp.save(whole, storage_writer=write(folder), no_dist=True)
        dist.barrier()
        for reader, read in READERS.items():
            target = blank(state)
            dcp.load(target, storage_reader=read(folder))
            result[f"{writer} -> {reader}"] = bits(target) == right
    lanes: Any = fsdp_ckpt.train.dcp_lanes
    real, through = lanes.verify_boxes, []

    def verify(key: str, *args: Any) -> Any:
        through.append(key)
        return real(key, *args)

    with mock.patch.object(lanes, "verify_boxes", verify):
        dcp.load(blank(state), storage_reader=FastFileSystemReader(place / "saved 0"))
    return result | {"read through": through}


@scenario(ranks=2)
def with_cached_plans(place: Path) -> Any:
    """Plans are made once; other places and other values follow."""
    result = {}
    for name, at in {"elsewhere": "second", "to the same place": "first"}.items():
        DefaultSavePlanner._cached_save_plan.clear()
        DefaultSavePlanner._cached_final_save_plan.clear()
        for cache in ("_cached_all_plans", "_cached_global_plan", "_cached_metadata"):
            getattr(DefaultSavePlanner, cache).clear()
        folders = [place / name / "first", place / name / at, place / name / "third"]
        for seed, folder in enumerate(folders, 1):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            dcp.save({"tensors": tensors(seed)}, storage_writer=FastFileSystemWriter(folder), planner=planner)
        result[f"{name}: cached"] = sorted(DefaultSavePlanner._cached_final_save_plan)
        for seed, folder in list(enumerate(folders, 1))[1:]:
            target = blank({"tensors": tensors(9)})
            dcp.load(target, storage_reader=dcp.FileSystemReader(folder))
            result[f"{name}: {seed}"] = bits(target) == bits({"tensors": tensors(seed)})
        result[f"{name}: hidden"] = hidden(place / name)
    return result


@contextmanager
def _broken_disk(rank: int, after: int) -> Any:
    """pwrite fails on one rank, after so many calls."""
    real, calls = os.pwrite, [0]

    def pwrite(*args: Any) -> int:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(28, "No space left on device")
        return real(*args)

    with mock.patch("os.pwrite", pwrite if dist.get_rank() == rank else real):
        yield


@scenario(ranks=2)
def a_rank_fails(place: Path) -> Any:
    """Old values stay, all ranks raise, and the next save works, with the same writer and with others."""
    folder = place / "run"
    dcp.save({"tensors": tensors(1)}, storage_writer=FastFileSystemWriter(folder))
    result: dict[str, Any] = {}
    writers = [FastFileSystemWriter(folder) for _ in range(2)]
    for rank, writer in enumerate(writers):
        with _broken_disk(rank, after=4):
            result[f"rank {rank}"] = failure(lambda w=writer: dcp.save({"tensors": tensors(2)}, storage_writer=w))  # type: ignore[misc]
        target = blank({"tensors": tensors(9)})
        dcp.load(target, storage_reader=FastFileSystemReader(folder))
        result[f"rank {rank}: old"] = bits(target) == bits({"tensors": tensors(1)})
        result[f"rank {rank}: hidden"] = hidden(place)
    dcp.save({"tensors": tensors(3)}, storage_writer=writers[1])  # the one that has just failed
    other = FastFileSystemWriter(folder)
    with _broken_disk(1, after=4):
        result["once more"] = failure(lambda: dcp.save({"tensors": tensors(4)}, storage_writer=other))
    dcp.save({"tensors": tensors(5)}, storage_writer=FastFileSystemWriter(folder))  # while `other` is still there
    target = blank({"tensors": tensors(9)})
    dcp.load(target, storage_reader=dcp.FileSystemReader(folder))
    return result | {"new": bits(target) == bits({"tensors": tensors(5)}), "hidden": hidden(place)}


@scenario(ranks=2)
def a_failed_save_leaves(place: Path) -> Any:
    """What is there after a failure: until close(), or until the writer is gone."""
    result: dict[str, Any] = {}
    for name in ("close", "gone"):
        writer: FastFileSystemWriter | None = FastFileSystemWriter(place / "run")
        with _broken_disk(1, after=4):
            result[name] = failure(lambda w=writer: dcp.save({"tensors": tensors(2)}, storage_writer=w))  # type: ignore[misc]
        result[f"{name}: before"] = hidden(place)
        assert writer is not None
        if name == "close":
            writer.close()
        writer = None
        import gc

        gc.collect()
        result[f"{name}: after"] = hidden(place)
    return result


@scenario(ranks=2)
def asynchronously(place: Path) -> Any:
    """dcp.async_save by threads: a new folder each, and over an old one; then by a process."""
    result: dict[str, Any] = {}
    group = dist.new_group(backend="gloo")
    writer = FastFileSystemWriter(place / "run")
    for seed in (1, 2):
        state = {"tensors": tensors(seed), "objects": OBJECTS}
        pending: Any = dcp.async_save(state, storage_writer=writer, process_group=group)
        metadata = pending.result(timeout=60)
        result[f"thread {seed}: places"] = len(metadata.storage_data) > 0
        target = blank(state)
        dcp.load(target, storage_reader=FastFileSystemReader(place / "run"))
        result[f"thread {seed}"] = differing(target, state)
    state = {"tensors": tensors(3), "objects": OBJECTS}
    pending = dcp.async_save(
        state,
        checkpoint_id=place / "by a process",
        storage_writer=writer,
        process_group=group,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    pending.result(timeout=100)
    target = blank(state)
    dcp.load(target, checkpoint_id=place / "by a process", storage_reader=FastFileSystemReader(place))
    return result | {"process": differing(target, state), "hidden": hidden(place)}


@scenario(ranks=2)
def each_rank_for_itself(place: Path) -> Any:
    """use_collectives=False: ours refuses to write it, and reads what torch wrote, or says what is missing."""
    state = {"tensors": tensors(1)}
    try:
        dcp.save(state, storage_writer=FastFileSystemWriter(place / "ours"), use_collectives=False)
        refused = ""
    except Exception as error:  # noqa: BLE001 - looked at by the test
        refused = f"{type(error).__name__}: {error}"
    dcp.save(state, storage_writer=dcp.FileSystemWriter(place / "torch"), use_collectives=False)
    dist.barrier()
    target = blank(state)
    dcp.load(target, storage_reader=FastFileSystemReader(place / "torch"))
    result: dict[str, Any] = {"refused": refused, "same ranks": bits(target) == bits(state)}
    whole = {"tensors": {"odd": torch.full((7, 3, 5), 3.0)}}
    result["whole"] = failure(lambda: dcp.load(whole, storage_reader=FastFileSystemReader(place / "torch")))
    result["untouched"] = bool((whole["tensors"]["odd"] == 3.0).all())
    return result


@scenario(ranks=2)
def a_rank_reads_damage(place: Path) -> Any:
    """A bit is flipped in the last rank's file; torch loads it, ours tells all ranks."""
    folder, state = place / "run", {"tensors": tensors(1)}
    dcp.save(state, storage_writer=FastFileSystemWriter(folder))
    if dist.get_rank() == 1:
        data = bytearray((folder / "__1_0.distcp").read_bytes())
        data[len(data) // 2] ^= 4
        (folder / "__1_0.distcp").write_bytes(data)
    dist.barrier()
    target = blank(state)
    dcp.load(target, storage_reader=dcp.FileSystemReader(folder))
    silent = bits(target) != bits(state)
    # Nobody reads the record whole, and the bit is in the part of the last rank.
    placement, mesh = Shard(1), init_device_mesh("cpu", (2,))
    columns = {"tensors": {"large": distribute_tensor(torch.zeros(700, 1031), mesh, [placement], src_data_rank=None)}}
    return {
        "in columns": failure(lambda: dcp.load(columns, storage_reader=FastFileSystemReader(folder))),
        "torch is silent": silent,
        "ours": failure(lambda: dcp.load(blank(state), storage_reader=FastFileSystemReader(folder))),
    }


@scenario(ranks=2)
def paths_differ(place: Path) -> Any:
    """A name with a time stamp of each rank's own: the first rank's counts."""
    folder = place / f"run-{dist.get_rank()}"
    dcp.save({"tensors": tensors(1)}, storage_writer=FastFileSystemWriter(folder))
    dist.barrier()
    target = blank({"tensors": tensors(1)})
    dcp.load(target, storage_reader=dcp.FileSystemReader(place / "run-0"))
    names = sorted(path.name for path in place.iterdir())
    return {"right": bits(target) == bits({"tensors": tensors(1)}), "names": names}


if __name__ == "__main__":
    main()
