"""Classes of unequal size, as a user trains on them."""

import pytest

from common.errors import UserError
from common.metrics.metrics_file import read_metrics
from imagenet_dali.testing import train, write_images


def test_unequal_classes_are_said_weighted_and_drawn_equally_often(tmp_path, capsys):
    for split in ("train", "val"):
        for name, count in (("ape", 40), ("bee", 3), ("cat", 10)):
            write_images(tmp_path / "images" / split, count, [name])
    root = [f"DATA.root={tmp_path / 'images'}", "DATA.loader=torchvision", "DATA.workers=0"]

    def losses(output: str, *settings: str, flags: tuple[str, ...] = ()) -> list[float]:
        train(tmp_path, output, *root, *settings, flags=flags)
        records = read_metrics(tmp_path / output) if not flags else []
        return [record["loss"] for record in records if record["kind"] == "train"]

    # 53 images / 3 classes / 40 and 3 images; 1 - 0.999^40 and 1 - 0.999^3, of the same mean
    for setting, weights in {"balanced": "0.44 to 5.9", "effective": "0.45 to 5.8"}.items():
        losses("planned", f"CLASS_WEIGHTS={setting}", flags=("--dry-run",))
        said = capsys.readouterr().out
        assert "images by class        bee 3, cat 10, ape 40\n" in said
        assert f"CLASS_WEIGHTS          {weights} in the training loss" in said
    for refused, message in {
        "[1,2]": r"^CLASS_WEIGHTS has 2 numbers: .* each of the 3 classes",
        "[0,0,0]": r"^CLASS_WEIGHTS=\[0, 0, 0\]: all 0, so nothing would be trained; raise one",
    }.items():
        with pytest.raises(UserError, match=message):
            losses("refused", f"CLASS_WEIGHTS={refused}")

    tiny = losses("tiny", "CLASS_WEIGHTS=[1e-9,1e-9,1e-9]")
    assert max(tiny) < 1e-8  # the loss has the weights
    capsys.readouterr()
    whole = losses("whole", "DATA.sampling=balanced")
    assert "\nimages by class: bee 3, cat 10, ape 40\n" in capsys.readouterr().out
    assert losses("other") != whole
    assert losses("parts", "DATA.sampling=balanced", "MAX_STEPS=4") == whole[:2]
    assert losses("parts", "DATA.sampling=balanced") == whole
