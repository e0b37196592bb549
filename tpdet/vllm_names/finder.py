"""Makes vLLM's module names importable below `tpdet`, from the table of names alone."""

import sys
from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tpdet.arguments.suggestions import did_you_mean

_PREFIX = "tpdet."


class VllmNames(NamedTuple):
    """Where vLLM's public names are here, and what replaces those that are not.

    places: a name's place, "module:attribute"; replaced: what to use instead of a name; modules:
    those of vLLM's (without "vllm.") that hold some names; no_modules: what to use instead of one.
    """

    places: dict[str, str]
    replaced: dict[str, str]
    modules: dict[str, list[str]]
    no_modules: dict[str, str]


@cache
def vllm_names() -> VllmNames:
    """The table, which is read when the first name is looked up."""
    import json  # not before the command has left the working directory, which may have another

    return VllmNames(**json.loads(Path(__file__).with_name("names.json").read_text("utf-8")))


def find_name(module: str, names: Sequence[str], name: str) -> Any:
    """The object that `module` has under one of its `names`.

    Raises ImportError with what replaces a name of vLLM's that is not here, so that an import of it
    says so too; AttributeError for any other name.
    """
    places, replaced, _, _ = vllm_names()
    if name in names and name in places:
        place, _, attribute = places[name].partition(":")
        return getattr(import_module(place), attribute)
    if name in replaced:
        raise ImportError(f"{module} has no {name}: {replaced[name]}", name=module)
    hint = "" if name.startswith("_") else did_you_mean(name, [n for n in names if n in places])
    raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")


class VllmModules(MetaPathFinder, Loader):
    """Finds the modules of the table, after all that are files."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec; None where nobody knows it. Raises ModuleNotFoundError with a hint."""
        name = fullname.removeprefix(_PREFIX)
        if name == fullname:
            return None
        _, _, modules, no_modules = vllm_names()
        package = any(other.startswith(f"{name}.") for other in modules)
        if name in modules or package:
            return ModuleSpec(fullname, self, is_package=package)
        for missing, reason in no_modules.items():
            if f"{name}.".startswith(f"{missing}."):
                raise ModuleNotFoundError(f"there is no {fullname}: {reason}", name=fullname)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names, each looked up when it is asked for."""
        names = vllm_names().modules.get(module.__name__.removeprefix(_PREFIX), ())
        here = [name for name in names if name in vllm_names().places]
        look_up = partial(find_name, module.__name__, names)
        more = {"__getattr__": look_up, "__dir__": lambda: here, "__all__": here}
        vars(module).update(more, __doc__="Names of vLLM's module, which are tpdet's.")


def install() -> None:
    """Let `import` find the modules."""
    if not any(type(finder).__name__ == VllmModules.__name__ for finder in sys.meta_path):
        sys.meta_path.append(VllmModules())
