"""A pretended GPU for torch.compile (Dynamo, AOTAutograd, Inductor), so that kernels can be generated without one.

It stands on private interfaces of torch 2.13, so it is a tool and not a test. It changes its process for good, and has
to be imported before torch, which asks for its hooks once.
"""

import contextlib
import ctypes
import subprocess
import sys
import tempfile
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

assert "torch" not in sys.modules


def _load_guard() -> None:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "guard.so"
        source = Path(__file__).with_name("pretended_guard.cpp")
        include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        link = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", source, *include, *link, "-o", library], check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


_load_guard()

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

PROCESSORS = {(8, 0): 108, (8, 6): 84, (8, 9): 128, (9, 0): 132}
generated: list[str] = []  # source that Inductor has written since it was cleared


class Generated(RuntimeError):
    """Raised where the generated code would run."""


class Nothing(contextlib.AbstractContextManager):
    """A device to be on."""

    def __init__(self, *_: Any) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def pretend(capability: tuple[int, int], shared: int) -> GPUTarget:
    """Make torch believe in one GPU; ``shared`` bytes of shared memory a block of threads."""
    properties = types.SimpleNamespace(
        name="pretended", major=capability[0], minor=capability[1], multi_processor_count=PROCESSORS[capability],
        total_memory=80 * 2**30, warp_size=32, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        max_threads_per_block=1024, gcnArchName="", L2_cache_size=50 * 2**20, shared_memory_per_block=49152,
        shared_memory_per_block_optin=shared, shared_memory_per_multiprocessor=shared + 1024, uuid="0", clock_rate=1,
        memory_clock_rate=1, memory_bus_width=1, is_integrated=False, is_multi_gpu_board=False,
    )  # fmt: skip
    stream = types.SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device_type=1)
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True, "_lazy_init": None,
        "init": None, "get_device_capability": capability, "get_device_properties": properties, "set_device": None,
        "get_device_name": "pretended", "synchronize": None, "is_bf16_supported": True, "get_arch_list": ["sm_90"],
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None, "get_rng_state_all": [],
        "_is_in_bad_fork": False, "is_current_stream_capturing": False, "current_stream": stream,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.device = torch.cuda._DeviceGuard = Nothing  # type: ignore[misc, assignment]
    torch.cuda._exchange_device = lambda _: 0  # type: ignore[assignment]
    torch.cuda._maybe_exchange_device = lambda _: 0  # type: ignore[assignment] # Dynamo tells the two apart
    torch.version.cuda = "12.8"
    for name in ("RawStream", "Stream"):
        setattr(torch._C, f"_cuda_getCurrent{name}", lambda *_: 0)
    for name in ("exchangeDevice", "maybeExchangeDevice", "getDevice", "setDevice"):
        setattr(torch._C, f"_cuda_{name}", lambda *_: 0)
    _register(capability, properties, stream)
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    driver = types.SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda _: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0), get_device_interface=lambda: torch.cuda,
        is_active=lambda: True, get_benchmarker=lambda: None,
    )  # fmt: skip
    triton.runtime.driver.set_active(driver)
    _stop_before_running()
    return target


def _register(capability: tuple[int, int], properties: Any, stream: Any) -> None:
    import torch._dynamo.device_interface as interfaces
    import torch.utils._triton

    def gives(answer: Any) -> staticmethod:
        return staticmethod(lambda *_, **__: answer)

    shared = {
        "current_device": gives(0), "set_device": gives(None), "get_device_properties": gives(properties),
    }  # fmt: skip
    own = {
        **shared, "device": Nothing, "Event": Nothing, "Worker": type("Worker", (), shared), "device_count": gives(1),
        "is_available": gives(True), "get_compute_capability": gives(capability[0] * 10 + capability[1]),
        "get_raw_stream": gives(0), "exchange_device": gives(0), "maybe_exchange_device": gives(0),
        "synchronize": gives(None), "is_triton_capable": gives(True), "raise_if_triton_unavailable": gives(None),
        "is_bf16_supported": gives(True), "is_dtype_supported": gives(True), "current_stream": gives(stream),
    }  # fmt: skip
    pretended = type("Pretended", (interfaces.CudaInterface,), own)
    for name in ("cuda", "cuda:0"):
        interfaces.register_interface_for_device(name, pretended)
    setattr(torch.utils._triton, "has_triton", lambda *_, **__: True)  # noqa: B010 (mypy knows its cache)


def _stop_before_running() -> None:
    import torch._inductor.fx_passes.joint_graph as joint
    import torch._inductor.fx_passes.post_grad as post
    from torch._functorch import config as functorch
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    def module(self: GraphLowering) -> types.ModuleType:
        code = self.codegen()[0]
        generated.append(code if isinstance(code, str) else code.value)
        made = types.ModuleType("generated")
        made.__file__, made.__path__ = __file__, None  # type: ignore[assignment]
        self.cache_key, self.cache_path, self.cache_linemap = "none", __file__, []

        def call(arguments: Any) -> None:
            raise Generated("here it would run")

        made.call = call  # type: ignore[attr-defined]
        return made

    GraphLowering._compile_to_module = GraphLowering.compile_to_module = module  # type: ignore[method-assign]
    config.compile_threads, config.fx_graph_cache, config.force_disable_caches = 1, False, True
    config.pattern_matcher = config.joint_graph_constant_folding = False
    joint.lazy_init = post.lazy_init = lambda *_, **__: None
    functorch.force_non_lazy_backward_lowering, functorch.enable_autograd_cache = True, False
