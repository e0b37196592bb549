"""Packages that take seconds and that few tests need: every process of pytest imports all tests."""

from importlib import import_module


class Later:
    """A package that is imported when the first of its names is asked for."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str):
        return getattr(import_module(self._package), name)


anthropic = Later("anthropic")
