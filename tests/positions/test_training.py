"""A strategy of each kind learns something of the demo's text, the standard library, in 30 steps; the rest if slow."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kerple.data.prepare.corpora import standard_library
from kerple.model.transformer import Transformer
from kerple.positions import Shape, names, strategies

LENGTH, BATCH, STEPS = 48, 8, 30
KINDS = ("KerpleLog", "RoPE", "FIRE", "RandomizedPositions")


@pytest.fixture(scope="module")
def batches() -> Tensor:
    """(steps, B, T + 1) int64: bytes of the first files, packed back to back with a 0 between them."""
    wanted, text = STEPS * BATCH * (LENGTH + 1), b""
    for path in standard_library().files:
        text += Path(path).read_bytes() + b"\0"
        if len(text) >= wanted:
            break
    return torch.tensor(list(text[:wanted])).view(STEPS, BATCH, LENGTH + 1)


@pytest.mark.parametrize(
    "name", [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in names()]
)
def test_thirty_steps_lower_the_loss(name: str, batches: Tensor) -> None:
    torch.manual_seed(0)
    network = Transformer(
        Shape(32, 4, LENGTH),
        layers=2,
        vocabulary=256,
        position=strategies()[name],
    ).train()
    before = [p.detach().clone() for p in network.positions.parameters()]
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2)
    losses = []
    for tokens in batches:
        loss = network.losses(tokens).mean()
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        network.constrain_()

    # ln 256 = 5.55 at first; knowing which bytes are frequent gives about 3.6
    assert losses[0] == pytest.approx(5.55, abs=0.1)
    assert sum(losses[-5:]) / 5 < 3.8
    assert all(not torch.equal(a, b) for a, b in zip(before, network.positions.parameters(), strict=True))
