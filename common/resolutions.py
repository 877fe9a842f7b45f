"""What a step of each epoch is: the size of images, batch and micro-batch, which may change.

A run is a list of `Resolution`. Its steps may have several batches: its schedule then counts steps
of the smallest one, so that warm-up and decay go by images.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.files import Count


@dataclass(frozen=True)
class Resolution:
    """Consecutive epochs with images, batches and micro-batches of one size."""

    end: Count  # epochs completed when it ends
    image_size: Count  # pixels, of the side of a square
    micro_batch: Count  # images
    accumulation: Count  # micro-batches in a step
    total_batch: Count = 0  # images in a step, over all GPUs; 0: TOTAL_BATCH_SIZE
    steps: Count = 0  # in an epoch


def resolution_at(resolutions: Sequence[Resolution], epoch: int) -> Resolution:
    """Return the resolution of an epoch, counted from 0; the last one has no end."""
    return next(
        (resolution for resolution in resolutions if epoch < resolution.end), resolutions[-1]
    )


def most_steps(resolutions: Sequence[Resolution]) -> int:
    """Return the steps of an epoch with the smallest batch: the schedule's steps of any epoch."""
    return max(resolution.steps for resolution in resolutions)


def schedule_step(resolutions: Sequence[Resolution], step: int) -> float:
    """Return the schedule's step, which may be a fraction, of an optimizer step."""
    most = most_steps(resolutions)
    begin = 0
    for resolution in resolutions[:-1]:
        steps = (resolution.end - begin) * resolution.steps
        if step < steps:
            break
        step -= steps
        begin = resolution.end
    else:
        resolution = resolutions[-1]
    # Rounded once: a whole number is exact.
    return begin * most + step * most / resolution.steps


def optimizer_step(resolutions: Sequence[Resolution], scheduled: int) -> int:
    """Return the first optimizer step that is not before a step of the schedule."""
    most = most_steps(resolutions)
    begin = 0
    done = 0
    for resolution in resolutions[:-1]:
        if scheduled <= resolution.end * most:
            break
        done += (resolution.end - begin) * resolution.steps
        begin = resolution.end
    else:
        resolution = resolutions[-1]
    # rounded up
    return done - (begin * most - scheduled) * resolution.steps // most
