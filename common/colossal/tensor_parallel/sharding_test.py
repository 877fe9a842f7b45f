"""A sharded model in use: masks, recomputed activations, evaluation."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.colossal import ParallelMode, canonical_state, describe_tensor_parallel, gpc, shard_model
from common.colossal.tensor_parallel.layers import OwnRandom
from common.colossal.tensor_parallel.layout import LAYOUTS, group_sizes
from common.metrics.hook import count_correct
from common.testing.parity_cases import (
    ACCUMULATION,
    CASES,
    MICRO_BATCH,
    MODEL,
    blended_loss,
    build_engine,
    build_tiny_model,
    micro_batches,
)
from common.testing.ranks import launched, run_ranks

MODES = ["1d-2", "2d-4", "2.5d-8", "3d-8"]
MANY_CLASSES = 2100
PADDED = 5  # of the last evaluation batch's samples


@functools.cache
def on_ranks(case: str) -> list[dict[str, Any]]:
    """Return what each rank of ``case`` finds, in one fork per mode."""
    return run_ranks(CASES[case][0], look_around, case)


def look_around(case: str) -> dict[str, Any]:
    with launched(parallel=CASES[case][1], gradient_accumulation=ACCUMULATION, clip_grad_norm=1.0):
        return {
            "place": place(case),
            "parameters": sum(parameter.numel() for parameter in shard_model(build_tiny_model()).parameters()),
            "masks": masks(),
            "recomputed": recomputed_gradients(),
            "evaluation": evaluation(),
        }


def place(case: str) -> tuple[int, ...]:
    """Return (data-parallel rank, which samples, which channels) this rank holds."""
    layout = LAYOUTS[CASES[case][1]["tensor"]["mode"]]
    groups = (ParallelMode.DATA, layout.samples, layout.channels)
    return tuple(gpc.get_local_rank(group) if group else 0 for group in groups)


def masks() -> dict[str, Tensor]:
    """Return what dropout keeps of the residual stream and of the MLP, and which samples drop_path keeps, twice."""
    model, _, engine = build_engine("sgd", dropout=0.5, drop_path=0.5)
    engine.train()
    block, inputs = model.blocks[1], torch.ones(64, 2, 4)
    layers = {
        "residual": model.dropout,
        "hidden": block.mlp.drop1,
        "output": block.mlp.drop2,
        "drop_path": block.drop_path,
    }
    drawn = {name: layer(inputs).bool() for name, layer in layers.items()}
    return drawn | {"hidden again": block.mlp.drop1(inputs).bool()}


def recomputed_gradients() -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients with dropout of a plain sharded model, and of one that recomputes its blocks."""
    answers = []
    images, labels = next(iter(micro_batches()))
    for checkpointed in (False, True):
        model = shard_model(build_tiny_model(dropout=0.2, drop_path=0.2, activation_checkpoint=checkpointed))
        torch.manual_seed(5)
        blended_loss(model(images), **labels).backward()
        answers.append([parameter.grad for parameter in model.parameters()])
    return tuple(answers)


def evaluation() -> tuple[Tensor, Tensor]:
    """Return logits and `count_correct` of a batch whose last samples are padding."""
    _, _, engine = build_engine("sgd", num_classes=MANY_CLASSES)
    engine.eval()
    images, labels = padded_batch()
    with torch.no_grad():
        logits = engine(images)
    return logits, count_correct(logits, labels)


def padded_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(MICRO_BATCH, 3, 16, 16, generator=generator)
    labels = torch.randint(MANY_CLASSES, (MICRO_BATCH,), generator=generator)
    plain = plain_logits(images)
    labels[:4] = plain[:4].argmax(1)  # some correct in 1, and some more in 5
    labels[4:8] = plain[4:8].topk(4).indices[:, -1]
    images[-PADDED:], labels[-PADDED:] = 0, -100
    return images, labels


@torch.no_grad()
def plain_logits(images: Tensor) -> Tensor:
    return build_tiny_model(num_classes=MANY_CLASSES).eval()(images)


@pytest.mark.parametrize("case", MODES)
def test_ranks_hold_what_was_announced(case: str) -> None:
    parallel = CASES[case][1]
    layout, sizes = LAYOUTS[parallel["tensor"]["mode"]], group_sizes(**parallel["tensor"])
    samples = MICRO_BATCH // sizes[layout.samples]
    channels = MODEL["width"] // sizes[layout.channels]
    lines = describe_tensor_parallel(parallel, build_tiny_model(), MICRO_BATCH)
    for rank, (line, answer) in enumerate(zip(lines, on_ranks(case), strict=True)):
        first_sample, first_channel = answer["place"][1] * samples, answer["place"][2] * channels
        assert line.startswith(
            f"rank {rank}: samples {first_sample}-{first_sample + samples - 1} of {MICRO_BATCH}, "
            f"channels {first_channel}-{first_channel + channels - 1} of {MODEL['width']}"
        )
        assert f" {answer['parameters']:,} of " in line


@pytest.mark.parametrize("case", MODES)
def test_masks_are_drawn_anew_and_agree_where_activations_do(case: str) -> None:
    answers = on_ranks(case)
    for answer in answers:
        assert 0.4 < answer["masks"]["hidden"].float().mean() < 0.6
        assert not torch.equal(answer["masks"]["hidden"], answer["masks"]["hidden again"])
    assert len({answer["place"] for answer in answers}) == (1 if case == "1d-2" else len(answers))
    for one in answers:
        for other in answers:
            same_samples = one["place"][:2] == other["place"][:2]
            expected = {
                "residual": one["place"] == other["place"],
                "output": one["place"] == other["place"],
                "hidden": one is other,
                "drop_path": same_samples,
            }
            agree = {name: torch.equal(one["masks"][name], other["masks"][name]) for name in expected}
            assert agree == expected


def masks_of_two_models() -> dict[str, Tensor]:
    with launched(parallel=CASES["dp2 x 1d-2"][1]):
        return masks()


def test_masks_differ_between_data_parallel_ranks() -> None:
    answers = run_ranks(4, masks_of_two_models)
    for name in ("residual", "hidden"):
        assert not torch.equal(answers[0][name], answers[2][name])


@pytest.mark.parametrize("case", MODES)
def test_recomputed_activations_have_the_same_masks(case: str) -> None:
    for answer in on_ranks(case):
        for plain, recomputed in zip(*answer["recomputed"], strict=True):
            torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", MODES)
def test_evaluation_is_exact_with_padding_and_many_classes(case: str) -> None:
    images, labels = padded_batch()
    expected = plain_logits(images)
    counts = count_correct(expected, labels)
    assert counts.tolist()[1:] == [4, 8, MICRO_BATCH - PADDED]
    for answer in on_ranks(case):
        logits, counted = answer["evaluation"]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(counted[1:], counts[1:])
        torch.testing.assert_close(counted[0], counts[0], rtol=1e-6, atol=0)


def test_without_tensor_parallelism_the_model_is_untouched() -> None:
    with launched():
        model = build_tiny_model(dropout=0.1)
        parameters = dict(model.named_parameters())
        assert shard_model(model) is model
        assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
        assert not any(isinstance(module, OwnRandom) for module in model.modules())


def pieces_and_shapes() -> tuple[bool, dict[str, tuple[int, ...]]]:
    """Return whether gathered pieces of a model with frozen positions and pooling are the whole, and their shapes."""
    with launched(parallel=CASES["2d-4"][1]):
        whole = build_tiny_model(position="sincos2d", pool="avg")
        expected = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
        model = shard_model(whole)
        assert isinstance(model.norm, nn.Identity)
        assert not model.pos_embed.requires_grad
        state = dict(canonical_state(model))
        assert list(state) == (list(expected) if gpc.get_local_rank(ParallelMode.TENSOR) == 0 else [])
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return all(torch.equal(state[name], expected[name]) for name in state), shapes


def test_every_parameter_is_cut() -> None:
    half, hidden, classes = MODEL["width"] // 2, 2 * MODEL["width"], MODEL["num_classes"]
    expected = {
        "pos_embed": (1, 16, half),
        "patch_embed.proj.weight": (half, 3, 4, 4),
        "fc_norm.weight": (half,),
        "blocks.0.attn.qkv.weight": (half, 3 * half),
        "blocks.0.mlp.fc2.weight": (hidden // 2, half),
        "blocks.0.mlp.fc2.bias": (half,),
        "head.weight": (half, classes),
        "head.bias": (classes,),
    }
    for are_equal, shapes in run_ranks(4, pieces_and_shapes):
        assert are_equal
        assert shapes | expected == shapes
