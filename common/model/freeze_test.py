"""The head alone on a frozen body, against torch's linear layer on timm's features."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from common.config.model_arguments import timm_arguments
from common.model.flops import flops_per_image
from common.model.freeze import freeze
from common.model.vit import build_model
from common.optim.build import build_optimizer

TINY = {"image_size": 8, "patch_size": 4, "width": 16, "depth": 2, "heads": 2, "num_classes": 3}


@pytest.mark.parametrize("pool", ["cls", "avg"])
def test_trains_a_linear_layer_on_fixed_features(pool: str) -> None:
    torch.manual_seed(0)
    arguments = TINY | {"pool": pool, "dropout": 0.5, "drop_path": 0.5}
    model = build_model(**arguments)
    theirs = VisionTransformer(**timm_arguments(**arguments)).eval()
    theirs.load_state_dict(model.state_dict())
    images, labels = torch.randn(12, 3, 8, 8), torch.arange(12) % 3
    with torch.no_grad():
        features = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
    head = nn.Linear(16, 3)
    head.load_state_dict(model.head.state_dict())
    reference = torch.optim.AdamW(head.parameters(), lr=0.1, weight_decay=0.1)
    freeze(model.train(), "body")
    optimizer = build_optimizer(model, "adamw", 0.1, weight_decay=0.1)
    for _ in range(3):
        for step, logits in ((optimizer, model(images)), (reference, head(features))):
            step.zero_grad()
            F.cross_entropy(logits, labels).backward()
            step.step()
    torch.testing.assert_close(model.head.weight, head.weight, rtol=1e-5, atol=1e-6)
    body = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")}
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in body.items())


def test_flops_are_pytorchs_count() -> None:
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = build_model(**TINY)
        freeze(model, "body")
        model(torch.empty(2, 3, 8, 8)).sum().backward()
    assert flops_per_image(TINY, "body") == counter.get_total_flops() / 2
