import pytest
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from cifar10_benchmark.dataset import open_images
from cifar10_benchmark.task import READ_AHEAD, build_eval_loader, build_train_loader, describe_data
from common.config.load import load_config
from common.config.plan import DataSummary
from common.errors import UserError
from common.testing.host_sync import forbid_waiting
from common.testing.photographs import write_colours

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


def train_loader(data):
    return build_train_loader(data, 16, 4, seed=5, image_size=8, dp_rank=0, dp_size=1, device=CPU)


def test_counts_the_data_set(data):
    expected = DataSummary(TRAIN, TEST, 3, open_images(data).fingerprint, class_names=["b", "g", "r"])
    assert describe_data(data) == expected


def test_evaluation_is_torchvisions(data, root):
    transform = v2.Compose(
        [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(data["mean"], data["std"])]
    )
    expected = DataLoader(ImageFolder(f"{root}/test", transform), batch_size=TEST)
    images, labels = next(iter(expected))
    loader = build_eval_loader(data, 4, image_size=8, dp_rank=0, dp_size=1, device=CPU)
    batches = list(loader)
    assert [len(images) for images, _ in batches] == [4, 4, 4]
    ours = torch.cat([images for images, _ in batches])
    assert torch.allclose(ours[:TEST], images, atol=1e-5)
    assert torch.equal(torch.cat([labels for _, labels in batches])[:TEST], labels)
    assert ours[TEST:].abs().max() == 0
    assert batches[-1][1][-1] == -100


@pytest.mark.parametrize("build", [train_loader, lambda data: build_eval_loader(data, 4, image_size=8, device=CPU)])
def test_batches_that_are_made_together_are_those_made_one_by_one(data, build):
    """As they are on a GPU: twelve batches, and three."""
    loaders = build(data | {"autoaugment": "cifar10"}), build(data | {"autoaugment": "cifar10"})
    assert [loader.reader.together for loader in loaders] == [1, 1]
    loaders[1].reader.together = 8
    for batch, expected in zip(*loaders, strict=True):
        assert torch.equal(batch[0], expected[0])
        assert torch.equal(batch[1], expected[1])


def test_images_of_another_size_are_refused(data):
    with pytest.raises(UserError, match="MODEL.image_size=32: the train images of .* are 8 x 8 pixels.*=8"):
        build_train_loader(data, 16, 4, image_size=32, dp_rank=0, dp_size=1, seed=0, device=CPU)


def test_keys_for_photographs_are_refused(data):
    with pytest.raises(UserError, match="DATA.crop_scale=.* has no effect"):
        describe_data(data | dict(crop_scale=(0.5, 1.0)))


@pytest.mark.parametrize("together", [1, READ_AHEAD])
def test_making_batches_does_not_wait_for_the_device(data, together):
    loader = train_loader({**data, "autoaugment": "cifar10"})
    loader.reader.together = together
    with forbid_waiting(CPU):
        assert len(list(loader)) == len(loader)
