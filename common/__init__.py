"""What the tasks share: config, launch, batch arithmetic, model, optimizer, schedule, hooks, checkpoint."""

from common.hardware import shorten_spinning

shorten_spinning()  # before any module of ours imports torch
