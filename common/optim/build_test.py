from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay
from timm.optim.lamb import Lamb as TimmLamb
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LinearLR, LRScheduler, SequentialLR

from common.engine.upstream import CosineAnnealingWarmupLR, LinearWarmupLR
from common.errors import UserError
from common.model.build import build_model, timm_arguments
from common.optim.build import OPTIMIZERS, build_optimizer
from common.optim.lamb import Lamb
from common.optim.schedules import build_factor, build_lr_scheduler

PEAK = 1.8e-2
TINY = dict(
    image_size=8,
    patch_size=4,
    width=48,
    depth=11,
    heads=2,
    num_classes=3,
    reg_tokens=2,
    init_values=0.1,
)


LAYERED = {"decay_all": False, "layer_decay": 0.9}


@pytest.mark.parametrize(
    ("name", "options", "reference", "parts"),
    [
        (
            "adamw",
            {"betas": (0.8, 0.9)} | LAYERED,
            partial(AdamW, betas=(0.8, 0.9)),
            {},
        ),
        (
            "sgd",
            {},
            partial(SGD, momentum=0.9),
            {},
        ),
        (
            "sgd",
            {"momentum": 0} | LAYERED,
            SGD,
            {},
        ),
        (
            "lamb",
            LAYERED,
            Lamb,
            {"norm": "rmsnorm", "mlp": "swiglu"},
        ),
    ],
)
def test_trains_as_the_optimizer_it_names(name, options, reference, parts):
    """With layer decay, in timm's groups of parameters."""
    model = build_model(**TINY, **parts)
    arguments = timm_arguments(**TINY, **parts)
    copy = VisionTransformer(**arguments)
    copy.load_state_dict(model.state_dict())
    if "layer_decay" in options:
        undecayed = copy.no_weight_decay()
        groups = param_groups_layer_decay(copy, 0.1, undecayed, layer_decay=0.9)
    else:
        of_all = {
            "params": copy.parameters(),
            "weight_decay": 0.1,
            "lr_scale": 1,
        }
        groups = [of_all]
    for group in groups:
        group["lr"] = 1e-2 * group["lr_scale"]
    theirs = reference(groups)
    mine = build_optimizer(model, name, 1e-2, weight_decay=0.1, **options)
    for _ in range(3):
        for key, param in model.named_parameters():
            gradient = torch.randn_like(param)
            param.grad = gradient
            copy.get_parameter(key).grad = gradient.clone()
        mine.step()
        theirs.step()
    for key, param in model.named_parameters():
        expected = copy.get_parameter(key)
        torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-6)


def build_sgd() -> SGD:
    parameter = nn.Parameter(torch.zeros(1))
    return SGD([parameter], lr=PEAK)


def our_learning_rates(name: str, total_steps: int, **options: Any) -> list[float]:
    def build(sgd: SGD) -> LRScheduler:
        return build_lr_scheduler(sgd, name, total_steps, **options)

    return learning_rates(build, total_steps)


def learning_rates(build: Callable[[SGD], LRScheduler], steps: int) -> list[float]:
    """Return the learning rate that each optimizer step is taken with."""
    optimizer = build_sgd()
    rates = []
    scheduler = build(optimizer)
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("total", "warmup"),
    [
        (20, 0),
        (20, 5),
        (300, 150),
        (7, 6),
    ],
)
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("linear", LinearWarmupLR),
        ("cosine", CosineAnnealingWarmupLR),
    ],
)
def test_equals_colossalais_repaired_schedules(name, reference, total, warmup):
    build_theirs = partial(reference, total_steps=total, warmup_steps=warmup)
    mine = our_learning_rates(name, total, warmup_steps=warmup)
    theirs = learning_rates(build_theirs, total)
    assert mine == pytest.approx(theirs, rel=1e-9)
    assert mine[warmup] == PEAK


def sequence(sgd: SGD, total: int, warmup: int, decay: int, name: str) -> LRScheduler:
    """Return torch's warm-up, constant rate and decay, one after the other."""

    def falling(step: int) -> float:
        return 1 - (step / decay) ** 0.5

    first_share = 1 / (warmup + 1)
    rising = LinearLR(sgd, first_share, 1.0, total_iters=warmup)
    stable = ConstantLR(sgd, 1.0)
    last = LinearLR(sgd, 1.0, 0.0, total_iters=decay)
    if name == "wsd_sqrt":
        last = LambdaLR(sgd, falling)
    sgd.param_groups[0]["lr"] = PEAK * first_share  # each of them has set its own first rate
    milestones = [warmup, total - decay]
    return SequentialLR(sgd, [rising, stable, last], milestones)


@pytest.mark.parametrize(
    ("total", "warmup", "decay"),
    [
        (20, 5, 4),
        (300, 150, 150),
        (9, 1, 1),
    ],
)
@pytest.mark.parametrize("name", ["wsd", "wsd_sqrt"])
def test_a_stable_phase_equals_torchs_sequence(name, total, warmup, decay):
    build_theirs = partial(sequence, total=total, warmup=warmup, decay=decay, name=name)
    mine = our_learning_rates(name, total, warmup_steps=warmup, decay_steps=decay)
    theirs = learning_rates(build_theirs, total)
    assert mine == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "decay"),
    [
        ("wsd", [1.0, 0.8, 0.6, 0.4]),
        ("wsd_sqrt", [1.0, 0.6, 1 - 0.8 / 2**0.5, 1 - 0.8 * 0.75**0.5]),
    ],
)
def test_a_stable_phase_decays_to_the_floor_by_the_formula(name, decay):
    rates = our_learning_rates(
        name,
        11,
        warmup_steps=2,
        decay_steps=4,
        cooldown_steps=2,
        min_lr=0.2 * PEAK,
    )
    warmup = [1 / 3, 2 / 3]
    stable = [1, 1, 1]
    cooldown = [0.2, 0.2]
    shares = [*warmup, *stable, *decay, *cooldown]
    expected = [PEAK * share for share in shares]
    assert rates == pytest.approx(expected, rel=1e-9)


def test_a_script_that_does_not_pass_the_decay_is_refused():
    sgd = build_sgd()
    with pytest.raises(UserError, match="^LR_SCHEDULE='wsd': pass plan.decay_steps to build_lr"):
        build_lr_scheduler(sgd, "wsd", 20, 5)


def test_timms_cosine_begins_before_the_warm_up_ends():
    mine = our_learning_rates("timm", 20, warmup_steps=5)
    schedule = CosineLRScheduler(build_sgd(), 20, warmup_t=5, t_in_epochs=False)
    theirs = []
    for step in range(20):
        (rate,) = schedule._get_lr(step)
        theirs.append(rate)
    assert mine == pytest.approx(theirs, rel=1e-9)


def test_the_floor_and_the_start_of_the_warm_up_are_rates_of_the_highest_group():
    """Other groups, as of layer decay, have the same share of their own rate."""
    low = {"params": [nn.Parameter(torch.zeros(1))], "lr": 0.1}
    high = {"params": [nn.Parameter(torch.zeros(1))]}
    sgd = SGD([low, high], lr=1.0)
    options = dict(cooldown_steps=2, min_lr=0.2, warmup_lr=0.1)
    schedule = build_lr_scheduler(sgd, "linear", 10, 4, **options)
    low_rates = []
    high_rates = []
    for _ in range(10):
        low_rates.append(sgd.param_groups[0]["lr"])
        high_rates.append(sgd.param_groups[1]["lr"])
        sgd.step()
        schedule.step()
    # from 0.1 up to 1 in four steps, in four down to 0.2, and two more there
    expected = [0.1, 0.325, 0.55, 0.775, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    expected_low = [0.01, 0.0325, 0.055, 0.0775, 0.1, 0.08, 0.06, 0.04, 0.02, 0.02]
    assert high_rates == pytest.approx(expected)
    assert low_rates == pytest.approx(expected_low)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("linear", 1 / 5),
        ("cosine", 1 / 4),
        ("timm", 0),
    ],
)
def test_the_floor_does_not_bound_the_warm_up(name, first):
    rates = our_learning_rates(name, 8, warmup_steps=4, min_lr=PEAK / 2)
    assert rates[0] == pytest.approx(first * PEAK)


DEFAULTS = [
    ("adamw", AdamW, ("betas", "eps")),
    ("muon", AdamW, ("betas", "eps")),  # of what is no matrix
    ("muon", torch.optim.Muon, ("momentum",)),
    ("lamb", TimmLamb, ("betas",)),
    ("sgd", SGD, ("dampening", "nesterov")),
]


def test_a_step_of_a_larger_batch_at_the_end_of_a_warm_up_has_the_peak():
    """It begins between two steps of the smallest batch, which the schedule counts."""
    factor = build_factor(PEAK, "cosine", 100, 10)
    assert factor(8.5) == 0.95
    assert factor(9.75) == 1
    assert factor(10) == 1


def test_every_optimizer_has_a_reference():
    names = {name for name, *_ in DEFAULTS}
    assert names == OPTIMIZERS.keys()


@pytest.mark.parametrize(("name", "reference", "options"), DEFAULTS)
def test_defaults_are_those_of_torch_and_timm(name, reference, options):
    parameter = nn.Parameter(torch.zeros(2, 2))
    theirs = reference([parameter], lr=1.0)
    mine = OPTIMIZERS[name]
    for key in options:
        assert mine.defaults[key] == theirs.defaults[key], key


IN_BFLOAT16 = [(name, torch.bfloat16) for name in OPTIMIZERS]


@pytest.mark.parametrize(("name", "dtype"), [("lamb", torch.float16), *IN_BFLOAT16])
def test_half_precision_on_a_cpu_is_near_float32(name, dtype):
    """As after APEX's O3. LAMB's squared norms of the directions are beyond float16.

    PyTorch's AdamW divides by 0 in float16, where its eps of 1e-8 is 0.
    """
    torch.manual_seed(0)
    copy = build_model(**TINY)
    before = parameters_to_vector(copy.parameters())
    model = deepcopy(copy)
    mine = build_optimizer(model, name, 0.05, weight_decay=0.1)
    theirs = build_optimizer(copy, name, 0.05, weight_decay=0.1)
    model.to(dtype)
    for number in range(4):
        for p, other in zip(model.parameters(), copy.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            other.grad = p.grad.float()
        is_skipped = number == 0
        mine.found_inf = torch.tensor(float(is_skipped))
        mine.step()
        if not is_skipped:
            theirs.step()
    wanted = parameters_to_vector(copy.parameters()) - before
    found = parameters_to_vector(model.parameters()) - before
    error = (found - wanted).norm()
    assert error < 0.02 * wanted.norm()


def test_what_is_trained_later_starts_without_momentum():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mine = build_optimizer(model, "sgd", 1.0)
    for trained in (model[1], model):
        for p in trained.parameters():
            p.grad = torch.ones_like(p)
        mine.step()
    momenta = []
    for state in mine.state.values():
        mean = state["momentum_buffer"].mean()
        momenta.append(mean.item())
    assert momenta == pytest.approx([1.9, 1.9, 1, 1])


@pytest.mark.parametrize("filters", [False, True])
def test_muon_leaves_scalars_and_unless_asked_filters_to_adamw(filters):
    model = nn.Module()
    model.gain = nn.Parameter(torch.ones(()))  # as timm's NFNets have
    model.convolution = nn.Conv2d(4, 8, 3, bias=False)
    optimizer = build_optimizer(model, "muon", filters=filters)
    weight = model.convolution.weight
    assert optimizer.matrices == ({weight: (1, 8, 36)} if filters else {})
