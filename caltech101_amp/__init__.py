"""Mixed precision on Caltech-101: a Vision Transformer in every mode, and what each costs."""
