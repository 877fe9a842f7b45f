"""``python -m imagenet_dali.prepare``, an earlier name of ``python scripts/prepare.py``."""

from common.shards.prepare import run

if __name__ == "__main__":
    run()
