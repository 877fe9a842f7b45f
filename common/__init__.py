"""What the tasks share: config, launch, batch arithmetic, model, optimizer, schedule, hooks, checkpoint."""

from common.errors import end_quietly_on_ctrl_c
from common.hardware import choose_waiting

end_quietly_on_ctrl_c()
choose_waiting()  # before any module of ours imports torch
