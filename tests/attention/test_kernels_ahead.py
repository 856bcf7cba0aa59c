"""GPU kernels compiled ahead of time, without a GPU: they fit the chips, and use tensor cores."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this system")
from benchmarks.gpu.kernels import compile_ahead, grid

BF16 = torch.bfloat16


@pytest.mark.parametrize(("capability", "dim"), [((9, 0), 64), ((8, 0), 128)])
def test_the_kernel_fits_the_chip(capability: tuple[int, int], dim: int) -> None:
    assert compile_ahead(capability, BF16, dim).faults(capability) == []


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype", "dim", "v_dim"), grid())
def test_the_kernel_fits_every_chip_with_every_dtype_and_head(capability, dtype, dim, v_dim) -> None:
    assert compile_ahead(capability, dtype, dim, v_dim).faults(capability) == []
