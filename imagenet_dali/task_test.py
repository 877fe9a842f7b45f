"""Both loaders of prepared data, which show the same, and that of image folders."""

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config.schema import Data
from common.data.image_loaders import ImageReader
from common.data.loader import Loader
from common.data.sampler import NO_LABEL
from common.errors import UserError
from common.resolutions import Resolution
from common.shards.dataset import open_split
from common.shards.prepare import prepare
from common.shards.tfrecord_format import frame, unframe
from imagenet_dali import imagenet_dali_dataloader
from imagenet_dali.imagenet_dali_dataloader import DaliReader, decodes_windows
from imagenet_dali.images_test import exif
from imagenet_dali.task import build_eval_loader, build_train_loader, describe_data
from imagenet_dali.testing import jpeg, spoil_record, write_images

STD = 0.25
DATA = Data(workers=1, mean=(0.5, 0.5, 0.5), std=(STD,) * 3).model_dump()
PLACED = {"image_size": 28, "device": torch.device("cpu")}
READERS = {"dali": DaliReader, "torchvision": ImageReader}  # DALI's is chosen on a GPU only


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``{train,val}/{ape,bee}/`` of 24 and 10 images; beside it are ``shards`` of them."""
    folder = tmp_path_factory.mktemp("photographs")
    for split, per_class in (("train", 12), ("val", 5)):
        write_images(folder / "images" / split, per_class, ("ape", "bee"))
    (folder / "images/train/ape/0000.jpg").write_bytes(jpeg(exif=exif(3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "common.shards.writer.is_turned", lambda _: False
        )  # adopted shards have such records, which are shown as stored
        prepare(folder / "images", folder / "shards")
    return folder / "images"


@pytest.fixture
def root(folder: Path) -> Path:
    return folder.with_name("shards")


def test_dali_is_needed_on_a_gpu_only(root, monkeypatch):
    monkeypatch.setattr("imagenet_dali.task.has_dali", lambda: False)
    describe_data(DATA | {"root": str(root)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match="DALI is not installed"):
        describe_data(DATA)


def train_loader(
    root: Path, order: str = "random", resolutions: Any = (), **data: object
) -> Loader:
    data = DATA | data | {"root": str(root)}
    options = dict(order=order, seed=1, resolutions=resolutions, **PLACED)
    return build_train_loader(data, 8, 4, build_reader=READERS[data["loader"]], **options)


def eval_loader(root: Path, **data: object) -> Loader:
    data = DATA | data | {"root": str(root)}
    return build_eval_loader(data, 4, build_reader=READERS[data["loader"]], **PLACED)


def read(loader: Loader) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a pass over the loader, which is closed."""
    try:
        return list(loader)
    finally:
        loader.close()


@pytest.mark.parametrize(
    ("interpolation", "order", "crop", "randaugment", "version"),
    [
        ("bilinear", "blocks", "random_resized", None, None),
        ("bilinear", "random", "simple", None, (13, 1)),  # decodes whole images
        ("bicubic", "random", "random_resized", (2, 10), (13, 2)),
    ],
)
def test_both_loaders_show_the_same(
    root, interpolation, order, crop, randaugment, version, monkeypatch, capsys
):
    """After a pass that was left early, and after a restart in the middle of the next one."""
    decodes_windows.cache_clear()
    if version:  # else the real one, which is torchvision's, and old, if that was imported first
        monkeypatch.setattr(imagenet_dali_dataloader, "nvjpeg_version", lambda: version)
    data = {
        "interpolation": interpolation,
        "order": order,
        "crop": crop,
        "randaugment": randaugment,
        "block": 0.004,
        "resolutions": (Resolution(2, 20, 8, 1), Resolution(9, 28, 4, 2)),
    }
    shown = {}
    for name in ("dali", "torchvision"):
        train, resumed = (train_loader(root, loader=name, **data) for _ in range(2))
        blocks = train.sampler.blocks
        assert order == "random" if blocks is None else 3 < len(blocks) < 20
        next(iter(train))
        first = list(itertools.islice(train, 1))
        resumed.load_state_dict(train.state_dict())
        shown[name] = [
            *first,
            *resumed,
            *read(resumed),
            *read(eval_loader(root, loader=name, interpolation=interpolation)),
        ]
        train.close()
    assert [images.shape[::2] for images, _ in shown["dali"]] == [(8, 20)] * 3 + [(4, 28)] * 9
    differences = []
    for (images, labels), (other_images, other_labels) in zip(*shown.values(), strict=True):
        assert torch.equal(labels, other_labels)
        differences.extend(255 * STD * (images - other_images).abs().mean((1, 2, 3)))
    by_image = torch.stack(differences)
    # a last bit decides which values RandAugment inverts or clears
    assert (by_image.median() if randaugment else by_image.max()) < 0.6
    does = {None: "1.* decodes", (13, 1): "13.1 decodes whole", (13, 2): "13.2 decodes windows"}
    assert re.search(f"DALI: nvJPEG {does[version]}", capsys.readouterr().out)


@pytest.mark.parametrize("build_reader", READERS.values())
def test_a_rank_without_samples_gets_a_batch_of_padding(root, build_reader):
    data = DATA | {"root": str(root)}
    place = PLACED | {"dp_rank": 2, "dp_size": 3}
    ((images, labels),) = read(build_eval_loader(data, 8, build_reader=build_reader, **place))
    assert images.shape == (8, 3, 28, 28)
    assert not images.any()
    assert labels.tolist() == [NO_LABEL] * 8


def test_wrong_settings_are_refused(folder):
    cases = [
        (
            {"loader": "dali"},
            "json: missing; run .* SOURCE DEST` .* --adopt .* --set DATA.loader=torchvision$",
        ),
        (
            {"loader": "dali", "randaugment": "rand-m9"},
            "DATA.randaugment='rand-m9' is timm's, on the CPU",
        ),
        ({"autoaugment": "cifar10"}, "DATA.autoaugment='cifar10' has no effect"),
        (
            {"order": "blocks"},
            r"DATA.order='blocks': .* has no shards; `python scripts/prepare.py",
        ),
    ]
    for options, message in cases:
        with pytest.raises(UserError, match=message):
            describe_data(DATA | {"root": str(folder), "loader": "torchvision"} | options)


def test_a_folder_is_known_by_its_classes_and_both_splits(folder):
    given = DATA | {"root": str(folder), "loader": "torchvision"}
    for more in ({"randaugment": "rand-m9"}, {"eval_split": "validation"}):
        assert describe_data(given | more).class_names == ["ape", "bee"]
    before = describe_data(given).fingerprint
    (folder / "val/ape/0000.jpg").write_bytes(b"")
    assert describe_data(given).fingerprint != before


def test_a_class_without_validation_images_is_named(folder, tmp_path):
    root = shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(root / "val/bee")
    (root / "train/ape").rename(root / "train/ap\u00e9")
    (root / "val/ape").rename(root / "val/ape\u0301")  # the same name, as macOS writes it
    summary = describe_data(DATA | {"root": str(root), "loader": "torchvision"})
    assert summary.validation == "val/; no images of 1 of 2 classes: bee"


def test_what_dali_cannot_read_is_named(data):
    split = open_split(data, "train")
    shard, row = split.shards[0], split.records[4]
    content = bytearray(shard.read_bytes())
    record = slice(int(row["offset"]), int(row["offset"] + row["size"]))
    image, payload = bytes(split.read(4)[0]), bytes(unframe(content[record]))
    content[record] = frame(
        payload.replace(image, bytes(len(image)))
    )  # no image, with a right checksum
    shard.write_bytes(content)
    place = f"^{shard}: record 4 of train at byte {row['offset']}: "
    remedy = "; copy the data set again, or delete it and prepare it again$"
    with pytest.raises(UserError, match=f"{place}.*JPEG.*{remedy}"):
        read(train_loader(data))
    spoil_record(data, "train", 4)
    with pytest.raises(UserError, match=f"{place}checksum of the data does not match{remedy}"):
        read(train_loader(data, order="blocks", block=0.004))
    batches = read(train_loader(data, loader="torchvision", order="blocks", block=0.004))
    assert sum((labels == NO_LABEL).sum() for _, labels in batches) == 1


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (
            "CUDA_ERROR_OUT_OF_MEMORY (2)\nStack",
            UserError,
            "memory .* of 4 images: lower",
        ),
        ("cudaErrorAssert (710)\nStacktrace malloc", RuntimeError, "cudaErrorAssert"),
    ],
)
def test_no_record_is_blamed_for_what_is_not_its_fault(root, monkeypatch, said, error, message):
    loader = train_loader(root)

    def fail(_: object) -> None:
        loader.reader._next_inputs()
        raise RuntimeError(said)

    monkeypatch.setattr(loader.reader._pipeline, "run", fail)
    loader.reader._raw_batches = loader.reader._read_raw(loader.sampler.draws(0))
    with pytest.raises(error, match=message):
        read(loader)
