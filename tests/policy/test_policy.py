"""House rules read off the tree: layers, banned calls, heavy imports, bare package names."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.lib.tree import ROOT

LAYERS = {
    "tools": ("cli", "tools"),
    "doors": ("llm", "server", "client", "serve", "vllm_names", "nn"),
    "engine": ("engine",),
    "decisions": ("scheduler", "speculative", "requests/body", "requests/answer", "audit"),
    "running": ("runner",),
    "network": ("models", "layers", "sampling", "grammar", "text"),
    "arithmetic": ("kernels", "comm"),
    "ground": (
        "config", "arguments", "requests", "checkpoint", "control", "cache", "errors", "launch",
        "pages", "kernels/order", "kernels/inputs", "kernels/exact",
    ),
}  # fmt: skip
"""The rooms of the product by layer, from the top down: an import stays in its layer or goes down.

A room is a folder of the package or a file beside them. A part of a room that stands on another
layer is named by itself: a request's record is ground, reading one from a body is a decision, and
what the contract says about kernels is ground too.
"""
LAYER = {room: height for height, rooms in enumerate(reversed(LAYERS.values())) for room in rooms}
MOST_FILES, MOST_ROOMS = 24, 30
PYTHONS = ("__init__.py", "__main__.py", "__pycache__")
ONLY_STDLIB = ("launch",)


@cache
def sources() -> list[Path]:
    """Every Python file of the package, by its place in the tree (not through the links)."""
    tops = ("tpdet", "kernels", "comm", "launch")
    found = [p for top in tops for p in (ROOT / top).rglob("*.py")]
    links = [ROOT / "tpdet" / name for name in ("kernels", "comm", "launch")]
    return sorted(p for p in found if not any(link in p.parents for link in links))


@cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax tree, parsed once for all tests."""
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of a file's syntax tree, walked once for all tests; `ast.walk` is slower."""
    nodes: list[ast.AST] = [tree_of(path)]
    for node in nodes:  # it grows
        for value in vars(node).values():
            if isinstance(value, list):
                nodes += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST):
                nodes.append(value)
    return nodes


def part(path: Path) -> str:
    """The top-level part of the product a file belongs to: `kernels`, `server`, `cli`."""
    return room(path).split("/")[0]


@cache
def room(path: Path) -> str:
    """The room of a file: the longest name in `LAYER` that its place begins with."""
    place = path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("tpdet/")
    names = place.split("/")
    found = ["/".join(names[: end + 1]) for end in range(len(names))]
    return next((name for name in reversed(found) if name in LAYER), names[0])


@cache
def imports(path: Path) -> list[str]:
    """Dotted names a file imports anywhere, in functions and type-checking blocks too."""
    names = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_an_import_goes_down_only():
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("tpdet."): path
        for path in sources()
    }
    packages = {
        name.removesuffix(".__init__"): path
        for name, path in files.items()
        if name.endswith("__init__")
    }
    wrong = []
    for path in sources():
        mine = room(path)
        if mine in ("__init__", "__main__"):
            continue
        assert mine in LAYER, f"{path}: give {mine!r} a layer"
        for name in imports(path):
            if not name.startswith("tpdet."):
                continue
            found = name.removeprefix("tpdet.")
            while found and found not in files and found not in packages:
                found = found.rpartition(".")[0]
            other = room(files.get(found) or packages[found]) if found else ""
            if other and LAYER[other] > LAYER[mine]:
                wrong.append(f"{path.relative_to(ROOT)} ({mine}) imports {name} ({other})")
    assert not wrong, "\n".join(wrong)


SHARED_BY_TOOLS = ("worlds", "measurement", "synthetic", "check", "report")
BETWEEN_TOOLS: dict[tuple[str, str], str] = {}
"""Other imports from tool to tool, with the reason."""


def test_tools_meet_in_what_they_share_only():
    wrong = []
    for path in sources():
        if part(path) == "tools":
            mine = path.relative_to(ROOT / "tpdet" / "tools").parts[0]
            for name in imports(path):
                other = name.removeprefix("tpdet.tools.").split(".")[0]
                if name.startswith("tpdet.tools.") and other not in (mine, *SHARED_BY_TOOLS):
                    wrong += [f"{path}: {name}"] if (mine, other) not in BETWEEN_TOOLS else []
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle():
    """Imports in functions count; those for type checkers alone, and of package names, do not."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("tpdet."): path
        for path in sources()
        if path.stem != "__init__"
    }
    wanted = {name: {*files} & imported_modules(path) for name, path in files.items()}
    while outside := {
        name
        for name, others in wanted.items()
        if not others or not any(name in each for each in wanted.values())
    }:
        wanted = {name: others - outside for name, others in wanted.items() if name not in outside}
    assert not wanted, "\n".join(f"{name} imports {sorted(wanted[name])}" for name in wanted)


def test_the_scheduler_knows_nothing_of_speculative_decoding():
    """It has an interface of its own (`Speculator`), so it is read without proposers and rates."""
    wrong = [
        f"{path}: {name}"
        for path in sources()
        if room(path) in ("scheduler", "cache")
        for name in imports(path)
        if name.startswith("tpdet.speculative")
    ]
    assert not wrong


def imported_modules(path: Path) -> set[str]:
    """The modules that a file imports when it runs, without "tpdet."."""
    names, skipped = [], set()
    for node in nodes_of(path):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped |= {*ast.walk(node)}
        elif isinstance(node, ast.ImportFrom) and node not in skipped:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.removeprefix("tpdet.") for name in names if name}


def test_the_architecture_page_lists_the_same_layers():
    page = (ROOT / "docs" / "architecture.md").read_text()
    shown = "\n".join(f"    {name:<12}{'  '.join(rooms)}" for name, rooms in LAYERS.items())
    assert f"\n{shown}\n" in page, f"docs/architecture.md, Layers:\n{shown}"


def test_every_room_is_there_and_none_is_crowded():
    assert set(LAYER) == {room(path) for path in sources()} - {"__init__", "__main__"}
    assert len([p for p in (ROOT / "tpdet").iterdir() if p.name not in PYTHONS]) <= MOST_ROOMS
    crowded = {}
    for folder in {path.parent for path in [*sources(), *(ROOT / "tests").rglob("*.py")]}:
        inside = [p for p in folder.iterdir() if p.is_file() and p.suffix != ".pyc"]
        if len(inside) > MOST_FILES:
            crowded[str(folder.relative_to(ROOT))] = len(inside)
    assert not crowded


def test_the_other_packages_names_are_never_imported_bare():
    bare = re.compile(r"^ *(?:from|import) (?:kernels|comm|launch)\b", re.MULTILINE)
    wrong = [
        f"{path}: {imported[0]}"
        for path in [*sources(), *sorted((ROOT / "tests").rglob("*.py"))]
        if (imported := bare.findall(path.read_text()))
    ]
    assert not wrong
    assert bare.search("x\n    from comm.world import y") and not bare.search(
        "from tpdet import comm"
    )


BANNED = {
    r"\bpickle\b|\bcloudpickle\b|\bdill\b": "pickle",
    r"torch\.load\(": "torch.load",
    r"(?<![\w.])eval\(|(?<![\w.])exec\(": "eval",
    r"trust_remote_code": "remote code",
    r"all_gather_object|broadcast_object_list|gather_object|send_object": "pickling collectives",
    r"\.all_reduce\(|\.reduce_scatter|dist\.reduce\(|reduce_scatter_tensor": "a library reduction",
    r"\.add_in_any_order\(": "approximate sums",
    r"library_sum\(": "a library's sum",
    r"torch\.topk\(|torch\.multinomial\(|\.multinomial\(": "undefined tie order",
    r"torch\.manual_seed\(|np\.random\.|(?<!\w)random\.(random|seed)\(": "a global generator",
    r"use_deterministic_algorithms": "a global switch",
    r"\bassert_close\b|\ballclose\b": "a tolerance",
}
ALLOWED = {
    "a library reduction": {
        "tpdet/tools/verify/control.py", "tpdet/tools/bench/exchange.py",
        "comm/world/library_sum.py",
    },
    "approximate sums": {"comm/exchange/all_reduce.py"},
    "a library's sum": {"comm/world/group_world.py", "comm/world/library_sum.py"},
    "undefined tie order": {"tpdet/tools/verify/control.py"},
}  # fmt: skip


@pytest.mark.parametrize(("pattern", "why"), sorted(BANNED.items()))
def test_banned_calls_do_not_occur(pattern, why):
    wrong = []
    for path in sources():
        name = str(path.relative_to(ROOT))
        for node_line, text in enumerate(strip_comments(path).splitlines(), 1):
            if re.search(pattern, text) and name not in ALLOWED.get(why, ()):
                wrong.append(f"{name}:{node_line}: {why}")
    assert not wrong, "\n".join(wrong)


@cache
def strip_comments(path: Path) -> str:
    """Source without docstrings and comments, line numbers not kept."""
    described = [
        node.value
        for node in nodes_of(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    texts = [constant.value for constant in described]
    for constant in described:
        constant.value = ""
    stripped = ast.unparse(tree_of(path))
    for constant, text in zip(described, texts, strict=True):
        constant.value = text  # other tests read them
    return stripped


def test_tolerances_stand_only_in_accuracy_tests():
    wrong = [
        path.name
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if not path.name.startswith("test_accuracy_")
        and path.name != "test_policy.py"
        and re.search(r"\ballclose\b|\bassert_close\b", path.read_text())
    ]
    assert not wrong


@pytest.mark.parametrize(
    "module", ["tpdet", "tpdet.scheduler.scheduler", "tpdet.cache.pages", "tpdet.cache.versions",
               "tpdet.requests.request", "tpdet.control.plan", "tpdet.launch.start.supervise",
               "tpdet.cli"],
)  # fmt: skip
def test_what_must_start_fast_imports_no_torch(module):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_launch_uses_the_standard_library_only():
    wrong = []
    for path in sources():
        if part(path) in ONLY_STDLIB:
            for name in imports(path):
                top = name.split(".")[0]
                if (path.name, top) == ("submission.py", "submitit") or name == "tpdet":
                    continue
                if top not in sys.stdlib_module_names and not name.startswith(
                    ("tpdet.launch", "tpdet.errors")
                ):
                    wrong.append(f"{path.name}: {name}")
    assert not wrong


def test_what_one_room_of_the_tests_uses_stands_in_that_room():
    """`tests/lib` holds what two rooms name, the scripts among them, and parts of that."""
    named, rooms = re.compile(r"\btests\.lib(?:\.\w+)+"), defaultdict(set)
    part = re.compile(r"from (tests\.lib[.\w]*) import (\([^)]*\)|.*)")
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        place, text = path.relative_to(ROOT).parts, path.read_text()
        names = {*named.findall(text)}
        names |= {f"{m[1]}.{n}" for m in part.finditer(text) for n in re.findall(r"\w+", m[2])}
        for name in names:
            rooms[name].add(place[1] if place[0] == "tests" else "scripts")
    wrong = []
    for path in (ROOT / "tests" / "lib").rglob("[!_]*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if len(rooms[name]) < 2 and rooms[name] != {"lib"}:
            wrong.append(f"{name}: only {', '.join(rooms[name]) or 'nobody'} names it")
    assert not wrong, "\n".join(wrong)


def test_a_program_stands_behind_all_that_it_uses():
    """What a module defines behind its `__main__` is not there yet when it runs as a program."""
    early = [
        path.relative_to(ROOT).as_posix()
        for path in sources()
        for node in tree_of(path).body[:-1]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    ]
    assert not early


NAMES_PYTHON = {"launch/start/mpirun": 3, "launch/start/slurm": 1}
"""How often a file names this Python to somebody, or looks beside it, and starts nothing."""


def test_one_room_starts_python_for_a_child():
    """`python -m` alone would put the working directory first on the child's path."""
    wrong = []
    for path in sources():
        place, text = path.relative_to(ROOT).with_suffix("").as_posix(), path.read_text()
        if place != "launch/host/interpreter" and text.count("sys.executable") != NAMES_PYTHON.get(
            place, 0
        ):
            wrong.append(f"{place}: use python_command of tpdet.launch.host.interpreter")
        if {"multiprocessing", "concurrent.futures.ProcessPoolExecutor"} & {*imports(path)}:
            wrong.append(f"{place}: starts Python by itself")
    for path in sorted((ROOT / "scripts").glob("*.py")):
        if re.search(r'sys\.executable, (?!"-P")', path.read_text()):
            wrong.append(f"{path.name}: sys.executable without -P")
    for path in sorted((ROOT / "launch" / "start" / "templates").iterdir()):
        if re.search(r'(python3|"\$python"|"\$1") -m', path.read_text()):
            wrong.append(f"{path.name}: Python without -P")
    assert not wrong, "\n".join(wrong)


def test_kernels_import_torch_and_triton_only():
    allowed = ("torch", "triton", "numpy")
    wrong = []
    for path in sources():
        if part(path) == "kernels":
            for name in imports(path):
                top = name.split(".")[0]
                if top in sys.stdlib_module_names or top in allowed:
                    continue
                if not name.startswith(("tpdet.kernels", "tpdet.launch.host.interpreter")):
                    wrong.append(f"{path.name}: {name}")
    assert not wrong


def test_the_gpu_takes_nothing_from_the_cpu():
    """Both follow the contract, and what they share is in `kernels/exact`."""
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        if room(path).startswith("kernels/cuda")
        for name in imports(path)
        if name.startswith("tpdet.kernels.cpu")
    ]
    assert not wrong


def test_a_gpu_is_named_in_the_hardware_table_alone():
    """Comments and docstrings say where something was measured; code asks the GPU in use."""
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources()
        if path != ROOT / "kernels" / "cuda" / "hardware.py"
        and re.search(r"\bH[12]00\b", strip_comments(path))
    ]
    assert not wrong, f"{wrong}: take the limit of the GPU that hardware.gpu_of names"


def test_every_module_and_public_function_says_what_it_does():
    wrong = []
    for path in sources():
        tree = tree_of(path)
        if not ast.get_docstring(tree):
            wrong.append(str(path.relative_to(ROOT)))
    assert not wrong


MOST_LINES, MOST_METHODS = 60, 15


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton or Gluon compiles a function."""
    return any("jit" in ast.unparse(mark) for mark in node.decorator_list)


def test_functions_and_classes_are_short():
    """Kernels excepted: what runs as one program on a GPU stands in one piece, up to a limit."""
    found = set()
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if not is_kernel(node) and node.end_lineno - node.lineno >= MOST_LINES:
                    found.add(f"{path.relative_to(ROOT)}: {node.name}")
            elif isinstance(node, ast.ClassDef):
                methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
                if sum(not name.startswith("_") for name in methods) > MOST_METHODS:
                    found.add(f"{path.relative_to(ROOT)}: {node.name}")
    assert not found


MOST_KERNEL_LINES, MOST_KERNEL_PARAMETERS = 120, 16


def kernels_beyond_limits(nodes: Iterable[ast.AST]) -> set[str]:
    """Names of the functions in Triton's and Gluon's languages that are too long or take too much.

    What belongs together is one parameter: a named tuple.
    """
    beyond = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and is_kernel(node):
            taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            lines = node.end_lineno - node.lineno + 1
            if lines > MOST_KERNEL_LINES or len(taken) > MOST_KERNEL_PARAMETERS:
                beyond.add(node.name)
    return beyond


def test_kernels_take_few_parameters_and_lines():
    """The product's and the tests' functions are bounded alike."""
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*sources(), *(ROOT / "tests").rglob("*.py")]
        if "jit" in path.read_text()
        for name in kernels_beyond_limits(nodes_of(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_kernel_at_the_limits_passes_and_one_beyond_does_not():
    def kernel(parameters: int, lines: int, mark: str = "@triton.jit(do_not_specialize=['a0'])"):
        taken = ", ".join(f"a{i}" for i in range(parameters))
        return ast.walk(ast.parse(f"{mark}\ndef k({taken}):\n" + "    pass\n" * (lines - 1)))

    assert not kernels_beyond_limits(kernel(16, 120))
    assert not kernels_beyond_limits(kernel(17, 121, "@cache"))
    for beyond in kernel(17, 120), kernel(16, 121), kernel(17, 2, "@gluon.jit"):
        assert kernels_beyond_limits(beyond) == {"k"}


SCALED_AT_ONCE = {"score"}
"""What a product without a sum may be called where it stands: nothing is added to it as it is."""


def open_chains(tree):
    """Lines of products that begin at nothing and do not end either (`gemm/ended.py`)."""
    fine = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ended":
            fine |= set(map(id, node.args))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in SCALED_AT_ONCE:
            fine.add(id(node.value))
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "tl.dot"
        and len(node.args) < 3
        and id(node) not in fine
    ]


def test_no_chain_goes_on_from_what_it_is_added_to():
    """Triton makes x + dot(a, b) into one chain that begins with x, which has other bits."""
    found = [f"{path.name}:{line}" for path in sources() for line in open_chains(tree_of(path))]
    assert not found
    assert open_chains(ast.parse("y = x + tl.dot(a, b)"))
    assert open_chains(ast.parse("y = tl.dot(a, tl.trans(b), input_precision='ieee')"))
    assert not open_chains(ast.parse("y = x + ended(tl.dot(a, b)); z = tl.dot(a, b, z)"))


def test_only_tables_of_data_are_formatted_by_hand():
    wrong = []
    for path in [*sources(), *sorted((ROOT / "tests").rglob("*.py"))]:
        text = path.read_text()
        marked = [n for n, line in enumerate(text.splitlines(), 1) if line.endswith(BY_HAND)]
        if marked:
            tables = {node.end_lineno for node in nodes_of(path) if is_table(node)}
            wrong += [f"{path.relative_to(ROOT)}:{line}" for line in marked if line not in tables]
    assert not wrong, "\n".join(wrong)


BY_HAND = "# fmt: " + "skip"


def is_table(node: ast.AST) -> bool:
    """Whether a statement or decorator ends with a literal list, tuple, set or dictionary."""
    match node:
        case ast.Assign(value=value) | ast.AnnAssign(value=value) | ast.AugAssign(value=value):
            pass
        case ast.Call(func=ast.Attribute(attr="parametrize"), args=[_, value, *_]):
            pass
        case _:
            return False
    if isinstance(value, ast.Call) and value.args:  # frozenset({...})
        value = value.args[0]
    return isinstance(value, ast.Tuple | ast.List | ast.Set | ast.Dict)
