"""What the training loops that are compared all do: the recipe, its batches round by round, our model and optimizer."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from cifar10_benchmark.dataloader import build_train_loader
from common.config.load import load_config
from common.model.vit import build_model
from common.optim.build import build_optimizer
from common.optim.lr_schedule import build_lr_scheduler
from common.tools.harness import Rounds

CONFIG = "vit_lite_vanilla"
IN_MEMORY = 4  # different batches, used over and over
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Job:
    """What all loops do: ``rounds`` times ``steps`` steps of what the recipe and ``settings`` say."""

    settings: tuple[str, ...]
    steps: int
    rounds: int
    data: str | None  # folder of CIFAR-10; None for random images

    @property
    def config(self) -> dict[str, Any]:
        return load_config(CONFIG, self.settings)

    @property
    def total_steps(self) -> int:
        """The steps of all rounds, and one more: a loop that counts its batches ends after its last round has."""
        return self.rounds * self.steps + 1

    def batches(self) -> list[Batch]:
        """Return a few batches of normalised images and labels."""
        config = self.config
        batch, side = config["TOTAL_BATCH_SIZE"], config["MODEL"]["image_size"]
        if self.data:
            place = dict(image_size=side, dp_rank=0, dp_size=1, seed=0, device=torch.device("cpu"))
            loader = build_train_loader(config["DATA"] | {"root": self.data}, batch, batch, **place)
            return list(islice(loader, IN_MEMORY))
        random = torch.Generator().manual_seed(0)
        images = torch.randn(IN_MEMORY, batch, 3, side, side, generator=random)
        return list(zip(images, torch.randint(10, (IN_MEMORY, batch), generator=random), strict=True))


class RoundBatches:
    """A data loader that hands out each round's batches, and waits between the rounds."""

    def __init__(self, job: Job, rounds: Rounds) -> None:
        self.job, self.rounds = job, rounds

    def __len__(self) -> int:
        return self.job.total_steps

    def __iter__(self) -> Iterator[Batch]:
        batches = cycle(self.job.batches())
        for _ in self.rounds:
            yield from islice(batches, self.job.steps)
        yield next(batches)

    def state_dict(self) -> dict[str, int]:
        """Return a position, for the checkpoint at the end, which nothing resumes from."""
        return {}


def build_ours(job: Job) -> tuple[nn.Module, AdamW, nn.Module, LambdaLR]:
    """Return model, optimizer, loss and schedule, the same forevery loop but timm's own."""
    config = job.config
    model = build_model(**config["MODEL"])
    optimizer = build_optimizer(model, learning_rate=config["LEARNING_RATE"], weight_decay=config["WEIGHT_DECAY"])
    loss = nn.CrossEntropyLoss(label_smoothing=config["LABEL_SMOOTHING"])
    return model, optimizer, loss, build_lr_scheduler(optimizer, "cosine", job.total_steps, warmup_steps=1)
