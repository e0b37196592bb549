"""The example of GRPO: exact at each step, and the same again."""

import pytest

from scripts.grpo import train


def test_two_runs_have_equal_log_probabilities_and_one_hash(tiny_model, tmp_path, capsys):
    model = tiny_model("qwen3", hidden=64, layers=1, intermediate=128)
    hashes = [train(model, str(tmp_path / str(run)), 2) for run in range(2)]
    lines = capsys.readouterr().out.splitlines()
    assert hashes[0] == hashes[1] and len(lines) == 4
    assert all(line.endswith("equal: True") for line in lines)
    assert train(model, str(tmp_path / "other"), 2, rate=2e-3) != hashes[0]


@pytest.mark.slow
def test_two_hundred_steps(tiny_model, tmp_path):
    model = tiny_model("qwen3", hidden=64, layers=1, intermediate=128)
    assert train(model, str(tmp_path / "one"), 200) == train(model, str(tmp_path / "two"), 200)
