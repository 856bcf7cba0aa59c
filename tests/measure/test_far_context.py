"""FarContext against a loop over single forward passes, and with a network that reads only the last tokens."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch import Tensor

from kerple.base.errors import UserError
from kerple.data.evaluation_text import Text
from kerple.hf.adapter import hugging_face_network
from kerple.measure.extrapolation import Extrapolation
from kerple.measure.far_context import FarContext, counterparts, verdict
from kerple.model import Transformer
from kerple.positions import KerpleLog, Shape
from tests.hf.tiny import hf

VOCABULARY, SHORT, K = 30, 8, 3
BEGINS, TOKENS = [0, 40, 50, 120], 170  # documents of 40, 10, 70 and 50 tokens; 10 are too few for a block


def text_of(groups: list[str] | None = None) -> Text:
    text = Text(torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(3)), BEGINS)
    if groups is not None:
        text.table = pd.DataFrame({"group": groups, "overlap": 0.0})
    return text


def ours() -> Transformer:
    return Transformer(Shape(16, 2, SHORT), 2, VOCABULARY, KerpleLog, init=0.5).double().eval()


def gpt2():
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.5}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, **sizes))
    return hugging_face_network(model.double().eval(), SHORT)


@torch.no_grad()
def loss(network, context: Tensor, target: int) -> float:
    """Return the loss of one target after a context, from the last logits of a forward pass in fp64."""
    logits = (network.model(context[None]).logits if hasattr(network, "model") else network(context[None]))[0, -1]
    assert logits.dtype == torch.float64
    return float(torch.logsumexp(logits, 0) - logits[target])


@pytest.mark.parametrize("make", [ours, gpt2])
@pytest.mark.parametrize(("groups", "others"), [(None, [1, 3, 3, 0]), (["x", "y", "y", "x"], [1, 0, 3, 2])])
def test_losses_equal_a_loop_over_single_forward_passes(make, groups, others) -> None:
    network, text = make(), text_of(groups)
    result, tokens = FarContext(lengths=[16, 32], k=K).run(network, text), torch.as_tensor(text.stream[:TOKENS])
    blocks = [(0, 0), (2, 50), (2, 82), (3, 120)]  # document, first token: blocks of 32 targets need 33 tokens
    for length in (16, 32):
        means: dict[int, list[list[float]]] = {}  # of each block, by document
        for (document, start), other in zip(blocks, others, strict=True):
            block, other_block = tokens[start : start + 33], tokens[blocks[other][1] : blocks[other][1] + 33]
            block_means = [0.0, 0.0, 0.0]
            for t in range(32 - K, 32):  # the input before each of the last k targets
                own, none = block[32 - length : t + 1], block[32 - SHORT : t + 1]
                foreign = torch.cat([other_block[: length - SHORT], none])
                for i, context in enumerate((own, none, foreign)):
                    block_means[i] += loss(network, context, int(block[t + 1])) / K
            means.setdefault(document, []).append(block_means)
        for document, values in means.items():
            own, none, foreign = np.mean(values, 0)
            (row,) = [r for r in result.tables["far_context"] if (r["length"], r["document"]) == (length, document)]
            expected = {"own": own, "none": none, "foreign": foreign, "gain": none - own, "content": foreign - own}
            expected["disturbance"] = foreign - none
            assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-10)
            assert (row["blocks"], row["targets"]) == (len(values), K * len(values))
    assert result.about["too_short"] == 1
    at_longest = pd.DataFrame(result.tables["far_context"]).query("length == 32")
    units = at_longest["document"].replace(dict(enumerate(groups))) if groups else at_longest["document"]
    gains = [np.average(rows["gain"], weights=rows["targets"]) for _, rows in at_longest.groupby(units)]
    low, high = stats.t.interval(0.95, len(gains) - 1, np.mean(gains), stats.sem(gains))
    assert len(gains) == (2 if groups else 3)
    assert f"over {len(gains)} {'groups of documents' if groups else 'documents'} in nats" in result.report
    assert f"gain {low:+.4f} to {high:+.4f}" in result.report
    (axes,) = result.figures["far_context"].axes
    assert axes.get_title().startswith(f"{network.name}: effect of distant text, {len(gains)} ")


def test_far_context_and_extrapolation_read_the_same_blocks() -> None:
    text, options = text_of(["x", "y", "y", "x"]), {"blocks_per_group": 1, "blocks_per_document": 1}
    measures = FarContext([16, 32], K, **options), Extrapolation([8, 32], ["full"], documents=True, **options)
    for about in (measure.run(ours(), text).about for measure in measures):
        assert (about["block_document"], about["groups"]) == ([0, 2], ["x", "y"])


class LastTokens:
    """A network without positions, whose losses depend only on the last three inputs."""

    name = "LastTokens"
    training_length: int | None = SHORT

    def losses(self, tokens: Tensor, last: int | None = None) -> Tensor:
        inputs = torch.nn.functional.pad(tokens[:, :-1], (2, 0)).unfold(1, 3, 1).double()
        losses = (inputs * torch.tensor([0.1, 0.7, 0.2])).sum(-1).cos() + tokens[:, 1:]
        return losses if last is None else losses[:, -last:]


def test_effects_are_zero_for_a_network_that_reads_only_the_last_tokens() -> None:
    for row in FarContext(lengths=[16, 32], k=K).run(LastTokens(), text_of()).tables["far_context"]:
        assert [row[name] for name in ("gain", "content", "disturbance")] == pytest.approx([0, 0, 0], abs=1e-12)


def test_counterparts_come_from_the_next_group() -> None:
    assert counterparts(["a", "a", "a", "b", "c", "c"]) == [3, 3, 3, 4, 0, 1]
    with pytest.raises(UserError, match="got blocks of only one document"):
        counterparts([0, 0])


def test_distant_text_is_used_if_gain_and_content_are_positive() -> None:
    assert verdict((0.01, 0.02), (0.1, 0.2)) == "distant text is used"
    assert verdict((-0.4, -0.3), (0.2, 0.3)) == "distant text is harmful"
    for gain, content in (((0.01, 0.02), (-0.1, 0.2)), ((-0.01, 0.02), (0.1, 0.2))):
        assert verdict(gain, content) == "no use of distant text is shown"


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        ({"lengths": [8]}, text_of(), "lengths: got 8, expected more than 8, the training length"),
        ({"lengths": [16], "k": 8}, text_of(), "k: got 8, expected less than 8"),
        ({"lengths": [16], "overlap": 50}, text_of(), "overlap: got 50, expected a fraction from 0 to 1"),
        ({"lengths": [70]}, text_of(), "got 0 blocks of 71 tokens that .* the longest document has 70 tokens"),
        ({"lengths": [16]}, Text(torch.zeros(99, dtype=torch.int64), [0]), "got blocks of only one document"),
        ({"lengths": [16]}, Text(torch.zeros(99, dtype=torch.int64)), "documents of the text are not known; use Token"),
    ],
)
def test_wrong_options_and_texts_are_an_error_before_the_measurement(options, text, message) -> None:
    network = LastTokens()
    network.losses = lambda *_: pytest.fail("the text was read")
    with pytest.raises(UserError, match=message):
        FarContext(**options).run(network, text)
    network.training_length = None
    with pytest.raises(UserError, match="the training length of LastTokens, which is not known"):
        FarContext(lengths=[16]).run(network, text_of())
