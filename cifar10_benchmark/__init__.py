import common  # noqa: F401  before torch: Ctrl-C during its import then ends train.py quietly
