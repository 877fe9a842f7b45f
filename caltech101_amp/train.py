"""Train a Vision Transformer on Caltech-101 in any mode of mixed precision.

python train.py --config config_AMP_torch --set DATA.root=/path/to/caltech101 \
    --set DATA.download=True
DATA=/path/to/caltech101 torchrun --nproc_per_node 4 train.py --config config/config_AMP_naive.py
"""

from caltech101_amp.task import TASK, build_eval_loader, build_train_loader
from common.colossal import Trainer, gpc, initialize, shard_model
from common.data.batch_augment import BatchAugment
from common.data.mixup import MixupLoss
from common.errors import run_command
from common.model.build import build_model, freeze
from common.optim.build import build_optimizer
from common.optim.schedules import build_lr_scheduler
from common.process import ends_cleanly
from common.run.start import start_run


@ends_cleanly
def main(argv: list[str]) -> None:
    run = start_run(argv, __doc__, TASK)
    if run is None:  # --dry-run, or finished already
        return
    config, plan = gpc.config, run.plan

    model = build_model(**config.MODEL)
    run.load_init(model)  # before sharding: INIT's files hold full tensors
    freeze(model, config.FREEZE)
    model = shard_model(model)  # replaces parameters, so before the optimizer is built
    optimizer = build_optimizer(
        model,
        learning_rate=config.LEARNING_RATE,
        weight_decay=config.WEIGHT_DECAY,
        **config.OPTIMIZER,
    )
    steps = plan.total_steps, plan.warmup_steps, plan.cooldown_steps
    lr_scheduler = build_lr_scheduler(
        optimizer, config.LR_SCHEDULE, *steps, config.MIN_LR, config.WARMUP_LR, plan.decay_steps
    )
    loaders = dict(image_size=config.MODEL.image_size, device=run.device, **run.data_parallel)
    train_loader = build_train_loader(
        config.DATA,
        plan.total_batch,
        plan.micro_batch,
        resolutions=plan.resolutions,
        seed=config.SEED,
        graphs=config.GRAPHS,
        **loaders,
    )
    train_loader.augment = BatchAugment(**run.augmentation)  # on the device, after any loader
    eval_loader = build_eval_loader(config.DATA, plan.micro_batch, **loaders)

    criterion = MixupLoss(
        config.LABEL_SMOOTHING, config.BCE_THRESHOLD, config.BCE_SUM, run.class_weights
    )
    engine, train_loader, eval_loader, lr_scheduler = initialize(
        model, optimizer, criterion, train_loader, eval_loader, lr_scheduler
    )
    hooks = run.build_hooks(model, optimizer)  # writes the run's folder: all checks have passed
    Trainer(engine).fit(
        train_loader, plan.epochs, plan.last_step, eval_loader, config.EVAL_EVERY, hooks
    )
    run.finish()


if __name__ == "__main__":
    run_command(main)
