"""The engine: model, loss and optimizer in the parallel mode and precision of the config."""

import re
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only

from common.engine.amp import MixedPrecision, build_mixed_precision
from common.engine.compiler import compile_model, should_compile
from common.engine.lost_ranks import naming_lost_ranks
from common.engine.noise_scale import NoiseScale, build_noise_scale
from common.engine.repeated_pass import RepeatedPass
from common.engine.step_graph import StepGraphs, build_step_graphs, say_plain
from common.engine.step_optimizer import CHECK_EVERY, MAX_SKIPPED, OncePerStep, StepOptimizer
from common.engine.step_probes import StepProbe
from common.engine.tensor_parallel.sharding import is_sharded, named_shards, persistent_buffers
from common.engine.upstream import (
    ParallelMode,
    UpstreamEngine,
    get_accelerator,
    gpc,
)
from common.engine.upstream_layers import check_parameters
from common.engine.zero import set_communication
from common.errors import UserError
from common.files import Values
from common.process import at_end

# Optimizers whose update of a number depends on the rest of its tensor.
OF_WHOLE_TENSORS = re.compile("lamb|lars|came|adafactor|muon|galore|lbfgs|novograd|adamp|sgdp|mars")
MOST_BATCHES = 10  # more than BATCH_SIZES="noise" is likely to choose


class Engine(UpstreamEngine):
    """Upstream's engine with mixed precision, and gradients all-reduced once per optimizer step.

    `Trainer` calls `train_step`. A script's own loop may call upstream's `zero_grad`, `backward`
    and `step` for every micro-batch instead: the weights are the same, the noise scale is not
    measured. The model's output is float32, each tensor of it if there are several.

    Upstream (legacy/engine/gradient_accumulation/_gradient_accumulation.py:90) encloses only the
    backward pass in DDP's ``no_sync``, which acts on the forward pass: gradients are all-reduced in
    every micro-batch.
    """

    optimizer: StepOptimizer
    schedule: Any  # upstream's: moves a batch to the device, calls model and criterion

    def __init__(
        self,
        *args: Any,
        precision: MixedPrecision | None = None,
        lr_scheduler: OncePerStep | None = None,
        noise_scale: NoiseScale | None = None,
        graphs: StepGraphs | None = None,
        repeated_pass: RepeatedPass | None = None,
        **kwargs: Any,
    ):
        if precision is None:
            raise UserError("Engine(...): initialize(...) builds it, with the config's precision")
        super().__init__(*args, **kwargs)
        self.precision = precision
        self.noise_scale = noise_scale
        self.lr_scheduler = lr_scheduler
        self.repeated_pass = repeated_pass
        # Called in training when a phase begins ("forward", "backward", "rest"), to time it.
        self.on_phase: Callable[[str], object] = lambda phase: None
        self.device = get_accelerator().get_current_device()
        self.graphs = graphs  # where steps are recorded
        # Of the last steps that are not: a GPU's host learns of a skipped one by two checks later.
        self.probes: deque[StepProbe] = deque(maxlen=2 * CHECK_EVERY)
        # Of the steps since it was set to 0, by `MetricsHook`, each the mean of its micro-batches.
        self.total_loss = torch.zeros((), dtype=torch.float64, device=self.device)

    def train_step(self, batches: Iterator[Any], returns_output: bool = True) -> Iterator[Any]:
        """Return a generator that trains for one optimizer step, a micro-batch for each `next`.

        Calling it does nothing yet. It yields (output, label, loss) of each micro-batch, that of
        the last after the update; output and label are None unless ``returns_output``.
        """
        optimizer = self.optimizer
        for number in range(optimizer.accumulation):
            batch = self._load_batch(batches)
            if number == 0 and self.repeated_pass:
                self.repeated_pass.check(self, *batch)
            result = self._run("next" if number else "first", self._add_gradients, *batch)
            # Counted here, as all on the host: the part may have been a replay.
            optimizer.accumulated = number + 1
            if self.graphs is None:
                if number == 0:
                    self.probes.append(StepProbe(optimizer.counter.updates + 1))
                self.probes[-1].add_micro_batch(optimizer, result[0], result[2])
            if number < optimizer.accumulation - 1:
                yield result if returns_output else (None, None, result[2])
        optimizer.load_rates()
        if self.repeated_pass:
            self.repeated_pass.check_update(self)
        self._run("update", self._update)
        if self.graphs is None:
            self.probes[-1].norms = optimizer.norms
        optimizer.count_update()
        yield result if returns_output else (None, None, result[2])

    def _add_gradients(self, inputs: Any, label: Any) -> tuple[Any, Any, Tensor]:
        """Train on a micro-batch, which is the first of a step, or one that adds to it."""
        self.optimizer.zero_grad()  # before the first
        output = self.schedule._call_engine(self, inputs)
        loss = self.schedule._call_engine_criterion(self, output, label)
        # Gradients add up. Data-parallel ranks average them in the last backward pass.
        self.backward(loss)
        return output, label, loss

    def _update(self) -> None:
        optimizer = self.optimizer
        # Tensor-parallel ranks have parts of some gradients, ZeRO's ranks have shards.
        optimizer.sum_gradients()
        # Divide by the loss scale of float16, before clipping: that needs the true norm.
        optimizer.unscale_gradients()
        # The norm is that over all shards, the same on all ranks.
        optimizer.clip_gradients()
        if self.noise_scale:
            # The noise scale needs the norms before clipping, which these are.
            norms = optimizer.grad_norm, optimizer.norms
            sizes = optimizer.accumulation, self.schedule.batch_size
            self.noise_scale.add_step(*norms, optimizer.scaler, *sizes)
        # If the norm is not finite, all ranks skip the update, without the host knowing.
        optimizer.update()

    def _run(self, part: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call ``function``, a part of a step, as it is or recorded."""
        if self.graphs is None:
            return function(*inputs)
        return self.graphs.run(part, partial(function, *inputs))

    def train_without_graphs(self, reason: str) -> None:
        """Let steps run as they are from now on; say so if they would have been recorded."""
        if self.graphs is not None:
            say_plain(reason)
        self.graphs = None

    def _load_batch(self, batches: Iterator[Any]) -> Any:
        """Return (inputs, label) of the next micro-batch, on the device."""
        # Upstream's schedule notes the number of samples, which hooks read.
        batch = self.schedule.load_batch(batches)
        process = self.schedule.data_process_func
        batch = process(batch) if process else batch
        if self.graphs is None:
            return batch
        # What else a recording would keep: options of the optimizer other than the rate.
        groups = [
            {name: value for name, value in group.items() if name not in ("params", "lr")}
            for group in self.optimizer.param_groups
        ]
        return self.graphs.load(batch, (self.optimizer.accumulation, groups))

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` over the number of micro-batches in a step."""
        self.on_phase("backward")
        super().backward(loss)
        # Added on the device: `item` here would wait for it in every micro-batch.
        self.total_loss += loss.detach() / self.optimizer.accumulation
        if self.noise_scale:
            self.noise_scale.add_micro_batch()
        # All that is neither pass, such as the update and waiting for data.
        self.on_phase("rest")

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        model: Any = self.model
        if self.training:
            self.on_phase("forward")
        # Gradients cross ranks in the backward pass of the last micro-batch only.
        is_last = self.optimizer.accumulated + 1 == self.optimizer.accumulation
        if isinstance(self.model, FSDPModule):
            set_communication(self.model, model.training, is_last)
        sync = model.no_sync() if _skips_sync(model, is_last) else nullcontext()
        with sync, self.precision.autocast(self.device):
            output = model(*inputs, **named_inputs)
        # The loss is computed in float32, whatever the precision of the model.
        return tree_map_only(Tensor, _in_float32, output)


def _skips_sync(model: nn.Module, is_last: bool) -> bool:
    """Return whether DDP leaves the gradients of this micro-batch on each rank."""
    if is_last or not isinstance(model, DistributedDataParallel):
        return False
    # DDP records a static graph in its first pass, which must not skip the all-reduce. No public
    # attribute says whether that pass is over.
    return not model.static_graph or model._static_graph_delay_allreduce_enqueued


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


@runtime_checkable
class TrainLoader(Protocol):
    """A training loader that `CheckpointHook` resumes; without it, any iterable with a length is.

    Each ``iter`` is one epoch of micro-batches. The state, two integers, is that after the last
    micro-batch yielded. `Trainer.fit` calls its ``close``, if it has one.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: Mapping[str, int]) -> None: ...


# What scripts read of the loader that `initialize` returns: a `DataLoader`'s, DALI's, and ours.
LOADER_ATTRIBUTES = (
    *("batch_sampler", "batch_size", "collate_fn", "dataset", "drop_last", "generator", "in_order"),
    *("sampler", "num_workers", "multiprocessing_context", "persistent_workers", "prefetch_factor"),
    *("pin_memory", "pin_memory_device", "timeout", "worker_init_fn"),
    *("reset", "state_dict", "load_state_dict", "close"),
)


class WholeSteps:
    """Iterate over ``loader``, a script's own, in whole groups of ``accumulation`` batches.

    It has those of `LOADER_ATTRIBUTES` that ``loader`` has. The epochs of a loader with
    ``ends_with_step``, which may be of several lengths, are whole steps already.

    Upstream's trainer (legacy/trainer/_trainer.py:165) never exhausts an iterator, so a loader that
    is its own iterator, such as DALI's, fails in the second pass; here it is ``reset()`` first.
    Upstream's GradAccumDataloader
    (legacy/engine/gradient_accumulation/_gradient_accumulation.py:154) then reads to the loader's
    end, if there is one.
    """

    def __init__(self, loader: Any, accumulation: int = 1):
        self.loader = loader
        self.accumulation = accumulation
        self._used = False
        for name in LOADER_ATTRIBUTES:
            if hasattr(loader, name):
                setattr(self, name, getattr(loader, name))

    def __len__(self) -> int:
        # Batches that fill no step are left out.
        return len(self.loader) // self.accumulation * self.accumulation

    def __iter__(self) -> Iterator[Any]:
        batches: Iterable[Any] = iter(self.loader)
        # Not before the first pass: the loader may have been set to a position to resume from.
        if batches is self.loader and self._used:
            self.loader.reset()
        self._used = True
        if getattr(self.loader, "ends_with_step", False):
            return iter(batches)
        return islice(batches, len(self))


@naming_lost_ranks()
def initialize(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | Callable[[Iterator[nn.Parameter]], Optimizer],
    criterion: Callable[..., Tensor] | None = None,
    train_dataloader: Any = None,
    test_dataloader: Any = None,
    lr_scheduler: LRScheduler | None = None,
    ophooks: Sequence[Any] | None = None,
    verbose: bool = True,
) -> tuple[Engine, WholeSteps | None, WholeSteps | None, OncePerStep | None]:
    """Set up ``(engine, train_dataloader, test_dataloader, lr_scheduler)`` from ``gpc.config``.

    Call it after a launch. Reads ``fp16``, ``clip_grad_norm``, ``gradient_accumulation``,
    ``torch_ddp``, ``MAX_SKIPPED``, ``REPLAY_EVERY``, ``MAX_REPLAY_FAULTS``, ``COMPILE``,
    ``GRAPHS``, ``TF32``, ``cudnn_benchmark``, ``cudnn_deterministic`` and ``LOG.noise_scale``; the
    engine also reads ``zero`` if `shard_model` sharded the model by it. Gives each data-parallel
    rank its own random numbers.

    Replaces legacy/initialize.py:242, whose ``verbose`` has no effect: nothing is printed.
    As there, ``model`` and ``optimizer`` may be functions that build them, of nothing and of the
    parameters. `Trainer` steps ``lr_scheduler``, or an `LRSchedulerHook` that has it.

    Raises:
        UserError: for a ``parallel`` or ``zero`` that `shard_model` has not applied to ``model``,
            or an optimizer that does not fit them.
    """
    config = gpc.config
    if not isinstance(model, nn.Module):
        model = model()
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer(model.parameters())
    _check_sharded(model, optimizer, config)
    set_backends(config)
    device = get_accelerator().get_current_device()
    # FSDP's shards are there already.
    if not isinstance(model, FSDPModule):
        model.to(device)
    precision = build_mixed_precision(config.get("fp16"), device.type)
    # Before it is compiled: compiling traces what the layers call.
    precision.apply(model)
    step_optimizer = _build_step_optimizer(model, optimizer, precision, config)
    # Before the model is wrapped in DDP: its blocks are compiled one by one.
    compiles = config.get("COMPILE", False)
    every = config.get("REPLAY_EVERY", 0)
    if should_compile(compiles, device.type):
        # Small batches may have smaller micro-batches. Those by the noise halve a few times.
        batches = config.get("BATCH_SIZES", ())
        batches = MOST_BATCHES if batches == "noise" else len(batches)
        sizes = (1 + len(config.get("IMAGE_SIZES", ()))) * (1 + batches)
        # Passes that are compared are compiled anew, with deterministic kernels.
        compile_model(model, compiles, sizes=2 * sizes if every else sizes)
    is_wanted = config.get("LOG", {}).get("noise_scale", False)
    noise_scale = build_noise_scale(model, optimizer, step_optimizer.accumulation, is_wanted)
    lr_schedule = OncePerStep(lr_scheduler, step_optimizer) if lr_scheduler is not None else None
    engine = Engine(
        _wrap_in_ddp(model, config),
        step_optimizer,
        criterion,
        clip_grad_norm=step_optimizer.max_norm,
        ophook_list=ophooks,
        precision=precision,
        lr_scheduler=lr_schedule,
        noise_scale=noise_scale,
        graphs=build_step_graphs(config.get("GRAPHS", False), device, step_optimizer),
        repeated_pass=RepeatedPass(every, config.get("MAX_REPLAY_FAULTS", 0)) if every else None,
    )
    # The weights, equal on all ranks, are drawn by now. Dropout has to differ between ranks.
    gpc.separate_data_parallel_seeds()
    if train_dataloader is not None:
        train_dataloader = WholeSteps(train_dataloader, step_optimizer.accumulation)
    if test_dataloader is not None:
        test_dataloader = WholeSteps(test_dataloader)
    return engine, train_dataloader, test_dataloader, lr_schedule


def _build_step_optimizer(
    model: nn.Module, optimizer: Optimizer, precision: MixedPrecision, config: Values
) -> StepOptimizer:
    """Wrap ``optimizer`` for the accumulation, clipping and loss scale of the config."""
    accumulation = config.get("gradient_accumulation") or 1
    max_skipped = config.get("MAX_SKIPPED", MAX_SKIPPED)
    wrapped = StepOptimizer(optimizer, accumulation, precision.scaler, max_skipped)
    wrapped.max_norm = config.get("clip_grad_norm") or 0.0
    # Views of the batch norms' running statistics: a skipped step must not spoil them.
    buffers = persistent_buffers(model).values()
    wrapped.statistics = [buffer.flatten() for buffer in buffers if buffer.is_floating_point()]
    wrapped.zero_grad()  # notes the statistics: a script's first step may do without
    return wrapped


def _check_sharded(model: nn.Module, optimizer: Optimizer, config: Values) -> None:
    """Raise `UserError` if ``parallel`` or ``zero`` is not in force in model and optimizer."""
    check_parameters(model)
    size = gpc.get_world_size(ParallelMode.TENSOR)
    zero = gpc.get_world_size(ParallelMode.DATA) > 1 and config.get("zero")
    has_shards = is_sharded(named_shards(model).values())
    unsharded = {
        f"parallel.tensor.size={size}": size > 1 and not has_shards,
        f"zero={zero}": zero and not isinstance(model, FSDPModule),
    }
    for key, is_unsharded in unsharded.items():
        if is_unsharded:
            raise UserError(
                f"{key}: the model is not sharded: call shard_model(model) of common.colossal "
                f"before the optimizer is built, or remove {key} from the config"
            )
    # Others' optimizers know nothing of shards: trust ratios and means would be wrong in silence.
    others = [kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith("common.")]
    if has_shards and any(OF_WHOLE_TENSORS.search(kind.__name__.lower()) for kind in others):
        raise UserError(
            f"{type(optimizer).__name__} would take norms of shards: use "
            "build_optimizer(model, 'lamb') of common.optim.build"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(model, FSDPModule) and not all(hasattr(p, "source") for p in parameters):
        raise UserError(
            "zero: give the optimizer named_shards(model).values(), as build_optimizer does"
        )


def set_backends(config: Values) -> None:
    """Set PyTorch's precision of float32 products, and cuDNN's kernels, from the config.

    Until the main function ends.
    """
    cudnn = torch.backends.cudnn
    for name in ("benchmark", "deterministic", "allow_tf32"):
        at_end(setattr, cudnn, name, getattr(cudnn, name))
    at_end(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    cudnn.benchmark = config.get("cudnn_benchmark", False)
    cudnn.deterministic = config.get("cudnn_deterministic", False)
    # For matrix products and convolutions: PyTorch's defaults differ.
    allows_tf32 = config.get("TF32", True)
    torch.set_float32_matmul_precision("high" if allows_tf32 else "highest")
    # Setting cudnn.conv.fp32_precision instead makes torch.export fail.
    cudnn.allow_tf32 = allows_tf32


class FixedBuckets(DistributedDataParallel):
    """DDP whose gradients are in the same buckets in all steps, from the last parameter on.

    torch (nn/parallel/distributed.py:154) sums the first step's gradients in one bucket, later ones
    in buckets ordered by that step's backward pass. A sum over three or more ranks rounds by a
    number's position in its bucket: the step after a resume would differ.
    """

    def __init__(self, model: nn.Module, **options: Any):
        super().__init__(model, **options)
        self.build_buckets()

    def build_buckets(self) -> None:
        """Do what DDP does after the first step, by the order of the parameters."""
        # As DDP does for a rank that has no batch in the first step (`Join`).
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, is_sparse = super()._build_params_for_reducer()
        return parameters[::-1], is_sparse[::-1]


def _wrap_in_ddp(model: nn.Module, config: Values) -> nn.Module:
    """Wrap ``model`` in DDP on several data-parallel ranks.

    Upstream (legacy/initialize.py:380,391) passes ``device_ids`` also on CPUs.
    """
    if gpc.get_world_size(ParallelMode.DATA) == 1 or isinstance(model, FSDPModule):
        return model
    # Without it DDP's buckets hold a second copy of the gradients.
    options = {"gradient_as_bucket_view": True} | (config.get("torch_ddp") or {})
    if get_accelerator().name == "cuda":
        options["device_ids"] = [torch.cuda.current_device()]
    options["process_group"] = gpc.get_group(ParallelMode.DATA)
    # DDP keeps its first buckets itself if a step may leave out parameters.
    rebuilds = options.get("static_graph") or not options.get("find_unused_parameters")
    wrapper = FixedBuckets if rebuilds else DistributedDataParallel
    with warnings.catch_warnings():
        # torch's new name for it means something else at the start.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
        return wrapper(model, **options)
