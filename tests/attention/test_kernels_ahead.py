"""GPU kernels compiled ahead of time, without a GPU: they fit the chips, and use tensor cores."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this system")
from benchmarks.gpu.kernels import compile_ahead, grid
from kerple.attention.diagonals import PROGRAMS, TILES, shares

BF16 = torch.bfloat16


@pytest.mark.parametrize(("capability", "dim"), [((9, 0), 64), ((8, 0), 128)])
def test_the_kernel_fits_the_chip(capability: tuple[int, int], dim: int) -> None:
    assert compile_ahead(capability, BF16, dim).faults(capability) == []


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype", "dim", "v_dim"), grid())
def test_the_kernel_fits_every_chip_with_every_dtype_and_head(capability, dtype, dim, v_dim) -> None:
    assert compile_ahead(capability, dtype, dim, v_dim).faults(capability) == []


def test_partial_sums_of_the_table_s_gradient_stay_small_and_short_inputs_keep_the_chip_busy() -> None:
    for batch, length, side in ((1, 16384, 64), (32, 512, 64), (8, 2048, 32), (1, 2048, 64)):
        blocks = length // side
        each = shares(blocks * 12, batch * blocks)
        assert each * 12 * blocks * side**2 * 4 <= 48 * 2**20
        assert each * 12 * blocks >= min(PROGRAMS, 12 * blocks * batch * blocks // TILES) / 2
