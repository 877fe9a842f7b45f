"""The loaders: evaluation and augmentation as torchvision's, on a GPU too; what is refused."""

from functools import partial

import numpy as np
import pytest
import torch
from PIL.Image import Resampling
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms.v2 import functional as F

from cifar10_benchmark.dataset import open_images
from cifar10_benchmark.task import (
    build_eval_crop,
    build_eval_loader,
    build_train_loader,
    describe_data,
)
from common.config.load import load_config
from common.data.auto_augment import AutoAugment
from common.data.crops import CenterCrop
from common.errors import UserError
from common.resolutions import Resolution
from common.testing.photographs import write_colours
from common.testing.ranks import run_ranks
from common.testing.simulated_gpu import read_on_gpu

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("data")
    write_colours(folder / "train", 61, width=8, height=8)
    write_colours(folder / "test", 11, width=8, height=8)
    return str(folder)


@pytest.fixture
def data(root) -> dict:
    return load_config("vit_lite_vanilla", [f"DATA.root={root}"])["DATA"]


def build_train(data, device=CPU, image_size=8, **ranks):
    return build_train_loader(data, 16, 4, seed=5, image_size=image_size, device=device, **ranks)


def build_eval(data, device=CPU, **ranks):
    return build_eval_loader(data, 4, image_size=8, device=device, **ranks)


def test_evaluation_is_torchvisions(data, root):
    transform = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize(data["mean"], data["std"])]
    )
    images, labels = zip(*ImageFolder(f"{root}/test", transform), strict=True)
    # 11 images: two ranks with two batches of 4 each pad them to 16
    expected = torch.stack([*images, *torch.zeros(5, 3, 8, 8)])
    expected_labels = [*labels, -100, -100, -100, -100, -100]
    batches = []
    for rank in (0, 1):
        batches += build_eval(data, dp_rank=rank, dp_size=2)
    ours, our_labels = zip(*batches, strict=True)
    torch.testing.assert_close(torch.cat(ours), expected, atol=1e-5, rtol=0)
    assert torch.cat(our_labels).tolist() == expected_labels


def test_evaluation_shows_the_whole_image(data):
    assert build_eval_crop(data, 8) == CenterCrop(8, 8)


def crop_and_flip(image: torch.Tensor, padding: int, flip: bool, draw: np.ndarray) -> torch.Tensor:
    """Crop by torchvision where the first two random numbers say; flip if the third is below 0.5.

    With ``padding`` on both sides, there are ``2 * padding + 1`` places along each axis.
    """
    places = 2 * padding + 1
    top = int(draw[0] * places)
    left = int(draw[1] * places)
    padded = F.pad(image, [padding])
    cropped = F.crop(padded, top, left, 8, 8)
    if flip and draw[2] < 0.5:
        return F.horizontal_flip(cropped)
    return cropped


def resize(image: torch.Tensor, size: int) -> torch.Tensor:
    """Resize by Pillow."""
    resized = F.to_pil_image(image).resize((size, size), Resampling.BILINEAR)
    return F.pil_to_tensor(resized)


@pytest.mark.parametrize(
    ("padding", "flip", "policy", "size"),
    [
        (2, False, "cifar10", 8),
        (0, True, None, 8),
        (1, True, "cifar10", 5),
    ],
)
def test_crops_and_flips_are_torchvisions_then_autoaugment_then_the_size_as_pillows(
    data, padding, flip, policy, size
):
    data |= {
        "crop_padding": padding,
        "flip": flip,
        "autoaugment": policy,
        "repeats": 2,
        # the loader then yields the pixels
        "mean": (0.0, 0.0, 0.0),
        "std": (1 / 255, 1 / 255, 1 / 255),
    }
    images = torch.from_numpy(open_images(data).train.images)
    resolutions = Resolution(1, size, 4, 2), Resolution(2, 8, 4, 2)
    loader = build_train(data, dp_rank=1, dp_size=2, resolutions=resolutions)
    # a resized pixel may be rounded the other way
    tolerance = 1.001 if size < 8 else 1e-4
    for draw, (found, _) in zip(loader.sampler.draws(0), loader, strict=True):
        augmented = images[draw.indices]
        for number, uniforms in enumerate(draw.uniforms):
            augmented[number] = crop_and_flip(augmented[number], padding, flip, uniforms)
        if policy:
            AutoAugment().augment_batch(augmented, draw.uniforms[:, 3:])
        expected = torch.stack([resize(image, size) for image in augmented])
        assert (found - expected).abs().max() < tolerance
    assert loader.sampler.repeats == 2
    second_epoch, _ = next(iter(loader))
    assert second_epoch.shape[2:] == (8, 8)


def test_balanced_sampling_knows_the_labels(data):
    loader = build_train(data | {"sampling": "balanced"})
    assert np.array_equal(loader.sampler.balanced, open_images(data).train.labels)


SMALL_SIZE = Resolution(9, 6, 4, 4)
SMALL_THEN_LARGE = Resolution(1, 6, 4, 4), Resolution(9, 8, 4, 4)
SMALL_IMAGES = partial(build_train, resolutions=[SMALL_SIZE])
TWO_SIZES = partial(build_train, resolutions=SMALL_THEN_LARGE)


def read_epochs(build, data, device=CPU, **options):
    """Yield the batches of three epochs."""
    loader = build(data, device, **options)
    for _ in range(3):
        yield from loader


@pytest.mark.parametrize("build", [build_train, SMALL_IMAGES, build_eval])
def test_batches_on_a_gpu_are_those_on_a_cpu_and_do_not_wait(data, build):
    data = data | {"autoaugment": "cifar10"}
    ((images, waits, kernels),) = run_ranks(1, read_on_gpu, partial(build, data))
    assert waits == {}
    assert kernels[False] <= 200
    assert kernels[True] <= 2  # from building the loader, by batch
    expected = [images for images, _ in build(data)]
    assert all(map(torch.equal, images, expected))


@pytest.mark.parametrize(("build", "sizes"), [(build_train, 1), (TWO_SIZES, 2)])
def test_a_cuda_graph_makes_the_batches_in_five_launches(data, build, sizes):
    """The numbers' copy to the GPU and in it, the graph, copies of images and labels; the first
    batch of each size is made without.
    """
    data = data | {"autoaugment": "cifar10"}
    read = partial(read_epochs, build, data, graphs=True)
    ((images, waits, kernels),) = run_ranks(1, read_on_gpu, read)
    assert waits == {}
    launches = kernels[False] * len(images)
    assert launches <= 200 * sizes + 5 * len(images)
    expected = [images for images, _ in read_epochs(build, data)]
    assert len(images) == len(expected)
    assert len(images) == 3 * len(build(data))
    assert all(map(torch.equal, images, expected))


def test_images_of_another_size_are_refused(data):
    words = "MODEL.image_size=32: the train images of .* are 8 x 8 pixels.*=8"
    with pytest.raises(UserError, match=words):
        build_train(data, image_size=32)


WITHOUT_EFFECT = [
    "loader",
    "workers",
    "crop",
    "crop_scale",
    "crop_ratio",
    "window",
    "randaugment",
    "order",
    "block",
    "labels",
    "columns",
]


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_a_key_without_effect_is_refused(key, data):
    with pytest.raises(UserError, match=f"DATA.{key}=9 has no effect"):
        describe_data(data | {key: 9})
