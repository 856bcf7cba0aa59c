"""The kernel of the table's gradient, compiled ahead of time for chips that are not here: ``python -m
benchmarks.gpu.kernels`` prints registers, spills, shared memory and tensor cores of each. No GPU is needed.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kerple.attention.diagonals import Tiling, diagonal_kernel, tiling, width

NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED = {(8, 0): 166_912, (8, 6): 101_376, (8, 9): 101_376, (9, 0): 232_448}  # bytes a block of threads may have
DIMS = (16, 32, 64, 80, 96, 128)
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes; ``tensor_core`` counts its mma.sync and wgmma instructions."""

    registers: int
    spilled: int  # bytes stored and loaded
    shared: int  # bytes
    tensor_core: int
    atomics: int

    def faults(self, capability: tuple[int, int]) -> list[str]:
        """What would keep it from running, or from running fast, on a chip."""
        found = []
        if self.spilled:
            found.append(f"{self.spilled} bytes of registers are spilled")
        if self.shared > SHARED[capability]:
            found.append(f"{self.shared} bytes of shared memory do not fit {SHARED[capability]}")
        if not self.tensor_core:
            found.append("no instruction uses the tensor cores")
        if self.atomics:
            found.append(f"{self.atomics} atomics: the bits depend on the order of programs")
        return found


def compile_ahead(
    capability: tuple[int, int], dtype: torch.dtype, dim: int, v_dim: int | None = None, even: bool = True,
    cut: Tiling | None = None,
) -> Resources:  # fmt: skip
    """Compile `diagonal_kernel` as `table_gradient` launches it on a chip, for a length that fills its tiles or not.

    ``cut`` replaces its `tiling`.
    """
    v_dim = v_dim or dim
    cut = cut or tiling(capability, max(dim, v_dim))
    constants = {
        "DIM": dim, "V_DIM": v_dim, "WIDTH": width(dim), "V_WIDTH": width(v_dim), "GROUP": 1, "SIDE": cut.side,
        "SPLITS": 8, "EVEN": even,
    }  # fmt: skip
    signature, attributes = {}, {}
    for i, name in enumerate(diagonal_kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("Q", "K", "V", "G"):
            signature[name] = TYPES[dtype]
        elif name in ("LSE", "DELTA", "TABLE", "OUT"):
            signature[name] = "*fp32"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
        # pointers and strides are multiples of 16, as torch allocates and as heads of a multiple of 16 lie
        stride = signature[name] == "i32" and (name[1:2] == "_" or name == "table_h")
        if signature[name].startswith("*") or stride:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=diagonal_kernel,
        signature=signature,
        constexprs={(diagonal_kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    options = {"num_warps": cut.warps, "num_stages": cut.stages}
    chip = capability[0] * 10 + capability[1]
    kernel = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    return resources(kernel.asm["ptx"], kernel.metadata.shared, chip)


def resources(ptx: str, shared: int, chip: int) -> Resources:
    """Assemble PTX for a chip such as 80 or 90, and read what the assembler says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        name = f"sm_{chip}{'a' if chip >= 90 else ''}"
        command = [str(NVIDIA / "ptxas"), "-v", f"--gpu-name={name}", str(path), "-o", f"{folder}/kernel"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers is not None
    assert spills is not None
    return Resources(
        registers=int(registers[1]),
        spilled=int(spills[1]) + int(spills[2]),
        shared=shared,
        tensor_core=ptx.count("mma.sync") + ptx.count("wgmma.mma_async"),
        atomics=len(re.findall(r"\b(?:atom|red)\.global", ptx)),
    )


def grid() -> list[tuple[tuple[int, int], torch.dtype, int, int]]:
    """Every chip, dtype and size of a head that `backend.select` lets reach the kernel, and a δv other than δ."""
    dims = [*((dim, dim) for dim in DIMS), (128, 64)]
    return [(c, dtype, *both) for c in SHARED for dtype in (torch.bfloat16, torch.float16) for both in dims]


def main() -> None:
    for (capability, dtype, dim, v_dim), even in product(grid(), (True, False)):
        taken = compile_ahead(capability, dtype, dim, v_dim, even)
        faults = ", ".join(taken.faults(capability)) or "fits"
        masks = "without masks" if even else "with masks"
        print(f"sm_{capability[0]}{capability[1]} {dtype} δ {dim}, {v_dim} {masks}: {taken}: {faults}", flush=True)


if __name__ == "__main__":
    main()
