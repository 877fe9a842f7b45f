"""The code that inductor generates for a GPU that is not there: it is neither built nor run."""

import multiprocessing
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _triton

from common.engine.compiler import compile_model
from common.testing.simulated_gpu import let_autograd_run

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=1 << 37,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    warp_size=32,
)


@dataclass
class Generated:
    """A graph's Triton code, and the bytes that its kernels read and write, as inductor counts."""

    code: str
    nbytes: int


def generate_code(model: nn.Module, shape: tuple[int, ...]) -> list[Generated]:
    """Compile ``model``, on the meta device; return its forward and its backward pass.

    Its input is bfloat16, under autocast. This process must be a forked one.
    """
    assert multiprocessing.parent_process(), "start it in a process of run_ranks"
    generated: list[Generated] = []

    def compile_to_module(graph: GraphLowering) -> SimpleNamespace:
        code, _ = graph.codegen()
        sizes = [node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes]
        generated.append(Generated(code.value, sum(sizes)))
        (outputs,) = graph.orig_gm.graph.output_node().args
        values = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in outputs]
        return SimpleNamespace(call=lambda _: values)

    # While CUDA is not available: the mode then takes care of what PyTorch asks a GPU.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        pass
    _simulate()
    passes = "torch._inductor.fx_passes"
    with ExitStack() as stack:
        for patch in (
            mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
            # Patterns and constants would be computed on the GPU.
            mock.patch(f"{passes}.joint_graph.lazy_init", return_value=None),
            mock.patch(f"{passes}.post_grad.lazy_init", return_value=None),
            config.patch(fx_graph_cache=False, joint_graph_constant_folding=False),
            functorch_config.patch(enable_autograd_cache=False),
            mode,
        ):
            stack.enter_context(patch)
        model.to_empty(device="cuda")
        compile_model(model, how="model")
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        y.backward(torch.empty_like(y))
    return generated


def _simulate() -> None:
    """Answer what is asked of a GPU while code is generated."""
    answers = dict(
        is_available=True,
        device_count=1,
        current_device=0,
        get_device_properties=H200,
        _get_device_properties=H200,
        get_device_capability=(9, 0),
        get_device_name=H200.name,
        is_bf16_supported=True,
        is_initialized=True,
        is_current_stream_capturing=False,
        _exchange_device=0,
        _maybe_exchange_device=0,
        set_device=None,
        synchronize=None,
        current_stream=mock.MagicMock(),
        default_stream=mock.MagicMock(),
        _lazy_init=None,
        get_rng_state=torch.get_rng_state(),
        set_rng_state=None,
    )
    for key, value in answers.items():
        setattr(torch.cuda, key, lambda *_, value=value, **__: value)
    torch.cuda.default_generators = [torch.Generator()]
    for name in ("getDevice", "exchangeDevice", "maybeExchangeDevice", "getCurrentRawStream"):
        setattr(torch._C, f"_cuda_{name}", lambda *_: 0)
    _triton.triton_hash_with_backend = lambda: ""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    torch.autograd.set_multithreading_enabled(False)  # a fork does not copy its threads
    let_autograd_run()
