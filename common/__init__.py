"""What the tasks share: config, launch, data, model, optimizer, checkpoint, tools."""
