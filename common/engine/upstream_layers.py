"""Colossal-AI's own tensor-parallel layers (legacy/nn/layer/parallel_*/layers.py), repaired.

They take and return this rank's shard of the activations: `layout` has the groups. A parameter's
attribute ``sharding`` tells gradient norms, LAMB and checkpoints of the full tensor. `shard_model`
uses other layers, those of `tensor_parallel.layers`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from common.engine.tensor_parallel.layers import LayerNormFunction, random_stream
from common.engine.tensor_parallel.layout import (
    COL_2D,
    COL_2P5D,
    DEPTH_2P5D,
    INPUT_3D,
    LAYOUTS,
    OUTPUT_X_WEIGHT_3D,
    ROW_2D,
    ROW_2P5D,
    TENSOR,
    WEIGHT_3D,
    XZ_2P5D,
    Sharding,
)
from common.engine.tensor_parallel.sharding import gather_full, local_shard, sum_over
from common.engine.upstream import (
    ParallelLayer,
    ParallelMode,
    all_gather,
    gather_forward_split_backward,
    get_accelerator,
    gpc,
    layers_1d,
    layers_2d,
    layers_2p5d,
    layers_3d,
    operations_1d,
    operations_2d,
    operations_2p5d,
    operations_3d,
    rebind,
    reduce_grad,
    reduce_input,
    split_batch_of_mode,
    split_forward_gather_backward,
    tensor_parallel_env,
    upstream_loss,
    upstream_metric,
    upstream_random,
)
from common.errors import UserError

MODULES = {"1D": layers_1d, "2D": layers_2d, "2p5D": layers_2p5d, "3D": layers_3d}
# (name without the mode, mode) of each class.
LAYERS = {
    cls: (cls.__name__.replace(mode, ""), mode)
    for mode, module in MODULES.items()
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, ParallelLayer) and cls is not ParallelLayer
}


def _shardings(
    linear: tuple[Sharding, Sharding],
    norm: Sharding,
    features: tuple[ParallelMode, ...],
    vocabulary: Sharding,
    over: ParallelMode | None = None,
) -> dict[str, dict[str, Sharding]]:
    """Return how the parameters of a mode's layers are sharded, by the names of both.

    Args:
        linear: (weight, bias) of a linear layer.
        norm: weight and bias of a layer norm.
        features: the groups that cut the channels of other weights, in order.
        vocabulary: a vocabulary-parallel weight [classes, channels].
        over: the group of ranks with other samples and the same such weights.
    """
    weight, bias = linear
    maps, rows, tokens = (
        Sharding(tuple((dim, group) for group in features), over, over) for dim in range(3)
    )
    # Every rank adds the full bias to a sum over ranks.
    row = {"weight": rows, "bias": Sharding((), TENSOR, over)}
    return {
        "Linear": {"weight": weight, "bias": bias},
        "Linear_Col": {"weight": weight, "bias": bias},
        "Linear_Row": row,
        "LayerNorm": {"weight": norm, "bias": norm},
        "PatchEmbedding": {"weight": maps, "bias": maps, "cls_token": tokens, "pos_embed": tokens},
        "Embedding": {"weight": rows},
        "VocabParallelEmbedding": {"weight": vocabulary},
        "Classifier": row,
        "VocabParallelClassifier": {"weight": vocabulary, "bias": bias},
        "Dropout": {},
    }


_SLICE = Sharding(((0, TENSOR),))
_VECTOR = Sharding(((0, ROW_2D), (0, COL_2D)))
_SQUARES, _VECTORS = LAYOUTS["2.5d"].first
SHARDS = {
    # Layer norms are PyTorch's.
    "1D": _shardings((_SLICE, _SLICE), Sharding(), (TENSOR,), _SLICE),
    "2D": _shardings(
        (LAYOUTS["2d"].first[0], _VECTOR),
        _VECTOR,
        (ROW_2D, COL_2D),
        Sharding(((0, COL_2D), (1, ROW_2D))),
    ),
    "2p5D": _shardings(
        (_SQUARES, _VECTORS),
        _VECTORS,
        (ROW_2P5D, COL_2P5D),
        Sharding(((0, COL_2P5D), (1, ROW_2P5D)), DEPTH_2P5D, DEPTH_2P5D),
        DEPTH_2P5D,
    ),
}
# The groups that split the samples of a classifier's output, the last cut first.
SAMPLES = {"1D": (), "2D": (COL_2D,), "2p5D": (XZ_2P5D,)}


def _name_of(layer: nn.Module) -> tuple[str, str]:
    """Return the name of a layer's class without its mode, and the mode."""
    # A user's class may be derived from one of upstream's.
    return next(LAYERS[cls] for cls in type(layer).__mro__ if cls in LAYERS)


def _shardings_of(layer: Any) -> dict[str, Sharding]:
    """Return how the parameters of a layer are sharded, but for their shapes, by their names."""
    name, mode = _name_of(layer)
    if mode != "3D":
        return SHARDS[mode][name]
    # A linear layer swaps inputs and outputs for the layers built after it.
    inputs, outputs = layer.input_parallel_mode, layer.output_parallel_mode
    layout = LAYOUTS["3d"]
    is_first = inputs is INPUT_3D
    over = layout.samples if is_first else OUTPUT_X_WEIGHT_3D
    return _shardings(
        layout.first if is_first else layout.second,
        Sharding(((0, outputs),), over, over),
        (outputs,),
        Sharding(((0, inputs), (0, WEIGHT_3D), (1, outputs))),
        over,
    )[name]


def describe(layer: nn.Module) -> None:
    """Give the parameters of a layer the attribute ``sharding``, and hooks that sum gradients.

    In each backward pass a hook sums a gradient over the ranks with other samples. Upstream does so
    within one square of a 2.5d model (parallel_2p5d/_operation.py:761), and fails on most ranks of
    a 3d classifier (parallel_3d/_operation.py:135).

    Raises:
        UserError: for a weight that another layer splits differently.
    """
    for name, sharding in _shardings_of(layer).items():
        parameter = layer._parameters.get(name)
        if parameter is None:  # without a bias
            continue
        shape = list(parameter.shape[::-1] if sharding.transposed else parameter.shape)
        for dim, group in sharding.cuts:
            shape[dim] *= gpc.get_world_size(group)
        # The hook sums: an optimizer step must not do so again.
        described = replace(sharding, shape=tuple(shape), summed_over=None)
        if getattr(parameter, "sharding", described) != described:
            raise UserError(
                f"{type(layer).__name__} splits the weight that it is given in another way than "
                "the layer that has it: leave out weight="
            )
        if not hasattr(parameter, "sharding") and sharding.summed_over and parameter.requires_grad:
            group = sharding.summed_over
            parameter.register_hook(lambda grad, group=group: sum_over(group, [grad])[0])
        parameter.sharding = described


def check_parameters(model: nn.Module) -> None:
    """Give parameters beside upstream's layers their ``sharding``, if ``model`` has such layers.

    Raises:
        UserError: for a trained one in another mode than 1d.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, tuple(LAYERS))]
    for layer in layers:
        # A copy of a model has neither attributes nor hooks.
        describe(layer)
    unknown = [name for name, p in model.named_parameters() if not hasattr(p, "sharding")]
    for name in unknown if layers else ():
        parameter = model.get_parameter(name)
        if parameter.requires_grad and tensor_parallel_env.mode != "1d":
            raise UserError(
                f"{name} belongs to no layer of colossalai.legacy.nn: in mode "
                f"{tensor_parallel_env.mode!r} its gradient would be that of one rank's samples; "
                "build the model of these layers only"
            )
        # In 1d all ranks have the same samples and gradient.
        parameter.sharding = Sharding(replicated_over=TENSOR, shape=tuple(parameter.shape))


def repair_construction() -> None:
    """Describe layers when they are built, with equal replicas; refuse options that are wrong.

    Upstream draws each square of a 2.5d model (parallel_2p5d/layers.py:100), and each copy of a 3d
    classifier (parallel_3d/layers.py:415), with another seed. A vocabulary-parallel embedding takes
    ``padding_idx`` for a row of its shard (parallel_1d/layers.py:981), and ``max_norm`` and the
    like act on shards.
    """
    for cls in LAYERS:
        cls.__init__ = _described(cls.__init__)
    ParallelLayer.register_parameter = _register_parameter


def _described(build: Callable[..., None]) -> Callable[..., None]:
    @wraps(build)
    def build_layer(layer: Any, *args: Any, **options: Any) -> None:
        # Upstream broadcasts parameters, which is no operation to differentiate.
        with torch.no_grad():
            build(layer, *args, **options)
        name, _ = _name_of(layer)
        wrong = [*getattr(layer, "embed_args", ()), *getattr(layer, "embed_kwargs", ())]
        if name == "VocabParallelEmbedding" and layer.padding_idx is not None:
            wrong.append("padding_idx")
        if wrong:
            raise UserError(f"{type(layer).__name__} does not support {wrong[0]}: leave it out")
        describe(layer)
        for parameter in layer.parameters():
            group = parameter.sharding.replicated_over
            if group:
                # The tensor itself: a broadcast of the parameter would drop the hooks.
                source = gpc.get_ranks_in_group(group)[0]
                dist.broadcast(parameter.data, source, group=gpc.get_group(group))
        if name.endswith("Classifier"):
            layer.register_forward_hook(_note_logits)

    return build_layer


def _register_parameter(layer: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Register ``parameter``, and describe it if it replaces another one."""
    replaces = name in layer._parameters
    nn.Module.register_parameter(layer, name, parameter)
    if replaces:
        describe(layer)


def repair_state_dict() -> None:
    """Let ``state_dict`` have full tensors, on the first rank, and ``load_state_dict`` take them.

    Upstream's 2.5d and 3d layers save wrong shapes or fail to load (parallel_2p5d/layers.py:322,
    parallel_3d/layers.py:106). Every rank has to call both, and to load the full tensors.
    """

    def save(layer: nn.Module, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, parameter in layer._parameters.items():
            full = None if parameter is None else gather_full(parameter)
            if full is not None:
                destination[prefix + name] = full

    def load(layer: nn.Module, state: dict[str, Tensor], prefix: str, *others: Any) -> None:
        shards = {
            prefix + name: local_shard(parameter, state[prefix + name])
            for name, parameter in layer._parameters.items()
            if prefix + name in state
        }
        nn.Module._load_from_state_dict(layer, state | shards, prefix, *others)

    ParallelLayer._save_to_state_dict = save
    ParallelLayer._load_from_state_dict = load


def repair_seeds() -> None:
    """Draw what ``seed(mode)`` encloses from a stream of this rank's position in ``mode``.

    Upstream (legacy/context/random/seed_manager.py:56) asks GPUs for their generators, and has
    states of its own, which neither checkpoints nor recomputed activations restore.
    """

    @contextmanager
    def seed(parallel_mode: ParallelMode) -> Iterator[None]:
        device = get_accelerator().get_current_device()
        with random_stream(device, gpc.get_local_rank(parallel_mode)):
            yield

    rebind(upstream_random.seed, seed)


def repair_casts() -> None:
    """Let 2d and 2.5d products compute in autocast's dtype.

    ``custom_fwd`` (parallel_2d/_operation.py:76 and on) casts to float16 on GPUs, whatever the
    dtype; on CPUs it does not cast, and products of two dtypes fail.
    """
    for module in (operations_2d, operations_2p5d):
        for function in vars(module).values():
            forward = getattr(getattr(function, "forward", None), "__wrapped__", None)
            if forward:
                function.forward = staticmethod(partial(_cast_and_compute, forward))
                function.backward = staticmethod(function.backward.__wrapped__)


def _cast_and_compute(forward: Callable[..., Tensor], ctx: Any, *args: Any) -> Tensor:
    device = get_accelerator().get_current_device().type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        # All tensors are activations, weights or biases.
        args = tree_map_only(Tensor, lambda tensor: tensor.to(dtype), args)
    with torch.autocast(device, enabled=False):
        return forward(ctx, *args)


def repair_norms() -> None:
    """Compute layer norms without a CUDA kernel, and variances without cancellation.

    Upstream's need a compiled kernel or apex in 1d (parallel_1d/layers.py:160), and subtract
    E[x]^2 from E[x^2] in the other modes (parallel_2d/layers.py:347, parallel_2p5d/layers.py:360,
    parallel_3d/_operation.py:286).
    """

    def build_1d(
        layer: Any, normalized_shape: int, eps: float = 1e-5, bias: bool = True, dtype: Any = None
    ) -> None:
        device = get_accelerator().get_current_device()
        norm = nn.LayerNorm(normalized_shape, eps, bias=bias, device=device, dtype=dtype)
        layers_1d.ColossalaiModule.__init__(layer, norm)

    layers_1d.LayerNorm1D.__init__ = build_1d
    # Its ranks have parts of a column's weights. The backward pass of the gather sums over samples.
    gather = operations_2d._AllGatherTensor2D.apply
    layers_2d.LayerNorm2D.forward = lambda layer, x: _normalize(
        layer, x, ROW_2D, lambda part: gather(part, -1, COL_2D)
    )
    layers_2p5d.LayerNorm2p5D.forward = lambda layer, x: _normalize(layer, x, ROW_2P5D)
    layers_3d.LayerNorm3D.forward = lambda layer, x: _normalize(
        layer, x, layer.output_parallel_mode
    )


def _normalize(
    layer: Any, x: Tensor, group: ParallelMode, gather: Callable[[Tensor], Tensor] = Tensor.float
) -> Tensor:
    weight = gather(layer.weight).float()
    bias = torch.zeros_like(weight) if layer.bias is None else gather(layer.bias).float()
    return LayerNormFunction.apply(x.float(), weight, bias, layer.variance_epsilon, group)


def repair_1d() -> None:
    """Let a column-parallel layer take inputs of any shape, and a gather leave its input alone.

    Upstream's backward pass (parallel_1d/_operation.py:76) knows three dimensions only. It gathers
    into the input (parallel_1d/_utils.py:71), which autograd refuses for a view of logits.
    """
    operations_1d._gather = lambda x, mode, dim=-1: all_gather(x, dim, mode).contiguous()
    layers_1d.linear_with_async_comm = lambda x, weight, bias, mode, _: F.linear(
        reduce_grad(x, mode), weight, bias
    )


def repair_2p5d() -> None:
    """Split samples over all squares, and let all ranks of a column have the bias.

    In upstream all squares compute on the same samples (parallel_2p5d/_operation.py:1007), and one
    rank of a column has the bias, others train a copy that nobody reads (:661).
    """

    def reduce_by_batch(x: Tensor, reduce_mean: bool = False) -> Tensor:
        total = reduce_input(x.clone(), XZ_2P5D)
        return total / gpc.get_world_size(XZ_2P5D) if reduce_mean else total

    split = split_forward_gather_backward
    embed = layers_2p5d.VocabParallelEmbedding2p5D.forward
    # `embed` splits the samples over the column of a square.
    layers_2p5d.VocabParallelEmbedding2p5D.forward = lambda layer, tokens: embed(
        layer, split(tokens, DEPTH_2P5D, 0)
    )
    rebind(operations_2p5d.split_batch_2p5d, lambda x, dim=0: split(x, XZ_2P5D, dim))
    rebind(operations_2p5d.reduce_by_batch_2p5d, reduce_by_batch)
    split_batch_of_mode["2.5d"] = operations_2p5d.split_batch_2p5d
    layers_2p5d.add_bias_2p5d = lambda x, bias, *_: bias if x is None else x + bias.to(x.dtype)


def repair_3d() -> None:
    """Leave the backward passes of 3d layers to PyTorch, and sums over samples to `describe`.

    Upstream returns zeros for a gradient, to which a hook adds the sum (parallel_3d/_utils.py:66):
    a weight that replaces another has no hook and stays. It splits a batch over the groups of the
    last layer built (parallel_3d/_operation.py:452).
    """
    gather = operations_3d.all_gather_tensor_3d
    scatter = operations_3d.reduce_scatter_tensor_3d
    split = operations_3d.split_tensor_3d
    # Their last arguments are the groups: of inputs, of weights and of outputs.
    layers_3d.linear_3d = lambda x, weight, i, w, o: scatter(
        gather(x, 0, i) @ gather(weight, 0, w), 0, o
    )
    layers_3d.classifier_3d = lambda x, weight, bias, i, w, o: _add(
        reduce_input(F.linear(x, weight), o), bias
    )
    layers_3d.vocab_parallel_classifier_3d = lambda x, weight, bias, i, w, o: _add(
        scatter(F.linear(gather(x, 0, i), gather(weight, 0, w)), 0, o), bias
    )
    layers_3d.register_async_grad_hook = lambda parameter: None
    for cls in (layers_3d.Linear3D, layers_3d.PatchEmbedding3D, layers_3d.Embedding3D):
        cls._sync_grad_hook = lambda layer, grad: grad

    def split_batch(
        x: Tensor,
        dim: int = 0,
        input_parallel_mode: ParallelMode = INPUT_3D,
        weight_parallel_mode: ParallelMode = WEIGHT_3D,
    ) -> Tensor:
        return split(split(x, dim, weight_parallel_mode), dim, input_parallel_mode)

    rebind(operations_3d.split_batch_3d, split_batch)
    split_batch_of_mode["3d"] = split_batch


def _add(logits: Tensor, bias: Tensor | None) -> Tensor:
    return logits if bias is None else logits + bias.to(logits.dtype)


def _note_logits(layer: Any, _: Any, logits: Tensor) -> None:
    """Note which groups split the output of the classifier that computes last."""
    name, mode = _name_of(layer)
    is_split = name == "VocabParallelClassifier"
    if mode == "3D":
        inner = layer.output_parallel_mode if is_split else layer.input_parallel_mode
        samples = (inner, WEIGHT_3D)
    else:
        samples = SAMPLES[mode]
    groups = [(group, 0) for group in samples]
    if is_split and not getattr(layer, "gather_output", False):
        # As the bias of these classes.
        groups.append((_shardings_of(layer)["bias"].cuts[0][1], -1))
    gpc.logits = logits.shape[-1], groups


def full_logits(logits: Tensor) -> Tensor:
    """Gather samples and classes of logits that a classifier of upstream's has computed."""
    width, groups = gpc.logits or (0, [])
    # The logits of other models are full.
    for group, dim in groups if logits.shape[-1] == width else []:
        logits = gather_forward_split_backward(logits, group, dim)
    return logits


def repair_loss_and_accuracy() -> None:
    """Make ``CrossEntropyLoss`` and ``Accuracy`` torch's, of all logits, in every mode.

    Upstream's (legacy/nn/loss/__init__.py:31, legacy/nn/metric/__init__.py:24) ask the launch and
    the last layer built how logits are split: wrong for those of `shard_model`, and an accuracy of
    split classes is that of shards.
    """
    build = upstream_loss.CrossEntropyLoss.__init__

    def build_loss(criterion: Any, reduction: Any = True, *args: Any, **options: Any) -> None:
        build(criterion, reduction, *args, **options)
        # torch's "sum": upstream takes any text for True, the mean.
        if isinstance(reduction, str):
            criterion.loss.reduction = reduction

    upstream_loss.CrossEntropyLoss.__init__ = build_loss
    # Upstream would choose a loss by the mode, an accuracy by this table.
    upstream_loss.get_tensor_parallel_mode = lambda: None
    upstream_metric._parallel_accuracy.clear()
    upstream_loss.CrossEntropyLoss.forward = lambda criterion, logits, *labels: criterion.loss(
        full_logits(logits), *labels
    )
    upstream_metric.Accuracy.forward = lambda metric, logits, labels: metric.acc(
        full_logits(logits), labels
    )


# On import, as the repairs in `upstream`.
repair_norms()
repair_1d()
repair_2p5d()
repair_3d()
repair_casts()
repair_seeds()
repair_state_dict()
repair_construction()
repair_loss_and_accuracy()
