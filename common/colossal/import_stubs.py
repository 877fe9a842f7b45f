"""Import Colossal-AI 0.5.0 quickly and quietly, without the packages that it imports and this project never uses."""

import importlib.machinery
import io
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib.abc import Loader, MetaPathFinder
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from common.errors import UserError

VERSION = "0.5.0"
STUBBED = ("peft", "galore_torch", "bitsandbytes")


def check_version() -> None:
    """Raise `UserError` unless the installed Colossal-AI is the one whose faults the repairs were written for."""
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
    """Mend what importing Colossal-AI does to a process; warnings, logging and environment are afterwards as before.

    - `peft` (interface/model.py:6), `galore_torch` (nn/optimizer/__init__.py:1) and `bitsandbytes`
      (nn/optimizer/galore.py:7) are stood in for where they are not installed.
    - `torch.compile` is the identity: quantization/fp8.py decorates functions that nobody calls here, and the first
      decoration loads the whole compiler, two thirds of the import time.
    - The GPU is not asked for its capability (fp8.py:16): that would start CUDA in every process, before it is bound
      to its own device, and forbid forking.
    - About 60 deprecation and advice warnings, log lines and prints are dropped.
    - `CUDA_DEVICE_MAX_CONNECTIONS` (initialize.py:10) stays what the user made it.
    """
    with ExitStack() as stack:
        stack.callback(_restore_environment, dict(os.environ))
        stack.callback(logging.disable, logging.root.manager.disable)
        stack.enter_context(_import_stubs())
        stack.enter_context(replaced(torch, "compile", lambda *args, **options: lambda function: function))
        stack.enter_context(replaced(torch.cuda, "get_device_capability", _no_capability))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(io.StringIO()))
        logging.disable(logging.WARNING)
        yield


def _restore_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name`` to ``value`` inside the context."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _no_capability() -> tuple[int, int]:
    raise RuntimeError("the GPU is not touched while importing")


class _Stub(types.ModuleType):
    """A module that has a class of every name."""

    __path__: Any = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StubFinder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextmanager
def _import_stubs() -> Iterator[None]:
    """Answer imports of `STUBBED` that nothing else answers; forget them afterwards, so that nobody else is fooled."""
    finder = _StubFinder()
    sys.meta_path.append(finder)  # last, so that an installed package comes first
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Stub)]:
            del sys.modules[name]
