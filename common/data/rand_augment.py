"""torchvision's RandAugment (Cubuk et al., arXiv 1909.13719) with random numbers of each sample's own."""

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

FILL = 128  # what lies outside the image is grey
LEVELS = 10
BINS = 1000  # the magnitudes are as fine as a hundredth of a level


class RandAugment:
    """Apply ``operations`` of torchvision's 14 in a row, each drawn independently, all at one ``magnitude`` of 0 to 10.

    10 is the largest, as in the paper, TensorFlow and timm; torchvision counts the same range from 0 to 30.
    """

    uniforms = 1  # how many numbers in [0, 1) an image takes

    def __init__(self, operations: int, magnitude: float) -> None:
        level = round(magnitude / LEVELS * BINS)
        self.transform = v2.RandAugment(operations, level, num_magnitude_bins=BINS + 1, fill=FILL)

    def __call__(self, image: Image.Image, uniforms: np.ndarray) -> Image.Image:
        """Return ``image`` augmented as ``uniforms`` [1] say, without a change of torch's random state."""
        state = torch.get_rng_state()
        try:
            torch.default_generator.manual_seed(int(uniforms[0] * 2**53))
            return self.transform(image)
        finally:
            torch.set_rng_state(state)
