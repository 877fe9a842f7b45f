"""Import Colossal-AI 0.5.0 without its log noise and its heavy unused dependencies."""

import io
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import library

from common.errors import UserError

VERSION = "0.5.0"
STUBBED = (
    *("peft", "peft.utils", "peft.utils.other", "peft.utils.save_and_load"),
    *("galore_torch", "bitsandbytes", "bitsandbytes.optim", "bitsandbytes.optim.optimizer"),
)


def check_version() -> None:
    """Raise `UserError` unless the installed Colossal-AI is the version that the repairs are written for."""
    try:
        found = version("colossalai")
    except PackageNotFoundError:
        found = "missing"
    if found != VERSION:
        raise UserError(
            f"colossalai is {found}, this project needs {VERSION}: pip install --no-deps colossalai=={VERSION}"
        )


@contextmanager
def quiet_import() -> Iterator[None]:
    """Context for importing Colossal-AI; undoes the import's side effects on exit.

    - `peft` (interface/model.py:6), `galore_torch` (nn/optimizer/__init__.py:1) and `bitsandbytes`
      (nn/optimizer/galore.py:7) are replaced by stubs unless they are installed.
    - `torch.compile` is the identity: decorating unused functions (quantization/fp8.py) loads the whole compiler, two
      thirds of the import time.
    - fp8.py:16 does not query the GPU: that would initialize CUDA before the device is set, and prevent forking.
    - PyTorch's meta kernels are not replaced by those of release 1.12 (_analyzer/_subclasses/_meta_registration.py:38),
      with which `torch.compile` fails on a convolution.
    - About 60 warnings, log lines and prints are dropped.
    - The environment is restored (initialize.py:10 sets `CUDA_DEVICE_MAX_CONNECTIONS`).
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        stack.callback(logging.disable, logging.root.manager.disable)
        stack.enter_context(_import_stubs())
        stack.enter_context(mock.patch.object(torch, "compile", return_value=lambda function: function))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", side_effect=RuntimeError))
        stack.enter_context(mock.patch.object(library.Library, "impl", _skip_upstream(library.Library.impl)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(io.StringIO()))
        logging.disable(logging.WARNING)
        yield


def _skip_upstream(impl: Callable[..., None]) -> Callable[..., None]:
    """Return a ``Library.impl`` that ignores the kernels of `colossalai._analyzer`."""

    def register(registry: library.Library, name: Any, function: Any, *args: Any, **options: Any) -> None:
        if not getattr(function, "__module__", "").startswith("colossalai._analyzer"):
            impl(registry, name, function, *args, **options)

    return register


class _Stub(types.ModuleType):
    """A module that has a class for every attribute."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def _import_stubs() -> Iterator[None]:
    """Stub the modules in `STUBBED` whose packages are not installed; remove the stubs on exit."""
    stubs = {name: _Stub(name) for name in STUBBED if find_spec(name.partition(".")[0]) is None}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]
