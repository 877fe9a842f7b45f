"""The pieces of scripts/gpu_campaign.py; some are benchmarks of scripts/bench, which import each other by name."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))
