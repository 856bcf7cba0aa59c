"""Gaps in the positions between a context and its targets."""

import numpy as np
import pytest
import torch

from kerple.base.errors import UserError
from kerple.data.text import Text
from kerple.hf.adapter import hugging_face_network
from kerple.hf.translation import read_family
from kerple.measure.gap import GapCurve, _remaining_fraction
from kerple.model.stored import fill, transformer
from tests.hf.tiny import LENGTH, VOCABULARY, tiny
from tests.probe.models import build

CONTEXT, K, GAP = 20, 8, 40
JUMP = GAP * (torch.arange(CONTEXT + K) >= CONTEXT)


def tokens():
    return torch.randint(1, VOCABULARY, (2, CONTEXT + K + 1), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("bos", [None, 3])
@torch.inference_mode()
def test_a_jump_is_one_of_the_angles_and_rows_in_transformers_and_in_our_network(family, bos):
    model, read = tiny(family), tokens()
    stored = read_family(model.config, model.state_dict())
    ours = transformer(stored.model).eval()
    fill(ours, stored)
    ours.bos = bos
    inputs = read[:, :-1] if bos is None else torch.nn.functional.pad(read[:, :-1], (1, 0), value=bos)
    ids = torch.arange(inputs.shape[1]) + torch.nn.functional.pad(JUMP, (inputs.shape[1] - len(JUMP), 0))
    logits = model(inputs, position_ids=ids[None], attention_mask=torch.ones_like(inputs)).logits[:, -K:]
    expected = -logits.log_softmax(-1).gather(-1, read[:, -K:, None])[..., 0]
    for network in (hugging_face_network(model, bos=bos), ours):
        torch.testing.assert_close(network.losses(read, K, offset=JUMP), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(ours.losses(read, K), expected, atol=1e-3)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3", "olmo3", "cohere2", "llama4"])
@torch.inference_mode()
def test_layers_with_windows_keep_their_positions(family):
    model = build(family)
    network, read = hugging_face_network(model), tokens()
    same = torch.allclose(network.losses(read, offset=JUMP), network.losses(read), atol=1e-5)
    assert same == (family in ("mistral", "cohere2", "llama4"))  # whose other layers have no positions
    for layer, kind in zip(
        model.model.layers, getattr(model.config, "layer_types", ["full_attention"] * 4), strict=True
    ):
        if kind == "full_attention":
            layer.self_attn.o_proj.weight.zero_()
    torch.testing.assert_close(network.losses(read, offset=JUMP), network.losses(read), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_the_context_stays_visible_where_no_layer_has_positions():
    network, read = hugging_face_network(build("smollm3", no_rope_layers=[0] * 4)), tokens()
    torch.testing.assert_close(network.losses(read, K, offset=JUMP), network.losses(read, K), atol=1e-5, rtol=1e-5)


def test_the_curve_is_of_the_losses_of_each_document():
    network = hugging_face_network(tiny("llama"))
    stream = torch.randint(1, VOCABULARY, (400,), generator=torch.Generator().manual_seed(2))
    text = Text(stream, begins=[0, 100, 110, 250])
    measure = GapCurve(context=CONTEXT, k=K, blocks=3)
    result = measure.run(network, text)
    assert measure.fitting_gaps(network) == [0, *(LENGTH * n // 4 for n in (1, 2, 4, 8, 16, 64))]
    rows = {(row["gap"], row["document"]): row["loss"] for row in result.tables["gap"]}
    block = stream[110 : 110 + CONTEXT + K + 1][None]
    with torch.inference_mode():
        for gap in (0, LENGTH):
            expected = network.losses(block, K, offset=gap * (torch.arange(CONTEXT + K) >= CONTEXT)).mean()
            assert rows[gap, 2] == pytest.approx(float(expected), rel=1e-5)
        assert rows["no context", 2] == pytest.approx(float(network.losses(block[:, -K - 1 :]).mean()), rel=1e-5)
    assert {row.length for row in result.sums if row.protocol == f"gap{K}"} == {
        gap + CONTEXT + K for gap in measure.fitting_gaps(network)
    }
    assert GapCurve([10, 99], CONTEXT, K).fitting_gaps(hugging_face_network(tiny("gpt2"))) == [0, 10, 99]
    assert GapCurve([10, 101], CONTEXT, K).fitting_gaps(hugging_face_network(tiny("gpt2"))) == [0, 10]
    with pytest.raises(UserError, match="expected one with Offset"):
        measure.run(hugging_face_network(tiny("bloom")), text)


def test_the_fraction_that_is_kept_is_of_means_and_its_interval_a_jackknife():
    none, near, far = np.array([[3.0, 4.0, 5.0, 3.5], [1.0, 1.0, 2.0, 2.0], [2.0, 1.5, 3.0, 2.5]])
    kept, low, high = _remaining_fraction(none, near, far)
    assert kept == pytest.approx(1 - (2.25 - 1.5) / (3.875 - 1.5))
    without = [1 - (np.delete(far - near, i).sum() / np.delete(none - near, i).sum()) for i in range(4)]
    half = 3.182446 * np.sqrt(3 / 4 * np.square(without - np.mean(without)).sum())
    assert (low, high) == pytest.approx((kept - half, kept + half), rel=1e-5)
