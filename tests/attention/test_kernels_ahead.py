"""GPU kernels compiled ahead of time, without a GPU: they fit the chips, and use tensor cores."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this system")
from benchmarks.gpu import flex
from benchmarks.gpu.kernels import SHARED, compile_ahead, grid
from kerple.attention import cuda
from kerple.attention.diagonals import PROGRAMS, TILES, Tiling, shares

BF16 = torch.bfloat16


@pytest.mark.parametrize(("capability", "dim"), [((9, 0), 64), ((8, 0), 128)])
def test_the_kernel_fits_the_chip(capability: tuple[int, int], dim: int) -> None:
    assert compile_ahead(capability, BF16, dim).faults(capability) == []


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype", "dim", "v_dim"), grid())
def test_the_kernel_fits_every_chip_with_every_dtype_and_head(capability, dtype, dim, v_dim) -> None:
    assert compile_ahead(capability, dtype, dim, v_dim).faults(capability) == []


def test_tiles_that_are_too_large_are_found_out() -> None:
    spilling = compile_ahead((8, 0), BF16, 128, cut=Tiling(64, 4, 3))  # what was launched once
    assert spilling.faults((8, 0)) == [f"{spilling.spilled} bytes of registers are spilled"]
    too_large = compile_ahead((9, 0), BF16, 128, cut=Tiling(64, 8, 4))
    assert too_large.faults((9, 0)) == [f"{too_large.shared} bytes of shared memory do not fit {SHARED[9, 0]}"]


@pytest.mark.slow
def test_fp32_is_kept_from_the_kernel_for_a_reason() -> None:
    faults = compile_ahead((8, 0), torch.float32, 64).faults((8, 0))
    assert any("spilled" in fault for fault in faults)
    assert any("tensor cores" in fault for fault in faults)


def test_partial_sums_of_the_table_s_gradient_stay_small_and_short_inputs_keep_the_chip_busy() -> None:
    for batch, length, side in ((1, 16384, 64), (32, 512, 64), (8, 2048, 32), (1, 2048, 64)):
        blocks = length // side
        each = shares(blocks * 12, batch * blocks)
        assert each * 12 * blocks * side**2 * 4 <= 48 * 2**20
        assert each * 12 * blocks >= min(PROGRAMS, 12 * blocks * batch * blocks // TILES) / 2


def test_the_record_of_flex_attention_s_kernels_is_of_the_tiles_that_are_asked_for_now() -> None:
    """Torch's own choice does not launch on an H100; what is asked for instead was compiled for every chip and case."""
    record = json.loads(flex.RECORD.read_text())
    assert (
        f"torch=={record['torch'].partition('+')[0]}\n" in (Path(__file__).parents[2] / "requirements.txt").read_text()
    )
    cases = {(row["chip"], row["pass"], *(row[key] for key in flex.KEYS)): row for row in record["rows"]}
    assert len(cases) == len(record["rows"])
    for capability in flex.CHIPS:
        for case in flex.CASES:
            for which, prefix in (("forward", "fwd"), ("backward", "bwd")):
                row = cases.pop((f"sm_{capability[0]}{capability[1]}", which, *case))
                asked = cuda.tiles(SHARED[capability], max(case[1:3]))
                assert {f"{prefix}_{key}": size for key, size in row["launch"].items()}.items() <= asked.items()
                assert len(row["launch"]) == (4 if which == "forward" else 6)
                assert row["shared"] <= SHARED[capability]
                assert row["tensor_core"] > 0
                assert row["atomics"] == 0
                grouped = case[-1] < 4
                assert row["spilled"] <= (2000 if grouped and which == "backward" else 24), row
    assert not cases
