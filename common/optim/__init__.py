"""LAMB, the other optimizers, and the learning-rate schedules."""
