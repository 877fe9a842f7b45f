"""Classes of unequal size: their weights in the training loss, and what a start says of them."""

from collections.abc import Sequence

from common.errors import UserError
from common.files import Values

BETA = 0.999  # the paper's beta: the effective number of images is at most 1 / (1 - BETA)
UNEQUAL = 3  # sizes are named if the largest class has more than so many times the smallest


def class_weights(config: Values, counts: Sequence[int]) -> list[float] | None:
    """Return the weight of each class by CLASS_WEIGHTS and the number of its training images.

    "balanced" is the inverse of that number, "effective" of the effective number (Cui et al., arXiv
    1901.05555). Both have a mean of 1 over the training images, so that the loss keeps its scale. A
    class without images has weight 0. Raises `UserError` for a list of another length, or
    of zeros alone.
    """
    setting = config["CLASS_WEIGHTS"]
    classes = config["MODEL"]["num_classes"]
    if isinstance(setting, str):
        # The head may have more classes than the data set: that of INIT's weights is kept.
        sizes: Sequence[float] = [*counts, *[0] * (classes - len(counts))]
        if setting == "effective":
            sizes = [(1 - BETA**count) / (1 - BETA) for count in sizes]
        inverse = [1 / size if size else 0.0 for size in sizes]
        total = sum(count * weight for count, weight in zip(counts, inverse, strict=False))
        return [sum(counts) / total * weight for weight in inverse]
    if setting and len(setting) != classes:
        raise UserError(
            f"CLASS_WEIGHTS has {len(setting)} numbers: give one for each of the {classes} "
            "classes, in the order of labels"
        )
    if setting and not any(setting):
        raise UserError(f"CLASS_WEIGHTS={setting}: all 0, so nothing would be trained; raise one")
    return setting


def describe_sizes(counts: Sequence[int], names: Sequence[str]) -> str:
    """Return the smallest and the largest classes; "" where their sizes are nearly the same."""
    classes = sorted(zip(counts, names, strict=False))
    if not classes or classes[-1][0] <= UNEQUAL * classes[0][0]:
        return ""
    shown = [f"{name[:16]} {count:,}" for count, name in classes]
    if len(shown) > 4:
        shown[2:-2] = ["..."]  # keeps two of each end
    return ", ".join(shown)
