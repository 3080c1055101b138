"""What transformers calls tensors once it has loaded them: version 5 renames and fuses some while it loads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["LoadedNames", "loaded_names"]

_SEVERAL_MODELS = ("text_config", "vision_config", "audio_config")


class LoadedNames:
    """Names after loading, by names in files.

    Attributes:
        names: Only of tensors whose name changes.
        is_certain: Whether that is all that changes; models of several parts have rules within rules.
    """

    def __init__(self, names: Mapping[str, str], *, is_certain: bool) -> None:
        self.names = names
        self.is_certain = is_certain


def loaded_names(names: Collection[str], config: Mapping[str, Any]) -> LoadedNames:
    """Return what becomes of names that a model does not know.

    Args:
        names: The names.
        config: Of the model.
    """
    is_certain = not any(isinstance(config.get(part), dict) for part in _SEVERAL_MODELS)
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # before version 5
        return LoadedNames({}, is_certain=is_certain)
    classes = config.get("architectures")
    kinds = [config.get("model_type"), *(classes[:1] if isinstance(classes, list) else ())]
    rules = [rule for kind in kinds if isinstance(kind, str) for rule in get_checkpoint_conversion_mapping(kind) or ()]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    found = {}
    for name in names if rules else ():
        renamed, _ = rename_source_key(name, renamings, converters)
        if renamed != name:
            found[name] = renamed
    return LoadedNames(found, is_certain=is_certain)
