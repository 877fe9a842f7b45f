"""What a user runs after training: evaluate, predict, export, report."""
