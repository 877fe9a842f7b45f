"""The loaders: evaluation and augmentation as torchvision's, batches on a GPU, and what is refused."""

from functools import partial

import numpy as np
import pytest
import torch
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import functional as F

from cifar10_benchmark.task import UNIFORMS_PER_SAMPLE, Augment, build_eval_loader, build_train_loader, describe_data
from common.config.load import load_config
from common.data.auto_augment import AutoAugment
from common.errors import UserError
from common.testing.photographs import write_colours
from common.testing.ranks import run_ranks
from common.testing.simulated_gpu import read_on_gpu

CPU = torch.device("cpu")
TRAIN, TEST = 61, 11


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("data")
    for split, count in (("train", TRAIN), ("test", TEST)):
        write_colours(folder / split, count, 8, 8)
    return str(folder)


@pytest.fixture
def data(root) -> dict:
    return load_config("vit_lite_vanilla", [f"DATA.root={root}"])["DATA"]


def build_train(data, device=CPU, dp_rank=0, dp_size=1, image_size=8):
    place = dict(image_size=image_size, dp_rank=dp_rank, dp_size=dp_size, device=device)
    return build_train_loader(data, 16, 4, seed=5, **place)


def build_eval(data, device=CPU, dp_rank=0, dp_size=1):
    return build_eval_loader(data, 4, image_size=8, dp_rank=dp_rank, dp_size=dp_size, device=device)


def test_evaluation_is_torchvisions(data, root):
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(data["mean"], data["std"])])
    images, labels = zip(*ImageFolder(f"{root}/test", transform), strict=True)
    ours, our_labels = (torch.cat(parts) for parts in zip(*build_eval(data), strict=True))
    torch.testing.assert_close(ours, torch.stack([*images, torch.zeros(3, 8, 8)]), atol=1e-5, rtol=0)
    assert our_labels.tolist() == [*labels, -100]


@pytest.mark.parametrize(("padding", "flip"), [(4, True), (2, False), (0, True)])
def test_crops_and_flips_are_torchvisions_and_autoaugment_comes_last(padding, flip):
    images = torch.randint(0, 256, (300, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before, uniforms = images.clone(), np.random.default_rng(1).random((len(images), UNIFORMS_PER_SAMPLE))
    augmented = Augment(padding, flip)(images, uniforms)
    for image, row, found in zip(images, uniforms, augmented, strict=True):
        top, left = (int(uniform * (2 * padding + 1)) for uniform in row[:2])
        expected = F.crop(F.pad(image, [padding]), top, left, 8, 8)
        assert torch.equal(found, F.horizontal_flip(expected) if flip and row[2] < 0.5 else expected)
    both = Augment(padding, flip, "cifar10")(images, uniforms)
    assert torch.equal(both, AutoAugment().augment_batch(augmented, uniforms[:, 3:]))
    assert torch.equal(images, before)


@pytest.mark.parametrize("build", [build_train, build_eval])
def test_batches_on_a_gpu_are_those_on_a_cpu_and_do_not_wait(data, build):
    data = data | {"autoaugment": "cifar10"}
    ((images, waits, kernels),) = run_ranks(1, read_on_gpu, partial(build, data))
    assert waits == {}
    assert kernels[False] <= 140
    assert kernels[True] <= 2  # from building the loader, by batch
    assert all(map(torch.equal, images, (images for images, _ in build(data))))


@pytest.mark.parametrize("build", [build_train, build_eval])
def test_two_processes_share_the_images(data, build):
    whole, first, second = (
        [image.sum().item() for images, _ in build(data, CPU, *place) for image in images if image.any()]
        for place in ((0, 1), (0, 2), (1, 2))
    )
    assert sorted(first + second) == sorted(whole)


def test_images_of_another_size_and_keys_without_effect_are_refused(data):
    with pytest.raises(UserError, match="MODEL.image_size=32: the train images of .* are 8 x 8 pixels.*=8"):
        build_train(data, image_size=32)
    with pytest.raises(UserError, match="DATA.crop_scale=.* has no effect"):
        describe_data(data | dict(crop_scale=(0.5, 1.0)))
