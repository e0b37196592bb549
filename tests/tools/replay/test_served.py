"""Receipts of a real server at TP 2, of all kinds of answers, are equal at another size."""

from argparse import Namespace

import pytest

from scripts.replayed_receipts import KINDS, proved
from tests.tools.recorded_lines import thinking_model


@pytest.mark.slow
def test_receipts_under_load_replay_equal_at_another_size(tmp_path):
    """As of the program that made docs/results/replay.cpu.json, with fewer answers."""
    model, answers = thinking_model(tmp_path / "model"), 4 * len(KINDS)
    asked = {"answers": answers, "batch": 8, "longer": 1, "load_format": "auto"}
    options = Namespace(model=model, device="cpu", **asked)
    rows, holds = proved(options, 2)
    assert holds, rows
