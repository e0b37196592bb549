"""`tpdet bench host`: the parts of a step through both doors, with no model run on a CPU."""

import json

import pytest

from tpdet.cli import main

PARTS = ("plan", "send", "launch", "wait", "commit", "results", "readers")


@pytest.mark.slow
def test_each_door_has_its_step_and_the_parts_of_it(tiny_model, capsys):
    arguments = ["--batch", "2", "--context", "16", "--steps", "12", "--device", "cpu"]
    assert main(["bench", "host", str(tiny_model()), *arguments]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    cases = ["a step", "rank 0's thread", *PARTS]
    doors = ("LLM.generate", "server loop")
    assert [row["case"] for row in rows] == [f"{door}: {case}" for door in doors for case in cases]
    for thread in (rows[1], rows[len(cases) + 1]):
        assert set(thread["metrics"]["us_a_row"]) == set(PARTS)
        parts = sum(thread["metrics"]["us_a_row"].values())
        assert 2 * parts / 1e3 == pytest.approx(thread["value"], rel=0.01)
