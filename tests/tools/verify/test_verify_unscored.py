"""Prompts that are not scored: equal answers, and a wrong row of the last layer is found."""

import pytest

from tests.tools.verify.test_verify_drafts import verified
from tpdet.models.decoder import Decoder

RELATIONS = "alone", "unscored"


def test_answers_to_prompts_that_are_not_scored_are_those_of_scored_ones(tiny_model, tmp_path):
    alone, whole, chunks = verified(tiny_model, tmp_path, relations=RELATIONS)
    assert [each.difference for each in (alone, whole, chunks)] == [None] * 3
    assert whole.positions == chunks.positions == 27 < alone.positions
    assert whole.digest == whole.reference == chunks.digest != alone.digest


@pytest.mark.parametrize("fault", ["another row", "rows that never were"])
def test_a_last_layer_of_other_rows_is_found(tiny_model, tmp_path, monkeypatch, fault):
    some, finish = Decoder.some, Decoder.finish
    if fault == "another row":
        monkeypatch.setattr(
            Decoder, "some", lambda self, rows, wanted, parts: some(self, rows, wanted * 0, parts)
        )
    else:
        monkeypatch.setattr(
            Decoder, "finish", lambda self, rows, *of: finish(self, rows, *of).zero_()
        )
    alone, whole, _ = verified(tiny_model, tmp_path, relations=RELATIONS)
    assert alone.equal and not whole.equal
    assert "position" in whole.difference
