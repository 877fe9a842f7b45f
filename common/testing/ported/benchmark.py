"""What the train.py of Colossal-AI's benchmarks call, on noise, with every hook there is."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from common import colossal as colossalai
from common.colossal import (
    Accuracy,
    CosineAnnealingWarmupLR,
    MultiTimer,
    Trainer,
    disable_existing_loggers,
    get_dataloader,
    get_dist_logger,
    gpc,
    hooks,
)

parser = colossalai.get_default_parser()
parser.add_argument("--from_torch", action="store_true")
args = parser.parse_args()
colossalai.launch_from_torch(config=args.config)
disable_existing_loggers()
logger = get_dist_logger()

torch.manual_seed(0)
images = TensorDataset(torch.randn(24, 3, 8, 8), torch.arange(24) % 4)
batch_size = gpc.config.BATCH_SIZE // gpc.data_parallel_size
train_dataloader = get_dataloader(
    dataset=images, shuffle=True, batch_size=batch_size, drop_last=True
)
test_dataloader = get_dataloader(dataset=images, batch_size=batch_size)
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
optimizer = torch.optim.AdamW(
    model.parameters(), lr=gpc.config.LEARNING_RATE, weight_decay=gpc.config.WEIGHT_DECAY
)
unit = 1 if gpc.config.BY_EPOCH else len(train_dataloader)
steps = dict(total_steps=gpc.config.NUM_EPOCHS * unit, warmup_steps=gpc.config.WARMUP_EPOCHS * unit)
lr_scheduler = CosineAnnealingWarmupLR(optimizer, **steps)
engine, train_dataloader, test_dataloader, lr_scheduler = colossalai.initialize(
    model,
    optimizer,
    nn.CrossEntropyLoss(label_smoothing=0.1),
    train_dataloader,
    test_dataloader,
    lr_scheduler,
)
timer = MultiTimer()
trainer = Trainer(engine=engine, logger=logger, timer=timer)
trainer.fit(
    train_dataloader=train_dataloader,
    epochs=gpc.config.NUM_EPOCHS,
    test_dataloader=test_dataloader,
    test_interval=1,
    hooks=[
        hooks.LogMetricByEpochHook(logger=logger),
        hooks.LogMetricByStepHook(),
        hooks.LogTimingByEpochHook(timer=timer, logger=logger),
        hooks.LogMemoryByEpochHook(logger=logger),
        hooks.TensorboardHook(log_dir=f"{gpc.config.LOG_PATH}/tensorboard"),
        hooks.AccuracyHook(accuracy_func=Accuracy()),
        hooks.LossHook(),
        hooks.ThroughputHook(),
        hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=gpc.config.BY_EPOCH),
        hooks.SaveCheckpointHook(checkpoint_dir=f"{gpc.config.LOG_PATH}/weights.pt"),
    ],
    display_progress=True,
    return_output_label=True,
)
trainer.evaluate(
    test_dataloader, hooks=[hooks.LossHook(), hooks.LogMetricByEpochHook(logger=logger)]
)
assert trainer.predict(torch.randn(2, 3, 8, 8)).shape == (2, 4)
