"""Parts of the CUDA backend that run on a CPU: the mask, padded lengths, and the kernel in Triton's interpreter."""

import json
import math
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from packaging.version import Version
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from kerple.attention import cuda
from tests.attention.test_flex_on_cpu import first_keys

INTERPRETED = """
import json, torch
from torch.library import opcheck
from kerple.attention import cuda
from kerple.attention.cuda_table_gradient import table_gradient
from tests.attention.test_flex_on_cpu import by_definition, first_keys, tensors

def error(heads, groups, length, dim, v_dim, window, dtype, strided, starts=None):
    torch.manual_seed(0)
    (q, k, v, table), grad = tensors(length, heads, groups, dim, v_dim, getattr(torch, dtype), strided)
    q, k, v = (x.detach() for x in (q, k, v))
    exact = table.detach().double().requires_grad_()
    first = None if starts is None else first_keys(length, starts)
    results = by_definition(q.double(), k.double(), v.double(), exact, window, 0.3, first)
    grad_lse = torch.randn(results[1].shape)
    expected, = torch.autograd.grad(results, exact, (grad.double(), grad_lse.double()))
    out, lse = (x.detach().to(d).requires_grad_() for x, d in zip(results, (q.dtype, torch.float32)))
    same = cuda.AddTableGradient.apply(out, lse, q, k, v, table, 0.3, window, first)
    *passed, got = torch.autograd.grad(same, (out, lse, table), (grad, grad_lse))
    assert all(map(torch.equal, passed, (grad, grad_lse))) and all(map(torch.equal, same, (out, lse)))
    delta = (grad.float() * out.detach().float()).sum(-1) - grad_lse
    arguments = (grad, q, k, v, table.detach(), lse.detach(), delta, 0.3, window, first)
    assert torch.equal(got, table_gradient(*arguments))
    if strided:
        opcheck(table_gradient, arguments)
    return ((got.double() - expected).norm() / expected.norm().clamp(min=1e-6)).item()

print(json.dumps([error(*case) for case in json.loads(CASES)]))
"""


@pytest.mark.slow
def test_the_kernel_in_the_interpreter_gives_the_gradient_of_the_table() -> None:
    triton = pytest.importorskip("triton", reason="Triton has no wheel for this system")
    if Version(triton.__version__) < Version("3.7") and Version(np.__version__) >= Version("2.4"):
        pytest.xfail("Triton 3.6's interpreter converts arrays to numbers as numpy 2.4 no longer allows")
    cases = [  # heads, key heads, T, δ, δv, window, dtype, strided, first tokens of documents
        (1, 1, 70, 16, 20, None, "float32", False),
        (2, 1, 70, 20, 16, 40, "float32", True),
        (1, 1, 64, 16, 16, None, "float32", False),  # a full tile needs no mask
        (2, 1, 140, 16, 16, None, "float32", True, [[0, 3, 64, 100], [0]]),  # documents
        (1, 1, 40, 80, 128, None, "float16", True),  # tiles of 32; the interpreter uses numpy, without bfloat16
    ]
    code = f"CASES = {json.dumps(json.dumps(cases))}\n" + INTERPRETED
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    for case, error in zip(cases, json.loads(done.stdout), strict=True):
        assert error < (1e-5 if "float32" in case else 2e-2), case


KINDS = ("kv", "full_kv", "q", "full_q")  # of the lists of a block mask


def block_lists(mask: BlockMask) -> list[list[list[int]]]:
    """Return the lists of a mask: of each query block's key blocks, then of each key block's query blocks.

    Both are given first for blocks in which some pairs are visible, then for those in which all are.
    """
    lists = []
    for name in KINDS:
        counts, indices = (getattr(mask, f"{name}_{part}") for part in ("num_blocks", "indices"))
        assert counts.dtype == indices.dtype == torch.int32
        assert ((indices >= 0) & (indices < len(counts[0, 0]))).all()  # a kernel may load members beyond the count
        pairs = zip(counts.flatten().tolist(), indices.flatten(0, 2).tolist(), strict=True)
        lists.append([members[:count] for count, members in pairs])
    return lists


@pytest.mark.parametrize("starts", [None, [[0, 7, 128, 640], [0], [0, 500, 501, 767]]])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 200, 300])
def test_the_block_mask_is_the_one_torch_builds(window, starts) -> None:
    first, limit = None if starts is None else first_keys(768, starts).int(), window or 768

    def visible(b, h, m, n):
        return (m >= n) & (m - n < limit) & (True if first is None else n >= first[b, m])

    expected = create_block_mask(visible, None if starts is None else 3, None, 768, 768, device="cpu")
    assert block_lists(cuda.build_mask(768, window, torch.device("cpu"), first)) == block_lists(expected)


@pytest.mark.slow
def test_compiled_lists_of_documents_have_the_strides_that_flex_attention_reads() -> None:
    # FlexAttention's kernels multiply the batch index by the stride of the dimension of heads, which has one element.
    # The compiler may give such a dimension the stride 0, so that all sequences would have the lists of the first one.
    strides = []

    @torch.library.custom_op("kerple_tests::strides", mutates_args=(), tags=(torch.Tag.flexible_layout,))
    def look(lists: list[torch.Tensor]) -> torch.Tensor:
        strides.extend((x.stride(), x.shape) for x in lists)
        return lists[0].new_zeros(1)

    @look.register_fake
    def _(lists):
        return lists[0].new_empty(1)

    def build(first: torch.Tensor) -> torch.Tensor:
        mask = cuda.build_mask(512, None, first.device, first)
        return look([getattr(mask, f"{kind}_{part}") for kind in KINDS for part in ("num_blocks", "indices")])

    torch.compile(build, dynamic=False, fullgraph=True)(torch.zeros(3, 512, dtype=torch.int32))
    assert [stride[:2] for stride, _ in strides] == [(size := math.prod(shape[2:]), size) for _, shape in strides]
    assert len(strides) == 8


def test_all_lengths_are_padded_to_few_lengths() -> None:
    padded = {length: cuda.padded_length(length) for length in range(1, 16385)}
    assert all(length <= target == padded[target] for length, target in padded.items())
    targets = sorted(set(padded.values()))
    assert len(targets) < 24
    assert all(longer <= 1.5 * shorter for shorter, longer in pairwise(targets[1:]))
