"""Command line of common/shards/prepare.py."""

from common.shards.prepare import run

if __name__ == "__main__":
    run()
