"""Both loaders of prepared data, which show the same, and that of image folders."""

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config.schema import Data
from common.data.loader import Loader
from common.data.sampler import NO_LABEL
from common.errors import UserError
from common.resolutions import Resolution
from common.shards.dataset import open_split
from common.shards.prepare import prepare
from imagenet_dali import imagenet_dali_dataloader
from imagenet_dali.imagenet_dali_dataloader import decodes_windows, decoding_threads
from imagenet_dali.images_test import exif
from imagenet_dali.task import build_eval_loader, build_train_loader, describe_data
from imagenet_dali.testing import (
    VIEWS,
    jpeg,
    make_undecodable,
    pixel_differences,
    prepare_photographs,
    read,
    spoil_record,
    write_images,
)

STD = 0.25
DATA = Data(workers=1, mean=(0.5, 0.5, 0.5), std=(STD,) * 3).model_dump()
PLACED = {"image_size": 28, "device": torch.device("cpu")}
both_loaders = pytest.mark.parametrize("loader", ["dali", "torchvision"])


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


def test_without_dali_the_other_loader_is_named(root, monkeypatch):
    monkeypatch.setattr("imagenet_dali.task.has_dali", lambda: False)
    with pytest.raises(UserError, match="DALI is not installed; add --set DATA.loader=torchvision"):
        describe_data(DATA | {"root": str(root)})
    describe_data(DATA | {"root": str(root), "loader": "torchvision"})


def train_loader(
    root: Path, order: str = "random", resolutions: Any = (), **data: object
) -> Loader:
    data = DATA | data | {"root": str(root)}
    options = dict(order=order, seed=1, resolutions=resolutions, **PLACED)
    return build_train_loader(data, 8, 4, **options)


def eval_loader(root: Path, **data: object) -> Loader:
    data = DATA | data | {"root": str(root)}
    return build_eval_loader(data, 4, **PLACED)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_photographs(tmp_path_factory.mktemp("pixels"))


@pytest.mark.parametrize(("interpolation", "crop", "randaugment", "size"), VIEWS)
def test_pixels_of_photographs_are_those_of_the_other_loader(
    photographs, interpolation, crop, randaugment, size
):
    """To 0.3 grey levels in the mean of an image, and 1 or 2 in a pixel that is not at the edge."""
    settings = dict(interpolation=interpolation, crop=crop, randaugment=randaugment)
    means, largest = pixel_differences(photographs, torch.device("cpu"), size, **settings)
    # a last bit decides which values RandAugment inverts or clears
    assert (means.median() if randaugment else means.max()) < 0.3
    if not randaugment:
        assert largest.max().round() <= {"bilinear": 1, "bicubic": 2}[interpolation]


def test_windows_of_images_have_the_pixels_of_whole_ones(photographs, monkeypatch):
    windows = read(train_loader(photographs)) + read(eval_loader(photographs))
    monkeypatch.setattr(imagenet_dali_dataloader, "decodes_windows", lambda _: False)
    whole = read(train_loader(photographs)) + read(eval_loader(photographs))
    torch.testing.assert_close(windows, whole, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("device", "version", "line"),
    [
        ("cpu", None, "libjpeg-turbo decodes windows of images"),
        ("cuda", (13, 2), "nvJPEG 13.2 (hw_decoder_load=0.65) decodes windows of images"),
        (
            "cuda",
            (13, 1),
            "nvJPEG 13.1 (hw_decoder_load=0.65) decodes whole images, "
            "since windows need nvJPEG 13.2",
        ),
    ],
)
def test_what_decodes_is_said(device, version, line, monkeypatch, capsys):
    decodes_windows.cache_clear()
    monkeypatch.setattr(imagenet_dali_dataloader, "nvjpeg_version", lambda: version)
    assert decodes_windows(device) == (version != (13, 1))
    decodes_windows.cache_clear()
    assert capsys.readouterr().out == f"DALI: {line}\n"


def test_the_version_of_nvjpeg_is_found(capsys):
    """The real one, which is torchvision's, and old, if that was imported first."""
    decodes_windows.cache_clear()
    decodes_windows("cuda")
    decodes_windows.cache_clear()
    assert re.search(r"DALI: nvJPEG 1\d\.\d+ \(.*\) decodes", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("workers", "device", "threads"),
    [(None, "cuda", 13), (None, "cpu", 16), (4, "cuda", 4), (0, "cpu", 1)],
)
def test_threads_that_decode(workers, device, threads, monkeypatch):
    """Three of 16 cores launch kernels beside a GPU."""
    monkeypatch.setattr(imagenet_dali_dataloader, "rank_cores", lambda: 16)
    assert decoding_threads(workers, device) == threads
    monkeypatch.setattr(imagenet_dali_dataloader, "rank_cores", lambda: 2)
    assert decoding_threads(None, device) == (1 if device == "cuda" else 2)


@pytest.mark.parametrize(
    ("interpolation", "order", "crop", "randaugment"),
    [
        ("bilinear", "blocks", "random_resized", None),
        ("bilinear", "random", "simple", None),
        ("bicubic", "random", "random_resized", (2, 10)),
    ],
)
def test_both_loaders_show_the_same(root, interpolation, order, crop, randaugment):
    """After a pass that was left early, and after a restart in the middle of the next one."""
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
        blocks = train.sampler.block_bounds
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


@both_loaders
def test_a_rank_without_samples_gets_a_batch_of_padding(root, loader):
    data = DATA | {"root": str(root), "loader": loader}
    place = PLACED | {"dp_rank": 2, "dp_size": 3}
    ((images, labels),) = read(build_eval_loader(data, 8, **place))
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
    place = "^" + make_undecodable(data, 4)
    remedy = "; copy the data set again, or delete it and prepare it again$"
    with pytest.raises(UserError, match=f"{place}.*JPEG.*{remedy}"):
        read(train_loader(data))


@both_loaders
def test_damaged_records_are_skipped_up_to_a_share(data, loader, capsys):
    """1 % of 240 training records, with room for chance, are 8."""
    split = open_split(data, "train")
    damaged = range(8)
    for number in damaged:
        shard = spoil_record(data, "train", number)
    given = dict(loader=loader, order="blocks", block=0.004)
    batches = read(train_loader(data, **given))
    padding = torch.cat([labels == NO_LABEL for _, labels in batches])
    is_zero = torch.cat([~images.flatten(1).any(1) for images, _ in batches])
    assert padding.sum() == 8
    assert torch.equal(padding, is_zero)
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == sorted(
        f"skipped: {shard}: record {number} of train at byte {split.records[number]['offset']}: "
        "checksum of the data does not match; copy the data set again, or delete it and prepare "
        "it again"
        for number in damaged
    )
    spoil_record(data, "train", 8)
    with pytest.raises(UserError, match="9 of the 240 images that .* are bad, more than 1%"):
        read(train_loader(data, **given))


@both_loaders
def test_padding_needs_no_record(data, loader):
    """The last batch of evaluation, where the first record is damaged."""
    spoil_record(data, "validation", 0)
    given = DATA | {"root": str(data), "loader": loader}
    *_, (images, labels) = batches = read(build_eval_loader(given, 8, **PLACED))
    assert (labels == NO_LABEL).tolist() == [False] * 4 + [True] * 4
    assert not images[4:].any()
    assert sum((labels != NO_LABEL).sum() for _, labels in batches) == 59


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
