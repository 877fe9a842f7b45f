"""Samplers, crops, augmentation and loaders that the tasks share."""
