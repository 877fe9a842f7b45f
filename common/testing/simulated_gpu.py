"""A GPU that is not there: tensors on cuda:0 that compute on the CPU, and where the host waits.

What a GPU refuses raises RuntimeError: operands on two devices, and tensors that NCCL cannot send.
Values are a CPU's. What it cannot show: DDP's reducer and inductor, which do not run on it, DALI's
mixed decoder, NCCL itself, and races.
"""

import ctypes
import multiprocessing
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from common.data import loader
from common.files import ROOT
from common.launch.signals import stop_signals
from common.recording import RECORDINGS
from common.testing.tape import TapeRecording

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
# The host needs the result of these, or its shape.
WAITING = {
    aten._local_scalar_dense,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten.bincount,
    aten._unique2,
}
COPYING = {aten.copy_, aten._to_copy}
INDEXING = {aten.index, aten.index_put, aten.index_put_}
LEAD = 5  # launches, of a recorded step, that keep a GPU busy while the host waits for an event
Waits = dict[str, set[int]]  # "file:function", and the lines there


class GpuTensor(Tensor):
    """A tensor on cuda:0 whose values are those of ``raw``, on the CPU."""

    @staticmethod
    def __new__(cls, raw):
        attributes = dict(
            strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=CUDA
        )
        return Tensor._make_wrapper_subclass(cls, raw.shape, **attributes)

    def __init__(self, raw):
        self.raw = raw

    def tolist(self):
        return self.cpu().tolist()

    def untyped_storage(self):
        return self.raw.untyped_storage()  # FSDP frees the storage, and allocates it again

    def record_stream(self, stream):
        pass

    __torch_dispatch__ = None  # the mode is asked first


class SimulatedGpu(TorchDispatchMode):
    """Run the operations of `GpuTensor`; record in ``waits`` where the host has waited.

    ``kernels`` counts those that the main thread has launched, and those of others.
    """

    def __init__(self):
        super().__init__()
        self.waits: Waits = {}
        self.kernels = {True: 0, False: 0}
        self.is_recording = False
        self.finished = 0
        self.generator = torch.Generator()
        self.cpu_groups = set()  # the others are NCCL's

    @property
    def launched(self):
        return sum(self.kernels.values())

    def wait(self, *_):
        """Record that the host waits here, until the queue is empty."""
        self.finished = self.launched
        for frame, line in traceback.walk_stack(sys._getframe()):
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and ".venv" not in path.parts and path != Path(__file__):
                location = f"{path.relative_to(ROOT)}:{frame.f_code.co_qualname}"
                self.waits.setdefault(location, set()).add(line)
                return

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        packet = function._overloadpacket
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(leaf, DTensor) for leaf in leaves):
            return NotImplemented  # its own dispatch comes back with GpuTensors
        has_ours = any(isinstance(leaf, GpuTensor) for leaf in leaves)
        makes_ours = has_ours and (packet is not aten.copy_ or isinstance(args[0], GpuTensor))
        if kwargs.get("device"):
            makes_ours = torch.device(kwargs["device"]).type == "cuda"
            kwargs |= {"device": torch.device("cpu")} if makes_ours else {}
        is_pinned = kwargs.pop("pin_memory", False)
        if function.namespace == "c10d":
            self._check_collective(function, leaves)
        elif has_ours:
            _check_devices(function, leaves)
        if (has_ours or makes_ours) and _has_to_wait(packet, args, kwargs, makes_ours):
            self.wait()
        raw_args, raw_kwargs = tree_map_only(GpuTensor, lambda tensor: tensor.raw, (args, kwargs))
        if makes_ours and torch.Tag.nondeterministic_seeded in function.tags:
            with torch.random.fork_rng([]):
                torch.set_rng_state(self.generator.get_state())
                result = function(*raw_args, **raw_kwargs)
                self.generator.set_state(torch.get_rng_state())
        else:
            result = function(*raw_args, **raw_kwargs)
        if is_pinned:
            result.is_pinned_here = True
        if not makes_ours:
            return result
        self.kernels[threading.current_thread() is threading.main_thread()] += not function.is_view
        result = tree_map_only(Tensor, GpuTensor, result)
        return return_and_correct_aliasing(function, args, kwargs, result) if has_ours else result

    def new_group(self, start, ranks, timeout=None, backend=None):
        """Return a group of gloo, which is to be NCCL's unless gloo was asked for."""
        group = start(ranks, timeout, "gloo")
        if backend == "gloo" and isinstance(group, dist.ProcessGroup):  # else one of other ranks
            self.cpu_groups.add(group.group_name)
        return group

    def device_of(self, group=None):
        return "cpu" if group and group.group_name in self.cpu_groups else "cuda"

    def _check_collective(self, function, leaves):
        """Raise RuntimeError for a tensor that the group's backend cannot send."""
        (group,) = (
            leaf
            for leaf in leaves
            if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf)
        )
        device = self.device_of(dist.ProcessGroup.unbox(group))
        for tensor in leaves:
            if isinstance(tensor, Tensor) and not (
                tensor.device.type == device and tensor.is_contiguous()
            ):
                raise RuntimeError(
                    f"{function} on {device}: a tensor on {tensor.device}, strides "
                    f"{tensor.stride()}"
                )


class SimulatedEvent:
    """A place in the queue of ``gpu``: who waits for it empties the queue if little comes after."""

    def __init__(self, gpu):
        self.gpu = gpu

    def record(self, *_):
        self.place = self.gpu.launched

    def synchronize(self):
        if self.place > self.gpu.finished and self.gpu.launched < self.place + LEAD:
            self.gpu.wait()

    def query(self):
        return self.place <= self.gpu.finished

    def elapsed_time(self, later):
        return 1.0


class SimulatedRecording(TapeRecording):
    """A CUDA graph on ``gpu``: recording launches nothing, a replay is one launch."""

    def __init__(self, gpu, beside=None):
        super().__init__(beside)
        self.gpu = gpu

    def record(self, function):
        self.gpu.is_recording = True
        with self._count(0):
            result = super().record(function)
        self.gpu.is_recording = False
        return result

    def replay(self):
        with self._count(1):
            super().replay()

    @contextmanager
    def _count(self, launches):
        is_main = threading.current_thread() is threading.main_thread()
        before = self.gpu.kernels[is_main]
        yield
        self.gpu.kernels[is_main] = before + launches


def _check_devices(function, leaves):
    """Raise RuntimeError for operands on two devices."""
    others = [
        leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, GpuTensor)
    ]
    if torch.Tag.pointwise in function.tags:  # such kernels take a single number as an argument
        others = [tensor for tensor in others if tensor.ndim]
    if others and function._overloadpacket not in COPYING | INDEXING:
        raise RuntimeError(
            f"{function}: tensors on cuda:0, and one of shape {tuple(others[0].shape)} on the CPU"
        )


def _has_to_wait(packet, args, kwargs, to_gpu):
    """Return whether the host waits for the result of an operation."""
    if packet in INDEXING:
        indices = [index for index in args[1] if index is not None]
        return any(
            i.dtype == torch.bool or (i.ndim and not isinstance(i, GpuTensor)) for i in indices
        )
    if packet not in COPYING:
        return packet in WAITING
    source, *is_async = args[1:] if packet is aten.copy_ else args
    if isinstance(source, GpuTensor) == to_gpu:
        return False
    host = source if to_gpu else args[0]  # _to_copy makes it, pinned
    is_pinned = hasattr(host, "is_pinned_here") or isinstance(host, GpuTensor)
    return not (is_pinned and (kwargs.get("non_blocking") or any(is_async)))


def _pin(tensor):
    pinned = tensor.clone()
    pinned.is_pinned_here = True
    return pinned


def _swap(swap_tensors, old, new):
    """Keep attributes and hooks, as an assignment to ``data`` would."""
    new.__dict__.update({key: value for key, value in old.__dict__.items() if key != "raw"})
    new._backward_hooks = old._backward_hooks
    swap_tensors(old, new)


def _move(parameters, buffers, device):
    """Stand in for FSDP's function, which assigns to ``data``."""
    for tensor in (*parameters, *buffers):
        torch.utils.swap_tensors(
            tensor, nn.Parameter(tensor.detach().to(device), tensor.requires_grad)
        )


def simulate_gpu() -> SimulatedGpu:
    """Give this process, which must be a forked one, a simulated GPU to its end."""
    assert multiprocessing.parent_process(), (
        "the simulation cannot be undone: start it in a process of run_ranks"
    )
    gpu = SimulatedGpu()
    stream = mock.MagicMock()
    name = "NVIDIA H200"
    stream.synchronize = gpu.wait
    answers = dict(
        is_available=True,
        is_initialized=True,
        device_count=8,
        current_device=0,
        set_device=None,
        get_device_name=name,
        get_device_capability=(9, 0),
        get_device_properties=SimpleNamespace(total_memory=1 << 37, name=name, uuid="8a6d"),
        is_bf16_supported=True,
        _lazy_init=None,
        max_memory_allocated=0,
        reset_peak_memory_stats=None,
        Stream=stream,
        current_stream=stream,
        stream=nullcontext(),
        device=nullcontext(),
    )
    for key, value in answers.items():
        setattr(torch.cuda, key, lambda *_, value=value, **__: value)
    # Optimizers ask: only some may be recorded.
    torch.cuda.is_current_stream_capturing = lambda: gpu.is_recording
    here = SimpleNamespace(is_capturing=lambda: gpu.is_recording)
    torch.accelerator.current_accelerator = lambda *_, **__: CUDA
    torch.accelerator.current_stream = lambda *_: here
    torch.cuda.Event = lambda **_: SimulatedEvent(gpu)
    RECORDINGS["cuda"] = partial(SimulatedRecording, gpu)
    generator = gpu.generator
    new_generator = torch.Generator
    init_group = dist.init_process_group
    torch.cuda.default_generators = [generator]
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = generator.manual_seed
    torch.cuda.get_rng_state = lambda *_: generator.get_state()
    torch.cuda.set_rng_state = lambda state, *_: generator.set_state(state)
    torch.cuda.synchronize = gpu.wait
    torch.Generator = lambda device=None: new_generator()
    torch.utils.swap_tensors = partial(_swap, torch.utils.swap_tensors)
    Tensor.pin_memory = _pin
    dist.init_process_group = lambda backend, **options: init_group("gloo", **options)
    dist.new_group = partial(gpu.new_group, dist.new_group)
    # Upstream gives each group a twin of gloo where the backend is another.
    dist.get_backend = lambda group=None: "gloo" if gpu.device_of(group) == "cpu" else "nccl"
    distributed_c10d._get_object_coll_device = gpu.device_of
    _fsdp_init._move_states_to_device = _move
    _fsdp_param.FSDPParam.reset_sharded_param = lambda _: None  # pads a Tensor's subclass anew
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.autograd.set_multithreading_enabled(False)  # a fork does not copy its threads
    torch._C._set_only_lift_cpu_tensors(
        True
    )  # with True, torch.tensor(..., device) copies by an operation that the mode sees
    let_autograd_run()
    gpu.__enter__()
    loader.ThreadPoolExecutor = partial(
        ThreadPoolExecutor, initializer=gpu.__enter__
    )  # a mode is of one thread
    return gpu


def read_on_gpu(build) -> tuple[list[Tensor], Waits, dict[bool, float]]:
    """Return the batches' images, the waits after the first, and the mean count of kernels."""
    gpu = simulate_gpu()
    images = []
    waits = {}
    stop_signals.install()  # a run does it: workers end with the thread that forks them
    for batch, _ in build(CUDA):
        waits |= gpu.waits if images else {}
        images.append(batch.cpu())
        gpu.waits = {}
    return images, waits, {thread: count / len(images) for thread, count in gpu.kernels.items()}


def let_autograd_run():
    """Let C++ take cuda:0 for a device without a context: autograd asks."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    get_hooks = library["_ZN2at6detail12getCUDAHooksEv"]  # at::detail::getCUDAHooks
    get_hooks.restype = ctypes.POINTER(ctypes.c_void_p)
    hooks = get_hooks()
    size = 80
    table = (ctypes.c_void_p * size).from_buffer_copy(
        (ctypes.c_void_p * size).from_address(hooks[0] - 16)
    )
    answer = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(
        lambda hooks, index: False
    )
    table[2 + 4] = ctypes.cast(
        answer, ctypes.c_void_p
    )  # hasPrimaryContext, in ATen/detail/AcceleratorHooksInterface.h
    hooks[0] = ctypes.addressof(table) + 16
    let_autograd_run.kept = table, answer  # C++ points to them: they must stay
    torch._C._ensureCUDADeviceGuardSet()
