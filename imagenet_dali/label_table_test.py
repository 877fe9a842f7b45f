"""A table of labels makes the data set that class folders make; a wrong one is refused."""

import csv
import re
import shutil
from pathlib import Path

import pytest

from common.config.schema import Data
from common.errors import UserError
from common.files import ROOT
from common.testing.commands import read_folder
from imagenet_dali.prepare import main
from imagenet_dali.task import describe_data
from imagenet_dali.testing import run, write_images

CLASSES = ("cat, big", 'dog "d"', "\u00e9")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Three class folders of 10 images; beside them is ``made``, the data set of the folders."""
    root = write_images(tmp_path_factory.mktemp("table") / "images", 10, CLASSES)
    main([str(root), str(root.with_name("made")), "--workers=1"])
    return root


@pytest.mark.parametrize(
    ("delimiter", "header", "row", "flags"),
    [
        (",", "image_id,label,n", "{path},{label},1", ["--max-refused=0.04"]),
        ("\t", "species\tn\tfile", "{label}\t{n}\t.\\{path}.jpg", []),
        (";", "", "{path}.jpg ; {label} ", []),
        (",", "a,b,c,d", "{n},{path}.jpg,1,{label}", ["--columns=path=b,label=d"]),
    ],
)
def test_a_table_makes_the_data_set_of_the_folders(images, tmp_path, delimiter, header, row, flags):
    root = shutil.copytree(images, tmp_path / "images")
    table = root / "labels.csv"
    with table.open("w", encoding="utf-8-sig", newline="") as file:  # lines end as on Windows
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([header.split(delimiter)] if header else [])
        for n, path in enumerate(sorted(root.rglob("*.jpg"), reverse=True)):
            label = path.parent.name
            values = dict(path=f"{label}/{path.stem}", label=label, n=n)
            writer.writerow([cell.format(**values) for cell in row.split(delimiter)])
        writer.writerow(["", ""])  # as a spreadsheet may end
    expected = read_folder(images.with_name("made"))
    if "--max-refused=0.04" in flags:
        (root / CLASSES[0] / "0001.png").write_bytes(b"")  # its row names the JPEG
        expected["refused.txt"] = b"cat, big/0001.png: no row\n"
    main([str(root), str(tmp_path / "made"), "--workers=1", f"--labels={table}", *flags])
    made = read_folder(tmp_path / "made")
    del made["manifest.json"], expected["manifest.json"]
    assert made == expected

    data = Data(root=str(root), loader="torchvision").model_dump()
    if not flags:
        found = describe_data(data | {"labels": "labels.csv"})
        table.unlink()
        assert found == describe_data(data | {"root": str(images)})


START = "path,label,split\n1,a,train\n2,b,train\n3,b,"
ROWS = "name,label\n1,a\n2,b\n3,b\n"


def write_table(root: Path, content: str, encoding: str = "utf-8") -> list[str]:
    """Write a table of four images in ``root``; return the words of a command that prepares it."""
    for number in range(1, 5):
        (root / "images").mkdir(exist_ok=True)
        (root / f"images/{number}.jpg").write_bytes(b"")
    (root / "labels.csv").write_text(content, encoding, newline="")
    return [str(root / "images"), str(root / "data"), "--labels", str(root / "labels.csv")]


REFUSED = [
    (ROWS + "4,a\n5.jpg,a\n", "", "line 6: 5.jpg: no such image"),
    (ROWS, "", "4.jpg: no row.*labels.csv: rows or images without a match: 1, more than 1% of 4"),
    (ROWS + "4,a\n4.jpg,b\n", "", "4.jpg: several labels: a, b"),
    (ROWS + "4,big, a\n", "", "line 5: 4: more cells than columns; names with commas need quotes"),
    (ROWS + "4,\n", "", "line 5: 4: no label"),
    (ROWS + '4,"a\n', "", "labels.csv: line 5: unexpected end of data; mend it"),
    (ROWS + "4,\u00e9\n", "", "labels.csv: not UTF-8 text .byte 25.; save it as UTF-8"),
    (
        "name,label\nx/1,a\n",
        "",
        "columns name, label, paths are relative to IMAGES; path may be none",
    ),
    (
        "1,a,c\n2,b,d\n3,b,d\n4,a,c\n",
        "",
        "columns 1, 2, 3, .*; label may be 2 or 3: name it, as columns label=NAME",
    ),
    (ROWS, "--columns=path=nam", "columns path=nam: not path=NAME,.* has the columns name, label"),
    ("name,label\n9,a\n8,b\n", "--columns=path=name --max-refused=1", "without a match: 6, more"),
    ("1,a,val\n2,b,val\n3,b,val\n4,a,val\n", "", "images: no train split, only validation; name"),
    ("1,a\n2,a\n3,a\n4,a\n", "", "labels.csv: one class, a; at least 2 are needed"),
    (START + "train\n4,c,val\n", "", "class c of validation has no training images"),
    (
        START + "3\n4,a,3\n",
        "--columns=split=split",
        "line 4: 3: split '3' is not train, val or test",
    ),
]


@pytest.mark.parametrize(("content", "flags", "message"), REFUSED)
def test_a_table_that_does_not_fit_is_refused(tmp_path, capsys, content, flags, message):
    encoding = "latin-1" if "UTF-8" in message else "utf-8"
    words = [*write_table(tmp_path, content, encoding), *flags.split()]
    if content == ROWS and not flags:  # as a user starts it
        answer = run(f"python -m imagenet_dali.prepare {' '.join(words)}", cwd=ROOT, code=2)
        said = answer.stdout + answer.stderr
    else:
        with pytest.raises(UserError) as error:
            main(words)
        said = capsys.readouterr().out + str(error.value)
    assert re.search(message, said, re.DOTALL)
    assert not (tmp_path / "data").exists()


def test_a_column_has_the_splits(tmp_path):
    write_table(tmp_path, START + "val\n4,a,testing\n")
    table = str(tmp_path / "labels.csv")
    data = Data(root=str(tmp_path / "images"), loader="torchvision", labels=table).model_dump()
    for eval_split, images in ((None, (2, 1)), ("test", (0, 1))):
        found = describe_data(data | {"eval_split": eval_split})
        assert (found.train_samples, found.eval_samples) == images
        assert found.class_names == ["a", "b"]
    assert describe_data(data).validation.startswith("the validation split; test is left out")
    with pytest.raises(UserError, match="DATA.labels=.*labels.csv, .*: leave it out"):
        describe_data(data | {"loader": "dali"})
