"""The task of ImageNet-1k and of any folder of labelled images.

The name is Colossal-AI's example's; DALI is one of its two loaders.
"""

from pathlib import Path

# Earlier versions had the modules of common/shards here: scripts that import them so go on.
__path__.append(str(Path(__file__).parents[1] / "common/shards"))
