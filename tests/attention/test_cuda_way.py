"""The CUDA way as far as a CPU can run it: its mask, its forward uncompiled, its kernel in Triton's interpreter."""

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kerple.attention import cuda
from kerple.attention.reference import attend_reference

INTERPRETED = """
import json, torch
from kerple.attention import cuda
from kerple.attention.diagonals import table_gradient
from kerple.attention.reference import attend_reference

def error(batch, heads, length, dim, window, dtype, strided):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(batch, length, heads, dim).to(dtype).transpose(1, 2) for _ in range(4))
    if not strided:
        q, k, v, grad = (x.contiguous() for x in (q, k, v, grad))
    table = torch.randn(heads, length + 3, dtype=torch.float64, requires_grad=True)
    exact = [x.double() for x in (q, k, v)]
    out = attend_reference(*exact, table=table, window=window)
    wanted, = torch.autograd.grad(out, table, grad.double())
    index = torch.arange(length)
    distance = index[:, None] - index
    hidden = (distance < 0) | (distance >= (window or length))
    s = exact[0] @ exact[1].mT * dim**-0.5 + table.detach()[:, distance.clamp(min=0)]
    lse = s.masked_fill(hidden, float("-inf")).logsumexp(-1).float()
    fp32 = table.detach().float().requires_grad_()
    passed = out.detach().to(dtype).requires_grad_()
    same = cuda.AddTableGradient.apply(passed, lse, q, k, v, fp32, window)
    back, got = torch.autograd.grad(same, (passed, fp32), grad)
    assert torch.equal(back, grad) and torch.equal(same, passed)
    again = table_gradient(grad, q, k, v, fp32.detach(), passed.detach(), lse, window)
    assert torch.equal(got, again)
    return ((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-6)).item()

print(json.dumps([error(*case[:5], getattr(torch, case[5]), case[6]) for case in json.loads(CASES)]))
"""


def test_the_kernel_in_the_interpreter_gives_the_gradient_of_the_table() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    cases = [
        (2, 3, 150, 16, None, "float32", False),
        (1, 2, 64, 20, None, "float32", True),
        (3, 1, 200, 32, 70, "float32", True),
        (1, 2, 2, 64, None, "float32", False),
        (2, 2, 130, 32, None, "float16", True),  # numpy, and so the interpreter, has no bfloat16
    ]
    code = f"CASES = {json.dumps(json.dumps(cases))}\n" + INTERPRETED
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    for case, error in zip(cases, json.loads(done.stdout), strict=True):
        assert error < (1e-5 if case[5] == "float32" else 2e-2), case


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300])
def test_the_block_mask_is_the_one_torch_builds(window) -> None:
    length, reach = 768, window or 768
    mask = cuda.causal_mask(length, window, torch.device("cpu"))
    wanted = create_block_mask(lambda b, h, m, n: (m >= n) & (m - n < reach), None, None, length, length, device="cpu")
    torch.testing.assert_close(mask.to_dense(), wanted.to_dense())
    assert torch.equal(mask.kv_num_blocks, wanted.kv_num_blocks)
    assert torch.equal(mask.full_kv_num_blocks, wanted.full_kv_num_blocks)


@pytest.mark.parametrize("length", [128, 200])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("biased", [True, False])
def test_flex_attention_uncompiled_agrees_with_the_reference(length, window, biased, monkeypatch) -> None:
    monkeypatch.setattr(cuda, "compiled", lambda: flex_attention)
    q, k, v = torch.randn(3, 2, 3, length, 16)
    table = torch.randn(3, length + 7) if biased else None
    got = cuda.attend_flex(q, k, v, table, window)
    torch.testing.assert_close(got, attend_reference(q, k, v, table=table, window=window))


def test_the_ladder_is_short_and_covers() -> None:
    steps = sorted({cuda.ladder(length) for length in range(1, 16385)})
    assert all(cuda.ladder(length) >= length for length in range(1, 16385))
    assert all(cuda.ladder(step) == step for step in steps)
    assert len(steps) < 24
    assert all(b <= 1.5 * a for a, b in pairwise(steps[1:]))
