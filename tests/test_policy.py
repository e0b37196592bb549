"""House rules read off the tree: layers, banned calls, heavy imports, bare package names."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    "errors": 0, "kernels": 0, "launch": 0, "suggestions": 0, "vllm_arguments": 0,
    "parameter_checks": 0,
    "comm": 1, "config": 1, "vllm_parameters": 1, "sampling_params": 1, "request": 1, "plan": 1,
    "sampling_row": 1, "command_line": 1,
    "tokenizer": 1, "detokenizer": 1, "stop_strings": 1, "chat_template": 1,
    "model_config": 1, "make_model": 1, "json_file": 1, "train_tokenizer": 1,
    "token_bytes": 1, "token_guard": 1, "model_shapes": 1, "canonical_json": 1, "seal": 1,
    "text_bound": 1, "chat_messages": 1, "tokenizer_file": 1,
    "tokenizer_config": 1, "template_language": 1, "template_meter": 1,
    "counted_template": 1,
    "layers": 2, "cache": 2, "weights": 2, "sampler": 2, "receipt": 2, "replay": 2,
    "grammar": 2,
    "models": 3, "scheduler": 3,
    "runner": 4,
    "engine": 5,
    "outputs": 5,
    "llm": 6, "server": 6, "serve": 6,
    "client": 7, "generate": 7,
    "verify": 7, "bench": 7, "tune": 7, "planner": 7,
    "cli": 8,
}  # fmt: skip
ONLY_STDLIB = ("launch",)


def sources() -> list[Path]:
    """Every Python file of the package, by its place in the tree (not through the links)."""
    tops = ("tpdet", "kernels", "comm", "launch")
    found = [p for top in tops for p in (ROOT / top).rglob("*.py")]
    links = [ROOT / "tpdet" / name for name in ("kernels", "comm", "launch")]
    return sorted(p for p in found if not any(link in p.parents for link in links))


def part(path: Path) -> str:
    """Which part of the architecture a file belongs to."""
    relative = path.relative_to(ROOT).with_suffix("").parts
    return relative[1] if relative[0] == "tpdet" else relative[0]


def imports(path: Path) -> list[str]:
    """Dotted names a file imports anywhere, in functions and type-checking blocks too."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_an_import_goes_down_only():
    wrong = []
    for path in sources():
        mine = part(path)
        if mine in ("__init__", "__main__"):
            continue
        assert mine in FLOORS, f"{path}: give {mine!r} a floor"
        for name in imports(path):
            pieces = name.split(".")
            if pieces[0] != "tpdet" or len(pieces) < 2 or pieces[1] not in FLOORS:
                continue
            other = pieces[1]
            up = FLOORS[other] >= FLOORS[mine]
            if other != mine and up and not same_floor_allowed(mine, other):
                wrong.append(f"{path.relative_to(ROOT)} (floor {FLOORS[mine]}) imports {name}")
    assert not wrong, "\n".join(wrong)


def same_floor_allowed(mine: str, other: str) -> bool:
    """Neighbours on one floor may use each other, in one direction each; errors serve everyone."""
    return FLOORS[mine] == FLOORS[other] and (other == "errors" or (mine, other) in NEIGHBOURS)


NEIGHBOURS = {
    ("sampling_params", "vllm_parameters"), ("request", "sampling_params"), ("plan", "request"),
    ("sampling_row", "request"), ("detokenizer", "tokenizer"),
    ("tokenizer", "chat_template"), ("chat_template", "chat_messages"), ("bench", "verify"),
    ("tune", "verify"), ("tune", "bench"),
    ("bench", "client"), ("planner", "bench"), ("planner", "verify"),
    ("make_model", "model_config"),
    ("layers", "cache"), ("layers", "weights"), ("serve", "server"), ("make_model", "tokenizer"),
    ("cache", "plan"), ("sampler", "request"), ("receipt", "weights"),
    ("model_config", "json_file"), ("tokenizer", "json_file"), ("tokenizer", "token_bytes"),
    ("text_bound", "token_bytes"), ("tokenizer", "text_bound"),
    ("tokenizer", "tokenizer_config"), ("tokenizer_config", "token_guard"),
    ("chat_template", "template_language"), ("chat_template", "template_meter"),
    ("template_meter", "template_language"), ("counted_template", "template_language"),
    ("counted_template", "template_meter"), ("chat_template", "counted_template"),
    ("tokenizer", "token_guard"), ("tokenizer", "tokenizer_file"), ("token_guard", "chat_template"),
    ("detokenizer", "token_bytes"), ("make_model", "train_tokenizer"),
    ("model_shapes", "model_config"),
}  # fmt: skip


def test_the_other_packages_names_are_never_imported_bare():
    wrong = [
        f"{path}: {name}"
        for path in [*sources(), *sorted((ROOT / "tests").rglob("*.py"))]
        for name in imports(path)
        if name.split(".")[0] in ("kernels", "comm", "launch")
    ]
    assert not wrong


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
        "tpdet/verify/control.py", "tpdet/bench/exchange_rank.py", "comm/world/library_sum.py",
    },
    "approximate sums": {"comm/exchange/all_reduce.py"},
    "a library's sum": {"comm/world/group_world.py", "comm/world/library_sum.py"},
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


def strip_comments(path: Path) -> str:
    """Source without docstrings and comments, line numbers not kept."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return ast.unparse(tree)


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
               "tpdet.request", "tpdet.plan", "tpdet.launch.life.supervise", "tpdet.cli"],
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
                if (path.name, top) == ("submission.py", "submitit"):
                    continue
                if top not in sys.stdlib_module_names and not name.startswith(
                    ("tpdet.launch", "tpdet.errors")
                ):
                    wrong.append(f"{path.name}: {name}")
    assert not wrong


def test_kernels_import_torch_and_triton_only():
    allowed = ("torch", "triton", "numpy")
    wrong = []
    for path in sources():
        if part(path) == "kernels":
            for name in imports(path):
                top = name.split(".")[0]
                if top in sys.stdlib_module_names or top in allowed:
                    continue
                if not name.startswith("tpdet.kernels"):
                    wrong.append(f"{path.name}: {name}")
    assert not wrong


def test_every_module_and_public_function_says_what_it_does():
    wrong = []
    for path in sources():
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            wrong.append(str(path.relative_to(ROOT)))
    assert not wrong


def test_files_hold_one_noun():
    long = [f"{p.relative_to(ROOT)}" for p in sources() if len(p.read_text().splitlines()) > 300]
    assert not long
