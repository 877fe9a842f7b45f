"""Images that grow while training: the size and the micro-batch of each epoch."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.files import Count


@dataclass(frozen=True)
class Resolution:
    """Consecutive epochs with images of one size, in micro-batches of one size."""

    end: Count  # epochs completed when it ends
    image_size: Count  # pixels, of the side of a square
    micro_batch: Count  # images
    accumulation: Count  # micro-batches in a step


def resolution_at(resolutions: Sequence[Resolution], epoch: int) -> Resolution:
    """Return the resolution of an epoch, counted from 0; the last one has no end."""
    return next(
        (resolution for resolution in resolutions if epoch < resolution.end), resolutions[-1]
    )
