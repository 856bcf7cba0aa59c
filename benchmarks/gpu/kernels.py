"""Ahead-of-time compilation of the kernel for the table's gradient: ``python -m benchmarks.gpu.kernels``.

It prints registers, spills, shared memory and tensor core instructions for each chip, and needs no GPU.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import product

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from kerple.attention.cuda_table_gradient import diagonal_kernel, tiling, width

# bytes of shared memory that a thread block can use, by compute capability
SHARED = {(8, 0): 166_912, (8, 6): 101_376, (8, 9): 101_376, (9, 0): 232_448}
DIMS = (16, 32, 64, 80, 96, 128)
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


@dataclass(frozen=True)
class Resources:
    """Resources and instructions of a compiled kernel."""

    registers: int  # per thread
    spilled: int  # bytes of spilled registers that are stored and loaded
    shared: int  # bytes of shared memory
    tensor_core: int  # number of tensor core instructions (mma.sync and wgmma)
    atomics: int  # number of atomic instructions

    def faults(self, capability: tuple[int, int]) -> list[str]:
        """Return the reasons why the kernel is slow, not deterministic, or does not run on a chip."""
        limit = SHARED[capability]
        faults = {
            f"registers are spilled: {self.spilled} bytes": self.spilled,
            f"{self.shared} bytes of shared memory exceed the limit of {limit}": self.shared > limit,
            "no instruction uses the tensor cores": not self.tensor_core,
            f"{self.atomics} atomic instructions make the result non-deterministic": self.atomics,
        }
        return [fault for fault, present in faults.items() if present]


def compile_ahead(
    capability: tuple[int, int],
    dtype: torch.dtype,
    dim: int,
    v_dim: int | None = None,
    even: bool = True,
    documents: bool = False,
) -> Resources:
    """Compile `diagonal_kernel` with the tile sizes that `table_gradient` uses on a chip, such as (9, 0).

    ``dim`` and ``v_dim`` are the head dimensions of keys and values, by default equal. If the length is a multiple
    of the tile's side, ``even`` is True, and the kernel needs no masks. With ``documents`` it reads the first key of
    each query.
    """
    v_dim = v_dim or dim
    side, warps, stages = tiling(capability, max(dim, v_dim))
    constants = {
        "DIM": dim, "V_DIM": v_dim, "WIDTH": width(dim), "V_WIDTH": width(v_dim), "GROUP": 1, "SIDE": side,
        "SPLITS": 8, "EVEN": even, "DOCUMENTS": documents,
    }  # fmt: skip
    types = dict.fromkeys(constants, "constexpr") | dict.fromkeys("QKVG", TYPES[dtype]) | {"scale": "fp32"}
    types |= dict.fromkeys(("LSE", "DELTA", "TABLE", "OUT"), "*fp32") | {"FIRST": "*i32"}
    names = diagonal_kernel.arg_names
    signature = {name: types.get(name, "i32") for name in names}
    # torch aligns pointers to 16 bytes; strides are multiples of 16, because head dimensions are
    aligned = [name for name in names if signature[name][0] == "*" or re.fullmatch("[a-z]+_[bht]", name)]
    source = ASTSource(
        diagonal_kernel, signature, {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )  # fmt: skip
    chip = capability[0] * 10 + capability[1]
    kernel = triton.compile(source, GPUTarget("cuda", chip, 32), {"num_warps": warps, "num_stages": stages})
    return resources(kernel.asm["ptx"], kernel.metadata.shared, chip)


def resources(ptx: str, shared: int, chip: int) -> Resources:
    """Assemble PTX for a chip such as 80 or 90, and return the resources that the assembler prints."""
    name = f"sm_{chip}{'a' if chip >= 90 else ''}"
    with tempfile.NamedTemporaryFile() as file:
        command = [get_ptxas(chip).path, "-v", f"--gpu-name={name}", "/dev/stdin", "-o", file.name]
        output = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    numbers = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads.*Used (\d+) registers", output, re.DOTALL)
    assert numbers is not None
    return Resources(
        registers=int(numbers[3]),
        spilled=int(numbers[1]) + int(numbers[2]),
        shared=shared,
        tensor_core=ptx.count("mma.sync") + ptx.count("wgmma.mma_async"),
        atomics=len(re.findall(r"\b(?:atom|red)\.global", ptx)),
    )


def grid() -> list[tuple[tuple[int, int], torch.dtype, int, int]]:
    """Return chips, dtypes, and head dimensions (δ, δv) with which the kernel is used; one δv differs from δ."""
    dims = [*((dim, dim) for dim in DIMS), (128, 64)]
    return [(c, dtype, *both) for c in SHARED for dtype in (torch.bfloat16, torch.float16) for both in dims]


def main() -> None:
    for (capability, dtype, dim, v_dim), even in product(grid(), (True, False)):
        used = compile_ahead(capability, dtype, dim, v_dim, even)
        case = f"sm_{capability[0]}{capability[1]} {dtype} δ {dim}, {v_dim} {'without' if even else 'with'} masks"
        print(f"{case}: {used}: {', '.join(used.faults(capability)) or 'fits'}", flush=True)


if __name__ == "__main__":
    main()
