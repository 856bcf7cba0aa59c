"""GapCurve: gaps between the positions of a context and of its targets."""

import numpy as np
import pandas as pd
import pytest
import torch

from kerple.base.errors import UserError
from kerple.data.evaluation_text import Text
from kerple.hf.adapter import hugging_face_network
from kerple.measure.gap import GapCurve, _remaining_fraction
from tests.hf.tiny import LENGTH, VOCABULARY, our_network, tiny
from tests.probe.models import build

CONTEXT, K, GAP = 20, 8, 40
OFFSET = GAP * (torch.arange(CONTEXT + K) >= CONTEXT)
TOKENS = torch.randint(1, VOCABULARY, (2, CONTEXT + K + 1), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("bos", [None, 3])
@torch.inference_mode()
def test_losses_with_a_gap_equal_transformers_with_position_ids(family, bos):
    model = tiny(family)
    ours = our_network(model)
    ours.bos = bos
    inputs = TOKENS[:, :-1] if bos is None else torch.nn.functional.pad(TOKENS[:, :-1], (1, 0), value=bos)
    ids = torch.arange(inputs.shape[1]) + torch.nn.functional.pad(OFFSET, (inputs.shape[1] - len(OFFSET), 0))
    logits = model(inputs, position_ids=ids[None], attention_mask=torch.ones_like(inputs)).logits[:, -K:]
    expected = -logits.log_softmax(-1).gather(-1, TOKENS[:, -K:, None])[..., 0]
    for network in (hugging_face_network(model, bos=bos), ours):
        torch.testing.assert_close(network.losses(TOKENS, K, offset=OFFSET), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(ours.losses(TOKENS, K), expected, atol=1e-3)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3", "olmo3", "cohere2", "llama4", "smollm3"])
@torch.inference_mode()
def test_layers_with_windows_keep_their_positions(family):
    # no layer of this SmolLM3 has positions
    model = build(family, **{"no_rope_layers": [0] * 4} if family == "smollm3" else {})
    network = hugging_face_network(model)
    losses = network.losses(TOKENS, offset=OFFSET), network.losses(TOKENS)
    assert torch.allclose(*losses, atol=1e-5) == (family in ("mistral", "cohere2", "llama4", "smollm3"))
    kinds = getattr(model.config, "layer_types", ["full_attention"] * 4)
    for layer, kind in zip(model.model.layers, kinds, strict=True):
        if kind == "full_attention":
            layer.self_attn.o_proj.weight.zero_()
    torch.testing.assert_close(network.losses(TOKENS, offset=OFFSET), network.losses(TOKENS), atol=1e-5, rtol=1e-5)


def test_the_table_has_the_loss_of_each_document_at_each_gap():
    network = hugging_face_network(tiny("llama"))
    stream = torch.randint(1, VOCABULARY, (400,), generator=torch.Generator().manual_seed(2))
    text, measure = Text(stream, begins=[0, 100, 110, 250]), GapCurve(context=CONTEXT, k=K, blocks=3)
    result = measure.run(network, text)
    assert measure.fitting_gaps(network) == [0, *(LENGTH * n // 4 for n in (1, 2, 4, 8, 16, 64))]
    rows = {(row["gap"], row["document"]): row["loss"] for row in result.tables["gap"]}
    block = stream[110 : 110 + CONTEXT + K + 1][None]
    with torch.inference_mode():
        for gap in (0, LENGTH):
            expected = network.losses(block, K, offset=gap * (torch.arange(CONTEXT + K) >= CONTEXT)).mean()
            assert rows[gap, 2] == pytest.approx(float(expected), rel=1e-5)
        assert rows["no context", 2] == pytest.approx(float(network.losses(block[:, -K - 1 :]).mean()), rel=1e-5)
    lengths = {row.length - CONTEXT - K for row in result.sums if row.protocol == f"gap{K}"}
    assert lengths == set(measure.fitting_gaps(network))
    longer = f"\ncontext and targets are {LENGTH + K} tokens, more than the training length of {LENGTH}"
    assert longer in GapCurve([1], LENGTH, K, 2).run(network, text).report
    only_windows = build("mistral")
    only_windows.lm_head.weight.data.neg_()  # so that the context helps
    assert "no gap changes a loss" in measure.run(hugging_face_network(only_windows), text).report
    torch.nn.init.zeros_(network.head.weight)
    assert "it does not help without a gap" in measure.run(network, text).report
    limited = hugging_face_network(tiny("gpt2"))
    assert GapCurve([10, 99], CONTEXT, K).fitting_gaps(limited) == [0, 10, 99]
    assert GapCurve([10, 101], CONTEXT, K).fitting_gaps(limited) == [0, 10]
    limited.head.weight = torch.nn.Parameter(-limited.head.weight)  # so that the context helps
    only_too_large = GapCurve([101], CONTEXT, K, 3).run(limited, text).report
    assert only_too_large.endswith("\ngap of 101: skipped, Learned has only 128 positions")
    assert "no gap" not in only_too_large
    assert "does not help" not in only_too_large
    text.table = pd.DataFrame({"group": ["x", "y", "x", "z"], "overlap": 0.0})
    result = GapCurve([10], CONTEXT, K, 3).run(limited, text)
    losses = pd.DataFrame(result.tables["gap"]).pivot(index="document", columns="gap", values="loss")
    of_groups = [[losses[key][0] + losses[key][2], losses[key][3]] for key in ("no context", 0, 10)]
    _, low, high = _remaining_fraction(*map(np.array, of_groups))
    assert result.report.startswith("gap curve: 2 groups of documents, ")
    assert f"({low:.0%} to {high:.0%})" in result.report
    assert "fewer than 133 positions (context + k)" in GapCurve([1], 125, K, blocks=1).run(limited, text).skipped
    with pytest.raises(UserError, match="expected one with SupportsOffset"):
        measure.run(hugging_face_network(tiny("bloom")), text)


def test_the_remaining_fraction_is_of_means_and_its_interval_a_jackknife():
    none, near, far = np.array([[3.0, 4.0, 5.0, 3.5], [1.0, 1.0, 2.0, 2.0], [2.0, 1.5, 3.0, 2.5]])
    fraction, low, high = _remaining_fraction(none, near, far)
    assert fraction == pytest.approx(1 - (2.25 - 1.5) / (3.875 - 1.5))
    without = [1 - (np.delete(far - near, i).sum() / np.delete(none - near, i).sum()) for i in range(4)]
    half = 3.182446 * np.sqrt(3 / 4 * np.square(without - np.mean(without)).sum())
    assert (low, high) == pytest.approx((fraction - half, fraction + half), rel=1e-5)
