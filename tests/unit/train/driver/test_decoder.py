"""The decoder computes what transformers' Llama computes with the same weights."""

from __future__ import annotations

import pytest
import torch

from fsdp_ckpt.train.driver.decoder import Decoder, DecoderConfig


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_logits_equal_those_of_transformers(kv_heads: int, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = DecoderConfig(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=kv_heads, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    model = Decoder(sizes, seed=3)
    judge = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes.to_hf()))
    judge.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 16, (3, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), judge.eval()(tokens).logits, rtol=1e-4, atol=1e-5)
    assert DecoderConfig.from_hf(sizes.to_hf()) == sizes
