"""Decide what a save writes: parts, small files, and the manifest that lists them."""

from __future__ import annotations

import copy
import datetime as dt
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp_ckpt import __version__
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.layouts.manifest import Manifest, Member, write_manifest
from fsdp_ckpt.train.hooks import SaveEvent
from fsdp_ckpt.train.modules import LiveModel
from fsdp_ckpt.train.objects import encode
from fsdp_ckpt.train.pairing import digest_of
from fsdp_ckpt.train.parts import PartState, model_part, optimizer_part, part_of_mapping
from fsdp_ckpt.train.random_state import RNG_FILE, collect_random_state
from fsdp_ckpt.train.ranks import Ranks
from fsdp_ckpt.train.subjects import Subjects, all_slots, models_of

__all__ = ["SaveJob"]


@dataclass(kw_only=True)
class SaveJob:
    """What is to be written.

    Attributes:
        save_id: Random; that of the first rank counts.
        parts: Models and optimizers.
        own: Small files of this rank, by name.
        shared: Small files of the first rank, by name.
        manifest: Everything about the checkpoint but its files.
        has_scaler: Whether there is a gradient scaler.
    """

    save_id: str
    parts: list[PartState]
    own: dict[str, bytes]
    shared: dict[str, bytes]
    manifest: Manifest
    has_scaler: bool

    @classmethod
    def plan(
        cls,
        subjects: Subjects,
        live: Mapping[str, LiveModel],
        ranks: Ranks,
        state_dict_type: str,
        *,
        step: int | None,
        values: Mapping[str, Any],
        rng: bool,
    ) -> SaveJob:
        """Collect everything that this rank will write.

        Raises:
            UsageError: Values that JSON does not have.
            Incompatible: State that could not be loaded again.
        """
        parts = [model_part(number, model, state_dict_type) for number, model in enumerate(live.values())]
        slots = all_slots(live)
        optimizers = []
        for number, (name, optimizer) in enumerate(subjects.optimizers.items()):
            parts.append(optimizer_part(number, optimizer, slots, state_dict_type, is_first=ranks.is_first))
            pair = models_of(optimizer, live)
            facts = {"parameters": digest_of(name for group in parts[-1].groups for name in group)}
            optimizers.append(
                Member(name=name, part=f"optimizer_{number}", kind=type(optimizer).__name__, of=pair, facts=facts)
            )
        shared: dict[str, bytes] = {}
        own: dict[str, bytes] = {}
        schedulers = _members(subjects.schedulers, "scheduler", ".bin", shared, ranks)
        objects = _members(subjects.objects, "custom_checkpoint", ".pkl", shared, ranks, numbered=True)
        if subjects.scaler is not None:
            state = subjects.scaler.state_dict()
            if ranks.is_first:
                shared["scaler.pt"] = encode(state, "the scaler")
        if subjects.dataloaders:
            states = {name: item.state_dict() for name, item in subjects.dataloaders.items()}
            own[f"dl_states_{ranks.rank}.pkl"] = encode(states, "the data loaders")
        if rng:
            own[RNG_FILE.format(rank=ranks.rank)] = encode(collect_random_state(step), "the random generators")
        manifest = Manifest(
            save_id="",
            step=step,
            world_size=ranks.size,
            state_dict_type=state_dict_type,
            created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            versions={"fsdp_ckpt": __version__, "torch": torch.__version__, "python": platform.python_version()},
            models=[
                Member(name=name, part=f"pytorch_model_fsdp_{number}", kind=model.kind, facts=model.facts)
                for number, (name, model) in enumerate(live.items())
            ],
            optimizers=optimizers,
            schedulers=schedulers,
            dataloaders=[
                Member(name=name, part="dl_states", kind=type(item).__name__)
                for name, item in subjects.dataloaders.items()
            ],
            objects=objects,
            has_rng=rng,
            values=dict(values),
        )
        try:
            _check_keys(values)
            write_manifest(manifest)
            manifest = replace(manifest, values=copy.deepcopy(manifest.values))  # the caller's may change
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"values: {error}", hint="give numbers, texts, lists and dictionaries; anything else goes to objects="
            ) from None
        save_id = os.urandom(8).hex()
        return cls(
            save_id=save_id,
            parts=parts,
            own=own,
            shared=shared,
            manifest=manifest,
            has_scaler=subjects.scaler is not None,
        )

    def names(self) -> list[str]:
        """Return the names that hooks use."""
        manifest = self.manifest
        small = [member.part for member in (*manifest.schedulers, *manifest.objects)]
        small += ["scaler"] if self.has_scaler else []
        small += ["random_states"] if manifest.has_rng else []
        return [part.name for part in self.parts] + small + (["dl_states"] if manifest.dataloaders else [])

    def apply(self, event: SaveEvent, ranks: Ranks) -> None:
        """Do what hooks asked for."""
        for name, state in event.replaced.items():
            number = next((n for n, part in enumerate(self.parts) if part.name == name), None)
            if number is None:
                raise UsageError(f"`{name}` is neither a model nor an optimizer and cannot be replaced")
            self.parts[number] = part_of_mapping(self.parts[number], state, ranks)
        gone = event.skipped
        self.parts = [part for part in self.parts if part.name not in gone]
        for files in (self.own, self.shared):
            for file in [file for file in files if _stem(file) in gone]:
                del files[file]
        self.shared |= event.files
        kept: dict[str, Any] = {
            kind: [member for member in getattr(self.manifest, kind) if member.part not in gone]
            for kind in ("models", "optimizers", "schedulers", "dataloaders", "objects")
        }
        has_rng = self.manifest.has_rng and "random_states" not in gone
        self.manifest = replace(self.manifest, has_rng=has_rng, **kept)


def _stem(file: str) -> str:
    """Return the part that a small file belongs to: files of each rank lose their number."""
    stem = file.rpartition(".")[0]
    for prefix in ("random_states", "dl_states"):
        if stem.startswith(prefix):
            return prefix
    return stem


def _members(
    items: Mapping[str, Any], stem: str, ending: str, shared: dict[str, bytes], ranks: Ranks, *, numbered: bool = False
) -> list[Member]:
    """Encode states that the first rank stores; Accelerate leaves out the first number, but not for custom objects."""
    members = []
    for number, (name, item) in enumerate(items.items()):
        part = f"{stem}_{number}" if number or numbered else stem
        state = item.state_dict()  # on every rank: it may be a collective
        if ranks.is_first:
            shared[part + ending] = encode(state, f"{type(item).__name__} `{name}`")
        members.append(Member(name=name, part=part, kind=type(item).__name__))
    return members


def _check_keys(value: Any) -> None:
    """JSON makes texts of other keys, without a word."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r:.40} is no text")
            _check_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_keys(item)
