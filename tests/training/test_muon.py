"""Muon against a singular value decomposition, torch's own Muon and AdamW."""

import pytest
import torch

from kerple.training.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_orthogonalised_matrices_have_the_singular_vectors_of_the_input(shape: tuple[int, int]) -> None:
    generator, sizes = torch.Generator().manual_seed(0), torch.tensor([1e-3, 1, 1e3]).view(3, 1, 1)
    matrices = torch.randn(3, *shape, generator=generator, dtype=torch.float64) * sizes
    u, singular, vt = torch.linalg.svd(matrices, full_matrices=False)
    directions = orthogonalise(matrices)
    assert directions.dtype == torch.float32
    assert directions.shape == matrices.shape
    rotated = u.mT @ directions.double() @ vt.mT  # diagonal, if the singular vectors are the same
    values = rotated.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(rotated, torch.diag_embed(values), atol=1e-4, rtol=0)
    clear = singular > 0.05 * singular.norm(dim=1, keepdim=True)
    assert clear.sum() > 15
    assert values[clear].min() > 0.65
    assert values[clear].max() < 1.25


def train(optimiser: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    """Make steps whose gradients depend only on the number of the step and on the parameter."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for p in (p for group in optimiser.param_groups for p in group["params"]):
            p.grad = torch.randn(p.shape, generator=generator) + p.detach()
        optimiser.step()


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in ((8, 16), (16, 8), (8, 16), (5,))]


def muon(tensors: list[torch.Tensor], **options: float) -> Muon:
    return Muon([{"params": tensors[:3], "muon": []}, {"params": tensors[3:]}], **{"lr": 0.02} | options)


def test_updates_equal_those_of_torchs_muon_and_adamw() -> None:
    options = {"lr": 0.02, "weight_decay": 0.1}
    start, ours, theirs, adamw = (parameters() for _ in range(4))
    train(muon(ours, **options), 5)
    train(torch.optim.Muon(theirs[:3], adjust_lr_fn="match_rms_adamw", **options), 5)  # iterates in bf16: 3 digits
    train(torch.optim.AdamW(adamw, **options), 5)
    for mine, other, before in zip(ours[:3], theirs[:3], start, strict=False):
        assert (mine - other).norm() < 0.02 * (other - before).norm()
    assert torch.equal(ours[3], adamw[3])


def test_hooks_run_once_per_step() -> None:
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    ours, calls = muon(parameters()), []
    ours.register_step_pre_hook(lambda *_: calls.append("before"))
    ours.register_step_post_hook(lambda *_: calls.append("after"))
    train(ours, 2)
    assert calls == ["before", "after"] * 2


def test_a_failed_step_keeps_all_groups() -> None:
    ours = muon(parameters())
    groups = list(ours.param_groups)
    ours.param_groups[1]["params"][0].grad = torch.ones(5)
    ours.param_groups[1]["lr"] = "not a number"
    with pytest.raises(TypeError):
        ours.step()
    assert ours.param_groups == groups


def test_a_stored_state_continues_exactly() -> None:
    whole, halves = parameters(), parameters()
    train(muon(whole), 4)
    first, second = muon(halves), muon(halves)
    train(first, 2)
    second.load_state_dict(first.state_dict())
    train(second, 2, first=2)
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))


@pytest.mark.parametrize("rows", [[8, 8], [8, 4, 4]])
def test_stacked_matrices_are_updated_like_separate_ones(rows: list[int]) -> None:
    """Queries, keys and values in one parameter, with and without grouped heads."""
    whole = torch.randn(16, 8)
    stacked = torch.nn.Parameter(whole.clone())
    apart = [torch.nn.Parameter(part.clone()) for part in whole.split(rows)]
    ours = Muon([{"params": [stacked], "muon": rows, "weight_decay": 0.1}], lr=0.1)
    theirs = Muon([{"params": apart, "muon": [], "weight_decay": 0.1}], lr=0.1)
    for _ in range(3):
        gradient = torch.randn(16, 8)
        stacked.grad = gradient.clone()
        for part, grad in zip(apart, gradient.split(rows), strict=True):
            part.grad = grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(stacked, torch.cat(apart))
