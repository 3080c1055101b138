from __future__ import annotations

import pytest
from torch import nn

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.sharding.wrap import wrap


def test_there_have_to_be_ranks() -> None:
    with pytest.raises(UsageError, match=r"torch\.distributed is not initialised") as caught:
        wrap(nn.Linear(2, 2))
    assert "torchrun" in str(caught.value.hint)
