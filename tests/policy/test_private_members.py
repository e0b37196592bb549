"""Tests look at behaviour: which of them still use a private member, and how often."""

import ast
from pathlib import Path

import pytest

from tests.lib.tree import ROOT

ALLOWED = {
    "accuracy/test_accuracy_lm_eval.py": 2,
    "tools/bench/test_bench_kernels.py": 1,
    "cache/test_pages.py": 4,
    "cache/test_prefix_index.py": 4,
    "cache/test_versions.py": 1,
    "client/test_cli.py": 7,
    "client/test_client.py": 1,
    "comm/test_cuda_aware.py": 5,
    "engine/test_engine_refusals.py": 1,
    "engine/test_slowdown.py": 1,
    "gpu/engine/approximate.py": 1,
    "gpu/lib/checks.py": 2,
    "gpu/engine/dependent.py": 3,
    "gpu/exchange/mpi_cuda.py": 7,
    "gpu/exchange/peer.py": 1,
    "gpu/exchange/columns.py": 1,
    "gpu/exchange/peer_times.py": 4,
    "gpu/sampling/shares.py": 3,
    "kernels/compiled/test_attention.py": 2,
    "kernels/compiled/test_foreseen_sampling.py": 5,
    "kernels/compiled/test_recording.py": 3,
    "kernels/compiled/test_sampling_table.py": 5,
    "kernels/cpu/test_order.py": 2,
    "lib/kernels/emulated_warps.py": 1,
    "kernels/interpreted/test_launches.py": 6,
    "kernels/interpreted/test_peer.py": 6,
    "kernels/interpreted/test_peer_columns.py": 9,
    "kernels/interpreted/test_peer_rows.py": 7,
    "lib/kernels/driverless.py": 2,
    "lib/kernels/symbolic_launches.py": 1,
    "lib/comm/mpi_rank.py": 1,
    "lib/scheduler/simulation.py": 1,
    "lib/thread_world.py": 5,
    "llm/test_async_llm.py": 3,
    "policy/test_gpu_suites.py": 5,
    "runner/test_compile_ahead.py": 5,
    "runner/test_reload.py": 3,
    "runner/test_start_checks.py": 1,
    "runner/test_step_graphs.py": 4,
    "sampling/test_sampler.py": 1,
    "scheduler/test_event_simulation.py": 3,
    "scheduler/test_prefix_simulation.py": 2,
    "scheduler/test_scheduler_machine.py": 2,
    "scheduler/test_scheduler_refusals.py": 1,
    "server/body/test_body_worker.py": 2,
    "server/leader/test_reload.py": 3,
    "server/settings/test_settings.py": 1,
    "text/test_text_bound.py": 1,
    "tools/tune/test_tune.py": 8,
    "tools/verify/test_verify_launchers.py": 1,
}
"""Uses of private members in each file, ours and other libraries'. A number may only shrink.

What has no public face stays: damage that a check must find, bugs put in on purpose, doubles in
place of a GPU or of a transport.
"""
PATCHES = ("setattr", "getattr", "delattr")
PUBLIC = {"_exit", "_replace", "_asdict", "_fields", "_make"}
"""Documented members of `os` and of named tuples."""


def is_private(name: str) -> bool:
    """Whether the last part of a dotted name begins with one underscore and is not documented."""
    last = name.split(".")[-1]
    return last.isidentifier() and last[0] == "_" and last[:2] != "__" and last not in PUBLIC


def private_uses(tree: ast.AST) -> list[str]:
    """`x._y` of anything but `self`, an import of `_y`, and a patch of the attribute named "_y"."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
            case ast.ImportFrom(names=names):
                found += [f"line {node.lineno}: {n.name}" for n in names if is_private(n.name)]
            case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called), args=given):
                texts = [each.value for each in given if isinstance(each, ast.Constant)]
                names = [text for text in texts if isinstance(text, str) and is_private(text)]
                found += [f"line {node.lineno}: {name}" for name in names if called in PATCHES]
    return found


def uses_of(path: Path) -> list[str]:
    return private_uses(ast.parse(path.read_text()))


def test_private_members_are_used_no_more_than_they_were():
    found = {
        path.relative_to(ROOT / "tests").as_posix(): uses_of(path)
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }
    more = [
        f"{name}: {len(uses)} uses of private members, {ALLOWED.get(name, 0)} are allowed: {uses}"
        for name, uses in found.items()
        if len(uses) > ALLOWED.get(name, 0)
    ]
    assert not more, "look at what is public instead:\n" + "\n".join(more)
    assert not ALLOWED.keys() - found.keys(), "these files are gone: take them off the list"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("engine._pending.x._y", 2),
        ("self._mine = cls._ours = x.__dict__", 0),
        ("from a import _b, c", 1),
        ("patch.setattr(a, '_b', 1); patch.setattr('x.y._z', 2); patch.setattr(a, 'b', '_c d')", 2),
        ("os._exit(1); x.named('_y')", 0),
    ],
)
def test_a_use_is_counted(code, count):
    assert len(private_uses(ast.parse(code))) == count
