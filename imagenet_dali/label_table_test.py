"""A table of labels makes the data set that class folders make; a wrong one is refused."""

import csv
import re
from pathlib import Path

import pytest

from common.config.schema import Data
from common.errors import UserError
from common.shards.label_table import LabelTable, list_table
from common.shards.prepare import main, prepare
from common.testing.commands import read_folder
from imagenet_dali.task import describe_data
from imagenet_dali.testing import write_images

CLASSES = ("cat, big", 'dog "d"', "\u00e9")


@pytest.mark.parametrize(
    ("delimiter", "header", "row", "flags"),
    [
        (",", "image_id,label,n", "{path},{label},1", []),
        ("\t", "species\tn\tfile", "{label}\t{n}\t.\\{path}.jpg", []),
        (";", "file;class", "{path}.jpg ; {label} ", []),
        (",", "a,b,c,d", "{n},{path}.jpg,1,{label}", ["--columns=path=b,label=d"]),
    ],
)
def test_a_table_makes_the_data_set_of_the_folders(tmp_path, delimiter, header, row, flags):
    root = write_images(tmp_path / "images", 10, CLASSES)
    prepare(root, tmp_path / "folders")
    table = tmp_path / "labels.csv"
    with table.open("w", encoding="utf-8-sig", newline="") as file:  # lines end as on Windows
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(header.split(delimiter))
        for n, path in enumerate(sorted(root.rglob("*.jpg"), reverse=True)):
            label = path.parent.name
            values = dict(path=f"{label}/{path.stem}", label=label, n=n)
            writer.writerow([cell.format(**values) for cell in row.split(delimiter)])
        writer.writerow(["", ""])  # as a spreadsheet may end
    (root / CLASSES[0] / "0001.png").write_bytes(b"")  # its row names the JPEG
    words = [str(root), str(tmp_path / "made"), "--workers=1", "--max-refused=0.04"]
    main([*words, f"--labels={table}", *flags])
    expected, made = (read_folder(tmp_path / name) for name in ("folders", "made"))
    assert made.pop("refused.txt") == b"cat, big/0001.png: no row\n"
    del made["manifest.json"], expected["manifest.json"]
    assert made == expected


def test_a_corrected_label_is_another_job(tmp_path):
    root = write_images(tmp_path / "images", 5, ("images",))
    table = tmp_path / "labels.csv"
    rows = [f"images/000{number}.jpg,{label}" for number, label in enumerate("abbaa")]
    words = [str(root), str(tmp_path / "made"), "--workers=1", f"--labels={table}"]
    table.write_text("\n".join(["path,label", *rows]))
    main(words)
    rows[3] = "images/0003.jpg,b"
    table.write_text("\n".join(["path,label", *rows]))
    with pytest.raises(UserError, match="made: holds a data set made with other files"):
        main(words)


START = "path,label,split\n1,a,train\n2,b,train\n3,b,"
ROWS = "name,label\n1,a\n2,b\n3,b\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """The path of a table of the four files beside it."""
    (tmp_path / "images").mkdir()
    for number in range(1, 5):
        (tmp_path / f"images/{number}.jpg").touch()
    return tmp_path / "labels.csv"


REFUSED = [
    (ROWS + "4,a\n5.jpg,a\n", "", "line 6: 5.jpg: no such image"),
    (ROWS, "", "4.jpg: no row.*labels.csv: rows or images without a match: 1, more than 1% of 4"),
    (ROWS + "4,a\n4.jpg,b\n", "", "4.jpg: several labels: a, b"),
    (ROWS + "4,big, a\n", "", "line 5: 4: more cells than columns; names with commas need quotes"),
    (ROWS + "4,\n", "", "line 5: 4: no label"),
    (ROWS + '4,"a\n', "", "labels.csv: line 5: unexpected end of data; mend it"),
    (ROWS + "4,\u00e9\n", "", "labels.csv: not UTF-8 text .byte 25.; save it as UTF-8"),
    (
        "label,name\na,z\nb,x/1\n",
        "",
        "image: x/1 is not in .*/images; a file of that name is in .*/images$",
    ),
    ("n,name\n1,z\n1,y\n", "--columns=path=name", "image: z is not in .*/images$"),
    ("name,label\n", "", "is the only one"),
    (
        "name,x,y\n1,a,c\n2,b,d\n3,b,d\n4,a,c\n",
        "",
        "columns name, x, y; label may be x or y: name it in --columns",
    ),
    (
        ROWS,
        "--columns=path=nam",
        "--columns or DATA.columns, path=nam: no column nam; .* has the columns name, label$",
    ),
    (ROWS, "--columns=name", "columns, name: write path=NAME,.* has the columns name, label$"),
    ("name,label\n9,a\n1,\n", "--columns=path=name --max-refused=1", "without a match: 5, more"),
    ("1,a\n2,b\n3,b\n4,a\n", "", "labels.csv: its first line names an image, or"),
    (
        "x,y,z\n1,a,val\n2,b,val\n3,b,val\n4,a,val\n",
        "",
        "images: no train split, only validation; n",
    ),
    ("x,y\n1,a\n2,a\n3,a\n4,a\n", "", "labels.csv: one class, a; at least 2 are needed"),
    (START + "train\n4,c,val\n", "", "class c of validation has no training images"),
    (
        START + "3\n4,a,3\n",
        "--columns=split=split",
        "line 4: 3: split '3' is not train, val or test",
    ),
    (
        START + "\n4,a,extra\n",
        "",
        r"2\s+train;\s+not\s+a\s+split:\s+blank\s+\(1\),\s+extra\s+\(1\);"
        ".*line 4: 3: split '' is not train.*line 5: 4: split 'extra'.*match: 2, more than 1% of 4"
        ".*has train, val or test in each row",
    ),
    (
        "name,label,fold\n1,a,0\n2,b,0\n3,b,0\n4,a,1\n",
        "",
        r"columns name, label, fold; fold may tell the test rows, but its values are 0 \(3\), "
        r"1 \(1\): write train, val and test, or add --columns split= to use all rows$",
    ),
    ("name,label,Usage\n1,a,x\n2,b,x\n3,b,y\n4,a,test\n", "", "Usage may tell the test rows"),
    (
        "name,label,is_train,is_test\n1,a,1,0\n2,b,1,0\n3,b,0,1\n4,a,0,1\n",
        "",
        "split may be is_train or is_test: name it",
    ),
    (ROWS + "4,a|b\n", "", r"line 5: 4: several labels in a cell: a\|b\n"),
    (ROWS + "4,b a\n", "", "line 5: 4: several labels in a cell: b a\n"),
    (ROWS + "4,\"['x', 'y']\"\n", "", r"line 5: 4: several labels in a cell: \['x', 'y'\]"),
    ("name,label,n,n\n1,a,1,2\n2,b,1,2\n", "", "2 columns are named n; rename or remove one"),
]


@pytest.mark.parametrize(("content", "flags", "message"), REFUSED)
def test_a_table_that_does_not_fit_is_refused(table, capsys, content, flags, message):
    table.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError) as error:
        main(
            [f"{table.parent}/images", f"{table.parent}/data", f"--labels={table}", *flags.split()]
        )
    assert re.search(message, capsys.readouterr().out + str(error.value), re.DOTALL)
    assert not (table.parent / "data").exists()


def test_a_row_names_the_file_of_its_own_name_before_one_with_a_suffix_more(table, capsys):
    for name in ("3.jpg.png", "4"):
        (table.parent / "images" / name).touch()
    table.write_text("name,label\n1,a\n2,b\n3.jpg,b\n4,a\n")
    with pytest.raises(UserError, match="rows or images without a match: 2, "):
        main([f"{table.parent}/images", f"{table.parent}/data", f"--labels={table}"])
    said = capsys.readouterr().out
    assert "3.jpg.png: no row" in said
    assert "4.jpg: no row" in said


SPLIT_COLUMNS = [
    ("split", ("train ", "TRAIN", " test", "val"), {"train": "12", "test": "3", "validation": "4"}),
    ("x", ("TRN", "TRN", "TST", "VAL"), {"train": "12", "test": "3", "validation": "4"}),
    (
        "Usage",
        ("Training", "Training", "PrivateTest", "PublicTest"),
        {"train": "12", "test": "3", "validation": "4"},
    ),
    ("part", ("train", "train", "train", "holdout"), {"train": "123", "test": "4"}),
    ("is_test", ("0", "0", "0", "1"), {"train": "123", "test": "4"}),
    ("is_valid", ("False", "False", "False", "True"), {"train": "123", "validation": "4"}),
    ("is_training_image", ("1", "1", "1", "0"), {"train": "123", "test": "4"}),
    ("split ", ("train", "train", "train", ""), {"train": "123"}),
    ("note", ("good", "good", "good", "test"), {"": "1234"}),
]


@pytest.mark.parametrize(("column", "cells", "expected"), SPLIT_COLUMNS)
def test_a_column_of_mostly_splits_is_used_and_the_rest_said(
    table, capsys, column, cells, expected
):
    rows = "".join(f"{number},{'ab'[number % 2]},{cell}\n" for number, cell in enumerate(cells, 1))
    table.write_text(f"name,label,{column}\n{rows}")
    options = LabelTable(table, max_refused=1)
    _, by_split = list_table(table.parent / "images", options, None)
    found = {split: "".join(name[0] for name in sorted(by_split[split])) for split in by_split}
    assert found == expected
    said = " ".join(capsys.readouterr().out.split())
    role = "not used: note" if column == "note" else f"split in column {column.strip()};"
    assert role in said
    assert ("not a split: blank (1)" in said) == ("" in cells)


def test_no_column_of_splits_and_labels_of_words_are_taken_as_asked(table, capsys):
    """A label's part may be another label, and a class may be called train."""
    rows = '1,tank,0\n2,train\n3,"tank, old",1\n4,train\n'
    table.write_text(f"name,label,fold\n{rows}")
    options = LabelTable(table, columns="split=")
    listing, by_split = list_table(table.parent / "images", options, None)
    assert listing.class_names == ["tank", "tank, old", "train"]
    assert {*by_split} == {""}
    assert "not used: fold; 4 rows;" in capsys.readouterr().out
    table.write_text("name,label\n1,tank\n2,train\n3,train\n4,train\n")
    listing, _ = list_table(table.parent / "images", LabelTable(table), None)
    assert listing.class_names == ["tank", "train"]


def test_a_column_has_the_splits(table):
    table.write_text(START + "val\n4,a,testing\n")
    given = Data(root=f"{table.parent}/images", loader="torchvision", labels=str(table))
    data = given.model_dump()
    for eval_split, images in ((None, (2, 1)), ("test", (0, 1))):
        found = describe_data(data | {"eval_split": eval_split})
        assert (found.train_samples, found.eval_samples) == images
        assert found.class_names == ["a", "b"]
    assert describe_data(data).validation.startswith("the validation split; test is left out")
    with pytest.raises(UserError, match="DATA.labels=.*labels.csv, .*: leave it out"):
        describe_data(data | {"loader": "dali"})
