"""GPU kernels compiled ahead of time without a GPU: shared memory, registers and tensor cores."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this system")
from benchmarks.gpu.kernels import Resources, compile_ahead, grid

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("capability", "dim", "even"), [pytest.param((9, 0), 64, True, marks=pytest.mark.slow), ((8, 0), 128, False)]
)
def test_the_kernel_fits_the_chip(capability: tuple[int, int], dim: int, even: bool) -> None:
    assert compile_ahead(capability, BF16, dim, even=even, documents=not even).faults(capability) == []
    assert len(Resources(255, spilled=8, shared=10**6, tensor_core=0, atomics=1).faults(capability)) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype", "dim", "v_dim"), grid())
def test_the_kernel_fits_every_chip_with_every_dtype_and_head(capability, dtype, dim, v_dim) -> None:
    for even, documents in ((True, False), (False, False), (False, True)):
        assert compile_ahead(capability, dtype, dim, v_dim, even, documents).faults(capability) == []
