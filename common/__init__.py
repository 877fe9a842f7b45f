"""What the tasks share: config, launch, batch arithmetic, model, optimizer, schedule, hooks, checkpoint."""

from common.hardware import choose_waiting

choose_waiting()  # before any module of ours imports torch
