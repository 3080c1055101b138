"""Read what ``--shapes-from`` names: shapes as JSON, weights, or the ``config.json`` of a model of transformers."""

from __future__ import annotations

import os
from pathlib import Path

from fsdp_ckpt.errors import UnknownLayout, UsageError
from fsdp_ckpt.layouts.flat_shapes import ModelShapes, read_shapes
from fsdp_ckpt.ops.conversion.meta_model import MetaModel, meta_shapes

__all__ = ["shapes_from", "shapes_of_meta"]


def shapes_from(path: str | os.PathLike[str]) -> ModelShapes:
    """Read the names and shapes of a model's tensors.

    Args:
        path: ``config.json``, or a folder with one and without weights; else as ``layouts.flat_shapes.read_shapes``.

    Raises:
        CheckpointNotFound: Nothing is there, or nothing that holds a model.
        UsageError: The file says something else, or transformers is needed and not installed.
        CorruptCheckpoint: The weights are damaged.

    Example:
        >>> shapes_from("config.json").source  # doctest: +SKIP
        'config.json'
    """
    place = Path(path)
    if place.name == "config.json":
        return _from_config(place)
    try:
        return read_shapes(place)
    except UnknownLayout:
        if place.is_dir() and (place / "config.json").is_file():
            return _from_config(place / "config.json")
        raise


def shapes_of_meta(model: MetaModel, *, source: str) -> ModelShapes:
    """Return the names and shapes of a model's parameters, shared ones with all of their names.

    Args:
        model: The model.
        source: What to call it in messages.
    """
    tied = {name: model.parameters[kept] for name, kept in model.tied.items()}
    return ModelShapes(source=source, shapes={**model.parameters, **tied}, aliases=model.tied)


def _from_config(file: Path) -> ModelShapes:
    model = meta_shapes(file)
    if model is None:
        raise UsageError(
            f"`{file}` takes transformers to tell the model's shapes, and it is not installed",
            hint="pip install transformers torch; or give the shapes as JSON, written before the model is wrapped: "
            "json.dump([[name, p.shape, p.stride()] for name, p in model.named_parameters()], file)",
        )
    return shapes_of_meta(model, source=file.name)
