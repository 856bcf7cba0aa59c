"""The kernels that Inductor generates for FlexAttention, compiled ahead of time for a chip that is not here:
``python -m benchmarks.gpu.flex`` runs a process for each chip and writes a record. No GPU is needed, g++ is.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "records" / "flex-ahead-of-time.json"
CHIPS = ((8, 0), (8, 6), (9, 0))
KEYS = ("dtype", "dim", "v_dim", "table", "window", "key_heads")  # key heads for 4 of the queries
CASES = [
    ("bfloat16", 16, 16, True, None, 4),
    ("bfloat16", 64, 64, True, None, 4),
    ("float16", 64, 64, True, None, 4),
    ("bfloat16", 64, 64, False, 200, 4),
    ("bfloat16", 64, 64, True, None, 2),
    ("bfloat16", 80, 80, True, None, 4),
    ("bfloat16", 128, 64, True, None, 4),
    ("bfloat16", 128, 128, True, None, 4),
]


def sources(dtype: str, dim: int, v_dim: int, table: bool, window: int | None, groups: int) -> list[str]:
    """What Inductor writes for `attend_flex`, forward and backward, at T 512."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchmarks.gpu import pretend  # `chip` has imported it before torch
    from kerple.attention import cuda

    pretend.generated.clear()
    torch._dynamo.reset()
    cuda.compiled_by_itself.cache_clear()
    cuda.causal_mask.cache_clear()

    def rows(heads: int, width: int) -> Any:
        x = torch.empty(2, 512, heads * width, dtype=getattr(torch, dtype), device="cuda", requires_grad=True)
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    with FakeTensorMode(allow_non_fake_inputs=True):
        learned = torch.empty(4, 512, device="cuda", requires_grad=True) if table else None
        try:
            cuda.attend_flex(rows(4, dim), rows(groups, dim), rows(groups, v_dim), learned, window)
        except RuntimeError as error:
            if "here it would run" not in f"{error} {error.__cause__}":
                raise
    return list(pretend.generated)


def kernels(code: str, target: Any) -> list[dict[str, Any]]:
    """Compile each attention kernel of a generated source; what it takes."""
    import torch._inductor.runtime.triton_helpers as helpers
    import torch._inductor.runtime.triton_heuristics as heuristics
    import triton
    from triton.compiler import ASTSource

    from benchmarks.gpu.kernels import resources

    helpers.set_driver_to_gpu = lambda: None
    found, rows = [], []

    def note(**options: Any) -> Any:
        def keep(function: Any) -> Any:
            found.append((options, function))
            return function

        return keep

    for name in ("template", "pointwise", "persistent_reduction", "reduction"):
        setattr(heuristics, name, lambda *_, name=name, **options: note(kind=name, **options))
    for name, source in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", code, re.S):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.py"
            path.write_text(source.replace("\\\\", "\\"))
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            found.clear()
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
            options, function = found[0]
            if options["kind"] != "template":
                continue
            meta = options["triton_meta"]
            attributes: dict[Any, Any] = {}
            for config in meta.get("configs", []):
                attributes |= {k if isinstance(k, tuple) else (k,): v for k, v in dict(config).items()}
            constants = {
                (function.arg_names.index(k),) if isinstance(k, str) else k: v
                for k, v in meta.get("constants", {}).items()
            }
            ast = ASTSource(fn=function, signature=dict(meta["signature"]), constexprs=constants, attrs=attributes)
            launch = {"num_warps": options["num_warps"], "num_stages": options["num_stages"]}
            kernel = triton.compile(ast, target=target, options=launch)
            launch |= {key: int(size) for key, size in re.findall(r"\b(BLOCK_[MN]\d?) ?: tl.constexpr = (\d+)", source)}
        taken = resources(kernel.asm["ptx"], kernel.metadata.shared, target.arch)
        rows.append({"pass": "backward" if "backward" in name else "forward", "launch": launch, "taken": taken})
    return rows


def chip(capability: tuple[int, int]) -> None:
    """Print a JSON line for each case and pass, in a process that pretends the chip."""
    from benchmarks.gpu import pretend  # before torch, which the next line imports
    from benchmarks.gpu.kernels import SHARED

    target = pretend.pretend(capability, SHARED[capability])
    for case in CASES:
        for code in sources(*case):
            for row in kernels(code, target):
                taken = row.pop("taken")
                told = dict(zip(KEYS, case, strict=True))
                faults = taken.faults(capability)
                print(
                    json.dumps({"chip": f"sm_{target.arch}", **told, **row, **asdict(taken), "faults": faults}),
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", nargs=2, type=int, help="capability, for this process alone")
    given = parser.parse_args()
    if given.chip:
        chip(tuple(given.chip))
        return
    rows = []
    for capability in CHIPS:
        command = [sys.executable, "-m", "benchmarks.gpu.flex", "--chip", *map(str, capability)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    import torch
    import triton

    record = {"torch": torch.__version__, "triton": triton.__version__, "rows": rows}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
