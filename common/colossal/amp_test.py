"""Mixed precision: what the config asks for, and the types of layers, loss and gradients."""

import pytest
import torch
from torch import nn

from common.colossal import AMP_TYPE, amp, initialize
from common.colossal.amp import Cast, build_mixed_precision, compute_dtype, name_dtype
from common.testing.ranks import launched

TORCH, NAIVE, APEX = AMP_TYPE.TORCH, AMP_TYPE.NAIVE, AMP_TYPE.APEX
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
LAYERS = ("first", "norm", "activation", "last")


@pytest.fixture(params=[True, False])
def is_fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the CPU has instructions for bfloat16; it has none for float16."""
    monkeypatch.setattr(amp, "is_fast", lambda name: request.param and name == "bfloat16")
    monkeypatch.setattr(amp, "instruction_set", lambda: "AVX2")
    return request.param


@pytest.mark.parametrize(
    ("fp16", "device", "cast", "dtype", "scale"),
    [
        (None, "cuda", None, FLOAT32, None),
        (dict(mode=None), "cuda", None, FLOAT32, None),
        (dict(mode=TORCH, init_scale=8.0), "cpu", Cast.OPERATIONS, BFLOAT16, None),
        (dict(mode=TORCH, dtype="float16"), "cpu", Cast.OPERATIONS, FLOAT16, 2.0**16),
        (dict(mode=TORCH, dtype=FLOAT16, init_scale=8.0), "cpu", Cast.OPERATIONS, FLOAT16, 8),
        (dict(mode=TORCH), "cuda", Cast.OPERATIONS, BFLOAT16, None),
        (dict(mode=TORCH, dtype="float16", enabled=False), "cuda", Cast.OPERATIONS, FLOAT16, None),
        (dict(mode=NAIVE), "cpu", Cast.LAYERS, BFLOAT16, None),
        (dict(mode=NAIVE, dtype=BFLOAT16), "cpu", Cast.LAYERS, BFLOAT16, None),
        (dict(mode=APEX, opt_level="O0"), "cuda", None, FLOAT32, None),
        (dict(mode=APEX), "cpu", Cast.OPERATIONS, BFLOAT16, None),
        (dict(mode=APEX, opt_level="O2", dtype="float16"), "cpu", Cast.LAYERS, FLOAT16, 2.0**16),
        (dict(mode=APEX, opt_level="O3"), "cuda", Cast.PARAMETERS, BFLOAT16, None),
    ],
)
def test_config(fp16: dict | None, device: str, cast: Cast | None, dtype: torch.dtype, scale: float | None, is_fast):
    """The default of a CPU without instructions is float32; an explicit type is used with a warning."""
    explicit = (fp16 or {}).get("dtype")
    if device == "cpu" and not (is_fast or explicit):
        cast, dtype = None, FLOAT32
    precision = build_mixed_precision(fp16, device)
    assert (precision.cast, precision.dtype, compute_dtype(fp16, device)) == (cast, dtype, dtype)
    assert (precision.scaler and precision.scaler.get_scale()) == scale
    is_slow = device == "cpu" and explicit is not None and not (is_fast and dtype == BFLOAT16)
    start = f"warning: fp16.dtype='{name_dtype(dtype)}': this CPU (AVX2) has no instructions for it"
    assert (precision.warning or "").startswith(start) == is_slow == bool(precision.warning)
    if cast is None and fp16 and device == "cpu":
        assert precision.note.endswith("float32, because this CPU (AVX2) has no bfloat16 instructions")
    elif fp16 and fp16["mode"] == APEX and cast:
        words = f"by PyTorch instead of apex.amp; in {name_dtype(dtype)}: {cast.value}"
        assert precision.note == f"AMP_TYPE.APEX {fp16.get('opt_level', 'O1')}: {words}"


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), FLOAT16), ((8, 0), BFLOAT16)])
def test_the_default_of_a_gpu_is_the_type_that_it_has(capability, dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert compute_dtype(dict(mode=TORCH), "cuda") == dtype


@pytest.mark.parametrize(
    ("fp16", "dtype", "in_half"),
    [
        (dict(mode=TORCH, dtype="bfloat16"), BFLOAT16, LAYERS),
        (dict(mode=NAIVE, dtype="float16"), FLOAT16, LAYERS),
        (dict(mode=APEX, opt_level="O3", dtype="bfloat16"), BFLOAT16, (*LAYERS, "weight", "grad")),
        *((dict(mode=mode), FLOAT32, ()) for mode in AMP_TYPE),
    ],
)
def test_types(fp16: dict, dtype: torch.dtype, in_half: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amp, "is_fast", lambda _: False)
    seen = {}
    with launched(fp16=fp16):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3))
        for name, layer in zip(LAYERS, model, strict=True):
            layer.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: output.dtype}))
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
        logits, _, loss = engine.execute_schedule(iter([(torch.randn(2, 4), torch.tensor([0, 1]))]))
        tensors = {"logits": logits, "loss": loss, "weight": model[0].weight, "grad": model[0].weight.grad}
        seen |= {name: tensor.dtype for name, tensor in tensors.items()}
    assert seen == dict.fromkeys((*LAYERS, *tensors), FLOAT32) | dict.fromkeys(in_half, dtype)
