"""Mixed precision on Caltech-101: memory and speed of a Vision Transformer in every mode."""
