"""`FourTerms`: the scores of the first layer under an absolute encoding, as a sum of four terms."""

import torch
from matplotlib.figure import Figure
from pytorch_lightning import LightningModule, Trainer

from kerple.analyses.four_terms import TERMS, four_terms, no_four_terms, spread
from kerple.base.errors import UserError
from kerple.evaluation.analysis import Analysis, publish, strategy_name
from kerple.evaluation.typed import network_of


class FourTerms(Analysis):
    """Splits the first layer's scores into word-word, word-position, position-word and position-position terms.

    It draws the four matrices as means over heads and texts, and writes ``four_terms.csv``: head, term, and the term's
    standard deviation over the keys that a query sees, which says how much the term matters in the softmax. Strategies
    that add nothing to the embeddings, or do more, are skipped with a message, and so is a model with ``qk_norm``.

    Args:
        length: Tokens of a text; None for the training length.
        blocks: Number of texts.
        heads: Heads that the figure averages over; None for all.

    Raises:
        UserError: In `analyse`, if there is no such head.
    """

    name = "four_terms"

    def __init__(self, length: int | None = None, blocks: int = 16, heads: list[int] | None = None) -> None:
        super().__init__(length, blocks)
        self.heads = heads

    def impossible(self, pl_module: LightningModule) -> str | None:
        return no_four_terms(network_of(pl_module)) or super().impossible(pl_module)

    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network = network_of(pl_module)
        names = (*TERMS, "rest")
        length, heads = self._length(pl_module), network.shape.heads
        if self.heads is not None and not all(0 <= h < heads for h in self.heads):
            raise UserError(f"FourTerms: heads: got {self.heads}, expected numbers in 0..{heads - 1}")
        # variance of each term in each head, and mean matrices
        variance = torch.zeros(len(names), heads, dtype=torch.float64, device=pl_module.device)
        mean = torch.zeros(len(names), heads, length, length, dtype=torch.float64, device=pl_module.device)
        for _, tokens in self.read(trainer, pl_module):
            terms = four_terms(network, tokens[:, :-1])
            for i, name in enumerate(names):
                variance[i] += spread(terms[name]).square() / self.blocks
                mean[i] += terms[name][0].double() / self.blocks
        variance = trainer.strategy.reduce(variance, reduce_op="sum")
        mean = trainer.strategy.reduce(mean, reduce_op="sum")
        rows = [
            {"head": head, "term": name, "standard_deviation": float(variance[i, head].sqrt())}
            for head in range(heads)
            for i, name in enumerate(names)
        ]
        chosen = mean[:4, self.heads] if self.heads is not None else mean[:4]  # (4, heads, T, T)
        publish(trainer, self.name, self._figure(chosen.mean(1).cpu(), variance.mean(1).sqrt(), pl_module), rows)

    def _figure(self, matrices: torch.Tensor, deviations: torch.Tensor, pl_module: LightningModule) -> Figure:
        drawn = Figure(figsize=(8.4, 7.6), layout="constrained")
        of = "all heads" if self.heads is None else f"heads {', '.join(map(str, self.heads))}"
        for axes, matrix, name, deviation in zip(
            drawn.subplots(2, 2, sharex=True, sharey=True).flat, matrices, TERMS, deviations, strict=False
        ):
            seen = matrix.masked_fill(torch.ones_like(matrix).triu(1).bool(), float("nan"))
            limit = float(seen.abs().nan_to_num(0).quantile(0.99)) or 1.0  # one outlier must not hide the structure
            image = axes.imshow(seen.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
            drawn.colorbar(image, ax=axes, shrink=0.85, label="score (nats)")
            axes.set_title(f"{name}: standard deviation {float(deviation):.2g}", fontsize=10)
            axes.set(xlabel="key position n", ylabel="query position m")
        drawn.suptitle(
            f"{strategy_name(pl_module)}, first layer: terms of the scaled scores, mean of {of} and {self.blocks} texts"
        )
        return drawn
