"""What the tasks share: config, launch, batch arithmetic, model, optimizer, schedule, hooks,
checkpoint.
"""
