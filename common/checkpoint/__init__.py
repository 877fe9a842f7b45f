"""Save, resume, load a saved run, start from pretrained weights."""
