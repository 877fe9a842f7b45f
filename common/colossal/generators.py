"""The state of a process's random number generators, as tensors."""

import random

import numpy as np
import torch
from torch import Tensor


def generator_states() -> dict[str, Tensor]:
    """Return the states of torch's, Python's and numpy's generators."""
    (_, words, gauss), of_numpy = random.getstate(), np.random.get_state()
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    states["python"] = torch.tensor(words)
    states["python.gauss"] = torch.tensor([] if gauss is None else [gauss], dtype=torch.float64)
    _, keys, position, has_gauss, gauss = of_numpy
    states["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss])
    states["numpy.gauss"] = torch.tensor([gauss], dtype=torch.float64)
    return states


def set_generator_states(states: dict[str, Tensor]) -> None:
    """Restore states from `generator_states`."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    gauss = states["python.gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, states["numpy.gauss"].item()))
