"""Whole models of transformers, random weights copied into ours, give the same logits."""

import pytest
import torch
from torch import Tensor, nn

from kerple.model.transformer import Transformer
from kerple.positions import Learned, RoPE, Shape

DIM, HEADS, LAYERS, LENGTH, VOCABULARY = 32, 4, 3, 40, 60


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 37), generator=torch.Generator().manual_seed(0))


def spread(model: nn.Module) -> nn.Module:
    """Weights, norms and biases large enough to be told apart: a fresh model attends uniformly and has biases of 0."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1) / 2, std=0.2)
    return model.eval()


def copy(to: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    with torch.no_grad():
        to.weight.copy_(weight)
        if bias is not None:
            to.bias.copy_(bias)


@torch.no_grad()
def test_gpt2_with_learned_positions() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=DIM,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = spread(transformers.GPT2LMHeadModel(config))
    ours = Transformer(
        Shape(DIM, HEADS, LENGTH), LAYERS, VOCABULARY, Learned, tied=True, activation="gelu_tanh", eps=1e-5
    ).eval()
    body = theirs.transformer
    copy(ours.embedding, body.wte.weight, None)
    ours.positions[0].table.copy_(body.wpe.weight)
    for block, source in zip(ours.blocks, body.h, strict=True):
        copy(block.attention_norm, source.ln_1.weight, source.ln_1.bias)
        copy(block.attention.qkv, source.attn.c_attn.weight.T, source.attn.c_attn.bias)  # their layout is (in, out)
        copy(block.attention.out, source.attn.c_proj.weight.T, source.attn.c_proj.bias)
        copy(block.mlp_norm, source.ln_2.weight, source.ln_2.bias)
        copy(block.mlp[0], source.mlp.c_fc.weight.T, source.mlp.c_fc.bias)
        copy(block.mlp[2], source.mlp.c_proj.weight.T, source.mlp.c_proj.bias)
    copy(ours.norm, body.ln_f.weight, body.ln_f.bias)

    torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_gpt_neox_with_rope(share: float) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * DIM,
        max_position_embeddings=LENGTH,
        use_parallel_residual=False,
        hidden_act="gelu",
        bos_token_id=0,
        eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share},
    )
    theirs = spread(transformers.GPTNeoXForCausalLM(config))
    ours = Transformer(
        Shape(DIM, HEADS, LENGTH), LAYERS, VOCABULARY, lambda shape: RoPE(shape, share=share), eps=1e-5
    ).eval()
    copy(ours.embedding, theirs.gpt_neox.embed_in.weight, None)
    for block, source in zip(ours.blocks, theirs.gpt_neox.layers, strict=True):
        qkv = source.attention.query_key_value  # rows (H, 3, δ), ours (3, H, δ)
        weight = qkv.weight.view(HEADS, 3, DIM // HEADS, DIM).transpose(0, 1).reshape(3 * DIM, DIM)
        bias = qkv.bias.view(HEADS, 3, DIM // HEADS).transpose(0, 1).flatten()
        copy(block.attention.qkv, weight, bias)
        copy(block.attention_norm, source.input_layernorm.weight, source.input_layernorm.bias)
        copy(block.attention.out, source.attention.dense.weight, source.attention.dense.bias)
        copy(block.mlp_norm, source.post_attention_layernorm.weight, source.post_attention_layernorm.bias)
        copy(block.mlp[0], source.mlp.dense_h_to_4h.weight, source.mlp.dense_h_to_4h.bias)
        copy(block.mlp[2], source.mlp.dense_4h_to_h.weight, source.mlp.dense_4h_to_h.bias)
    copy(ours.norm, theirs.gpt_neox.final_layer_norm.weight, theirs.gpt_neox.final_layer_norm.bias)
    copy(ours.head, theirs.get_output_embeddings().weight, None)

    torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, atol=1e-4, rtol=1e-4)
