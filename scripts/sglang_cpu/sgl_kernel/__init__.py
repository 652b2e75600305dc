"""A stand-in for SGLang's compiled kernels on a machine without them: every name imports, and raises when it is called."""

import importlib.abc
import importlib.machinery
import sys
import types


class _MissingKernel:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingKernel(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name}: this environment has no compiled kernels; use SGLang's torch backends")


class _Submodule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingKernel(f"{self.__name__}.{name}")


class _AnySubmodule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec):
        return _Submodule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_AnySubmodule())
__version__ = "0.0.0"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _MissingKernel(f"sgl_kernel.{name}")
