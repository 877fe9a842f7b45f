"""What the train.py files of Colossal-AI's examples call, on noise.

With --use_trainer those of its benchmarks, with every hook there is; else those of its AMP and
data-parallel examples, a loop of one's own over batches with several labels.
"""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

from common import colossal as colossalai
from common.colossal import (
    Accuracy,
    CosineAnnealingWarmupLR,
    Lamb,
    LinearWarmupLR,
    MultiTimer,
    Trainer,
    disable_existing_loggers,
    get_dataloader,
    get_dist_logger,
    gpc,
    hooks,
)


class MixupLoss(nn.Module):
    def forward(self, outputs, labels, others, share):
        losses = [nn.functional.cross_entropy(outputs, each) for each in (labels, others)]
        return losses[0] * share + losses[1] * (1 - share)


class NoOutputHook(hooks.BaseHook):
    def after_train_iter(self, trainer, output, label, loss):
        assert output is None
        assert trainer.engine.schedule.batch_size == batch_size


parser = colossalai.get_default_parser()
parser.add_argument("--from_torch", action="store_true")
parser.add_argument("--use_trainer", action="store_true")
args = parser.parse_args()
if args.from_torch:
    colossalai.launch_from_torch(config=args.config)
else:
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host = os.environ["MASTER_ADDR"]
    colossalai.launch(args.config, rank, size, host, port, backend=args.backend)
disable_existing_loggers()
logger = get_dist_logger()
config = gpc.config

torch.manual_seed(0)
images = TensorDataset(torch.randn(24, 3, 8, 8), torch.arange(24) % 4)
batch_size = config.BATCH_SIZE // gpc.data_parallel_size
train_loader = get_dataloader(dataset=images, shuffle=True, batch_size=batch_size, drop_last=True)
test_loader = get_dataloader(dataset=images, batch_size=batch_size)
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
if args.use_trainer:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.03)
    unit = 1 if config.BY_EPOCH else len(train_loader)
    lr_scheduler = CosineAnnealingWarmupLR(optimizer, config.NUM_EPOCHS * unit, warmup_steps=unit)
else:
    criterion = MixupLoss()
    optimizer = Lamb(model.parameters(), lr=1.8e-2, weight_decay=0.1)
    steps = config.NUM_EPOCHS * len(train_loader) // config.gradient_accumulation
    lr_scheduler = LinearWarmupLR(optimizer, total_steps=steps, warmup_steps=1)
    train_loader = [
        (image, {"labels": label, "others": label.roll(1), "share": 0.3})
        for image, label in train_loader
    ]
engine, train_loader, test_loader, lr_scheduler = colossalai.initialize(
    model, optimizer, criterion, train_loader, test_loader, lr_scheduler
)
if args.use_trainer:
    timer = MultiTimer()
    trainer = Trainer(engine=engine, logger=logger, timer=timer)
    trainer.fit(
        train_dataloader=train_loader,
        epochs=config.NUM_EPOCHS,
        test_dataloader=test_loader,
        test_interval=1,
        hooks=[
            hooks.LogMetricByEpochHook(logger=logger),
            hooks.LogMetricByStepHook(),
            hooks.LogTimingByEpochHook(timer=timer, logger=logger),
            hooks.LogMemoryByEpochHook(logger=logger),
            hooks.TensorboardHook(log_dir=f"{config.LOG_PATH}/tensorboard"),
            hooks.AccuracyHook(accuracy_func=Accuracy()),
            hooks.LossHook(),
            hooks.ThroughputHook(),
            hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=config.BY_EPOCH),
            hooks.SaveCheckpointHook(checkpoint_dir=f"{config.LOG_PATH}/weights.pt"),
        ],
        display_progress=True,
        return_output_label=True,
    )
    trainer.evaluate(
        test_loader, hooks=[hooks.LossHook(), hooks.LogMetricByEpochHook(logger=logger)]
    )
    assert trainer.predict(torch.randn(2, 3, 8, 8)).shape == (2, 4)
    once_more = [NoOutputHook(priority=0)]
    Trainer(engine).fit(train_loader, 1, hooks=once_more, return_output_label=False)
else:
    for epoch in range(config.NUM_EPOCHS):
        engine.train()
        for image, label in train_loader:
            engine.zero_grad()
            loss = engine.criterion(engine(image), **label)
            engine.backward(loss)
            engine.step()
            lr_scheduler.step()
        rate = lr_scheduler.get_last_lr()[0]
        logger.info(
            f"[Epoch {epoch + 1} / Train]: Loss = {loss.item():.5g} | LR = {rate:.5g}", ranks=[0]
        )
