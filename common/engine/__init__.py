"""Colossal-AI 0.5.0, repaired: groups, collectives, the engine and its trainer, ZeRO and tensor
parallelism.

Nothing else imports `colossalai`. A repair is one function or subclass, whose docstring names the
upstream file and line.
"""

# ruff: noqa: E402
from common.hardware import prepare_torch

prepare_torch()

# Imported first, since `colossalai` itself imports packages that are not installed.
import common.engine.upstream
import common.engine.upstream_layers
