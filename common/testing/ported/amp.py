"""What the train.py of Colossal-AI's AMP and data-parallel examples call, on noise."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

from common import colossal as colossalai
from common.colossal import (
    Lamb,
    LinearWarmupLR,
    MultiTimer,
    Trainer,
    get_dataloader,
    get_dist_logger,
    gpc,
)
from common.colossal.hooks import (
    BaseHook,
    LogMetricByEpochHook,
    LossHook,
    LRSchedulerHook,
    ThroughputHook,
)


class MixupLoss(nn.Module):
    def forward(self, outputs, labels, others, share):
        losses = [nn.functional.cross_entropy(outputs, each) for each in (labels, others)]
        return losses[0] * share + losses[1] * (1 - share)


class BatchSizeHook(BaseHook):
    def after_train_iter(self, trainer, output, label, loss):
        assert output is None
        trainer.states["samples"] = (
            trainer.states.get("samples", 0) + trainer.engine.schedule.batch_size
        )


parser = colossalai.get_default_parser()
parser.add_argument("--use_trainer", action="store_true")
args = parser.parse_args()
rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
colossalai.launch(args.config, rank, size, os.environ["MASTER_ADDR"], port, backend=args.backend)
logger = get_dist_logger()

torch.manual_seed(0)
images = TensorDataset(torch.randn(48, 3, 8, 8), torch.arange(48) % 4)
loader = get_dataloader(images, batch_size=gpc.config.BATCH_SIZE)
model = nn.Sequential(nn.Flatten(), nn.Dropout(gpc.config.DROP_RATE), nn.Linear(192, 4))
optimizer = Lamb(model.parameters(), lr=1.8e-2, weight_decay=0.1)
steps = gpc.config.NUM_EPOCHS * len(loader) // gpc.config.gradient_accumulation
lr_scheduler = LinearWarmupLR(optimizer, total_steps=steps, warmup_steps=1)
mixed = [
    (image, {"labels": label, "others": label.roll(1), "share": 0.3}) for image, label in loader
]
engine, loader, _, lr_scheduler = colossalai.initialize(
    model, optimizer, MixupLoss(), mixed, None, lr_scheduler
)
if args.use_trainer:
    hook_list = [
        LossHook(),
        LRSchedulerHook(lr_scheduler, by_epoch=False),
        LogMetricByEpochHook(logger),
    ]
    hook_list += [ThroughputHook(), BatchSizeHook(priority=0)]
    trainer = Trainer(engine=engine, logger=logger, timer=MultiTimer())
    trainer.fit(loader, epochs=gpc.config.NUM_EPOCHS, hooks=hook_list, return_output_label=False)
else:
    for epoch in range(gpc.config.NUM_EPOCHS):
        engine.train()
        for image, label in loader:
            engine.zero_grad()
            loss = engine.criterion(engine(image), **label)
            engine.backward(loss)
            engine.step()
            lr_scheduler.step()
        rate = lr_scheduler.get_last_lr()[0]
        logger.info(
            f"[Epoch {epoch + 1} / Train]: Loss = {loss.item():.5g} | LR = {rate:.5g}", ranks=[0]
        )
