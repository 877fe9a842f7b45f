"""The task of ImageNet-1k and of any folder of labelled images.

The name is Colossal-AI's example's; DALI is one of its two loaders.
"""
