"""Shapes, rows and data of the GEMM checks, and how a list of variants is compared."""

from functools import partial

from tests.gpu.lib.checks import Differences, gives

ROWS = (1, 3, 16, 17, 33, 64, 100, 128, 300, 512, 1024, 4096)
KINDS = ("normal", "heavy", "cancelling", "tiny")
COLUMN_SHAPES = {"qkv": (6144, 4096), "gate_up": (24576, 4096), "lm_head": (151936, 4096)}
ROW_SHAPES = {"o": (4096, 4096), "down": (4096, 12288)}
LEAVES = 8


def each(variants, run, wanted, what):
    """Every variant gives `wanted`; all that differ are named at once."""
    found = Differences()
    for variant in variants:
        found.keep(gives, partial(run, variant), wanted, f"{what}, {variant}")
    found.finish()


def relative_error(y, exact):
    """Of y against fp64 `exact`."""
    return ((y.double() - exact).norm() / exact.norm()).item()
