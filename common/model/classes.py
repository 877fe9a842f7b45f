"""Which class of a model a label of a data set means: that of its name.

docs/fine-tune.md has the rules, and what happens where a side has no names.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from common.errors import UserError
from common.files import Values, canonical_name, read_names
from common.text import list_some

ORDERS = ("text", "timm")
ORDER_HELP = "order in which a model that names no classes has the data set's (default: text)"
CLASSES_HELP = "names of the model's classes, one a line, in the order of its outputs"


def match_classes(known: Sequence[Sequence[str]], names: Sequence[str]) -> list[int | None]:
    """Return the model's class for each of ``names``, None where no class, or several, has it.

    ``known`` are lists of names of the model's classes, as synsets, and as "tench, Tinca tinca".
    Equal lists match even if they repeat names, as ImageNet's repeat "crane".
    """
    wanted = [*map(canonical_name, names)]
    labels: dict[str, int | None] = {}
    for listed in known:
        named = [*map(canonical_name, listed)]
        # Before names are compared: a list that repeats a name is its own answer.
        if named == wanted:
            return [*range(len(named))]
        for label, name in enumerate(named):
            # A name that two classes have means neither.
            labels[name] = label if labels.get(name, label) == label else None
    return [labels.get(name) for name in wanted]


def order_classes(
    known: Sequence[str], names: Sequence[str], order: str | None, count: int
) -> tuple[list[str], str]:
    """Return names for a model's ``count`` classes, and a warning if it does not name them itself,
    as ``known``.

    Then they are those of the data set, ``names``: in ``order`` "timm" in the natural order of
    timm's train.py, else as they are, with a warning unless "text" says so.
    """
    if known:
        if order:
            raise UserError(f"--class-order {order}: the model names its classes: leave it out")
        return [*known], ""
    from timm.utils.misc import natural_key  # timm takes a second to import

    if len(names) != count:
        raise UserError(
            f"the model names none of its {count} classes, the data set has {len(names)}: name the "
            "model's with --classes FILE"
        )
    natural = sorted(names, key=natural_key)
    if order:
        return natural if order == "timm" else [*names], ""
    keys = [*map(natural_key, names)]  # names that differ only in case have equal keys
    is_clear = all(first < second for first, second in pairwise(keys))
    timms = "" if is_clear else f", timm's is {list_some(natural)} (--class-order timm)"
    return [*names], (
        "warning: the model names no classes; their order is taken to be the data set's, "
        f"{list_some(names)}{timms}; --classes FILE gives another"
    )


def match_head(
    pretrained_cfg: Values, names: Sequence[str], classes: str | None
) -> tuple[list[int | None], str]:
    """Return the row of the weights' head for each of ``names``, and a warning if it is not known.

    ``pretrained_cfg``, or ``classes`` in its place, names the rows.
    """
    known = name_classes(pretrained_cfg)
    if classes and classes not in ORDERS:
        known = {"class_names": read_names(Path(classes)), "descriptions": []}
        classes = None
    # The head of the weights counts as one of as many classes as the data set has.
    rows, warning = order_classes(known["class_names"], names, classes, len(names))
    return match_classes([rows, known["descriptions"]], names), warning


def name_classes(pretrained_cfg: Values) -> dict[str, list[str]]:
    """Return the classes' names and what they mean; of ImageNet's those that timm knows."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    count = pretrained_cfg.get("num_classes") or 0
    names = pretrained_cfg.get("label_names") or []
    descriptions = []
    # By the number of classes: 1,000 are those of ImageNet-1k.
    subset = None if names else infer_imagenet_subset({"num_classes": count})
    if subset is not None:
        info = ImageNetInfo(subset)
        names = info.label_names()
        descriptions = [info.index_to_description(label) for label in range(count)]
    return {"class_names": list(names), "descriptions": descriptions}
