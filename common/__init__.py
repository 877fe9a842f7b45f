"""What the tasks share: config, launch, batch arithmetic, model, optimiser, schedule, hooks, checkpoint."""
