"""The training run of a rank: steps, checkpoints, evaluation, and how it ends."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.driver import task
from fsdp_ckpt.train.driver.events import Evaluated, Finished, Killed, Saving, Stepped, Stopped
from fsdp_ckpt.train.driver.interruption import die_between_saves, die_within_save
from fsdp_ckpt.train.driver.job import Job, prepare
from fsdp_ckpt.train.driver.options import TrainOptions
from fsdp_ckpt.train.preemption import Preemption
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.sharding.mesh import uses_cuda

__all__ = ["train"]

_TIMEOUT = timedelta(minutes=10)
_NUM_HELD_OUT = 256


def train(options: TrainOptions, *, attempt: str = "1") -> int:
    """Train as one of the ranks that torchrun started, or alone; sets up the process group, and leaves it at the end.

    After an exception the process group is left as it is: others may be waiting in it, and the process is to end.

    Args:
        options: The same on every rank.
        attempt: Tells this start's lines in the log from those of earlier ones.

    Returns:
        Exit code: 0, or 128 + the signal that ended the run after its step was saved.

    Raises:
        UsageError: Options that do not fit the ranks, the folder or the model.
        FsdpCkptError: As ``save_state`` and ``load_state``.
    """
    device = _start()
    with Preemption((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)) as preemption:
        job = prepare(options, Ranks(), device, attempt)
        code = _run(job, preemption)
        dist.barrier()  # nobody takes the first rank's store away while others still talk
        dist.destroy_process_group()
    return code


def _start() -> torch.device:
    """Set up the process group; return this rank's device."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_cuda = uses_cuda()
    if on_cuda:
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if here > gpus:
            raise UsageError(
                f"{here} ranks, but {gpus} GPUs on this machine",
                hint="start fewer, or set CUDA_VISIBLE_DEVICES= for CPUs",
            )
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    return torch.device("cuda", rank) if on_cuda else torch.device("cpu")


def _run(job: Job, preemption: Preemption) -> int:
    options, begun = job.options, time.monotonic()
    for step in range(job.first_step, options.steps + 1):
        _step(job, step)
        stops = preemption.requested() and step < options.steps
        saves = options.saves_at(step)
        if step == options.kill_at and not saves:
            die_between_saves(partial(job.tell, Killed(step=step, while_saving=False)))
        if saves or stops:
            _save(job, step)
        if stops:
            job.checkpointer.close()
            assert preemption.signal is not None
            job.tell(Stopped(step=step, signal=preemption.signal))
            return preemption.exit_code
        if saves:
            _evaluate(job, step)
    if job.first_step > options.steps:  # a run that was complete already
        _evaluate(job, job.first_step - 1)
    job.checkpointer.close()
    job.tell(Finished(step=max(options.steps, job.first_step - 1), elapsed_s=time.monotonic() - begun))
    return 0


def _logits(job: Job, tokens: Tensor) -> Tensor:
    """Return the logits of the answers, [batch, digits, vocabulary], given everything before each of them."""
    result: Any = job.model(tokens[:, :-1])
    logits: Tensor = getattr(result, "logits", result)
    return logits[:, job.options.digits :]


def _answers(job: Job, tokens: Tensor) -> Tensor:
    return tokens[:, job.options.digits + 1 :]


def _step(job: Job, step: int) -> None:
    """Train a step on this rank's part of the batch."""
    begun, options = time.monotonic(), job.options
    count = options.batch_size // job.ranks.size
    tokens = task.samples(options.seed, step, job.ranks.rank * count, count, options.digits).to(job.device)
    # All ranks have as many answers, so the mean of their means, which FSDP makes of the gradients, is the batch's.
    loss = functional.cross_entropy(_logits(job, tokens).flatten(0, 1).float(), _answers(job, tokens).flatten())
    loss.backward()
    lr = float(job.scheduler.get_last_lr()[0])
    job.optimizer.step()
    job.scheduler.step()
    # Here, not between forward and backward: the parameters that FSDP1's SHARD_GRAD_OP shows there are others.
    job.optimizer.zero_grad()
    shared = loss.detach().double()
    dist.all_reduce(shared)
    total = shared.item()
    num_tokens = options.batch_size * tokens.shape[1]
    speed = num_tokens / max(time.monotonic() - begun, 1e-9)
    job.tell(Stepped(step=step, loss=total / job.ranks.size, lr=lr, tokens_per_s=speed))


@torch.no_grad()
def _evaluate(job: Job, step: int) -> None:
    """Ask held-out samples. Every rank asks all of them: a forward pass gathers the model on every rank anyway."""
    job.model.eval()
    tokens = task.held_out(job.options.seed, _NUM_HELD_OUT, job.options.digits).to(job.device)
    right = _logits(job, tokens).argmax(-1) == _answers(job, tokens)
    job.model.train()
    # With the right answer as input, a whole answer is right exactly when greedy decoding makes it.
    shares = right.float().mean().item(), right.all(-1).float().mean().item()
    job.tell(Evaluated(step=step, token_accuracy=shares[0], answer_accuracy=shares[1]))


def _save(job: Job, step: int) -> None:
    job.tell(Saving(step=step, path=str(job.checkpointer.path(step))))
    if step == job.options.kill_at:
        killed = Killed(step=step, while_saving=True)
        die_within_save(job.ranks, partial(_save_and_wait, job, step), partial(job.tell, killed))
        return
    job.checkpointer.save(step)


def _save_and_wait(job: Job, step: int) -> None:
    job.checkpointer.save(step)
    job.checkpointer.close()
