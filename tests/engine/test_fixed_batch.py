"""Fixed-batch mode: every decode step has the same number of rows, and no answer changes by it."""

import pytest
import torch

from tests.lib.engine_harness import ask, run
from tpdet.config import EngineConfig
from tpdet.control.plan import PlanRows, Row
from tpdet.errors import UsageError
from tpdet.kernels.inputs.paged_batch import PagedSequence
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.runner.graphs.decode_graphs import row_buckets
from tpdet.runner.step.step_rows import gather_rows

FIXED = 3


def requests():
    draws = {"temperature": 0.9, "seed": 4}
    return [
        ask("greedy", range(10, 30), max_tokens=9),
        ask("drawn", range(50, 53), max_tokens=5, **draws),
        ask("choices", range(20, 40), n=3, max_tokens=6, **draws),
        ask("long", [5 + i % 90 for i in range(300)], max_tokens=4),
        ask("scored", range(30, 45), max_tokens=2, prompt_logprobs=1),
    ]


def watch(heights, poison=False):
    """A change to an engine: its steps' (rows, largest count) are noted in `heights`."""

    def change(engine):
        model, runner = engine.runner.model, engine.runner
        hidden = model.hidden
        if poison:
            for layer in runner.pages.layers:
                layer.keys[runner.num_pages] = torch.nan
                layer.values[runner.num_pages] = torch.nan

        def noted(ids, pages, *batches):
            counts = [s.count for batch in batches for s in batch.sequences]
            heights.append((len(counts), max(counts)))
            return hidden(ids, pages, *batches)

        model.hidden = noted

    return change


@pytest.mark.parametrize(
    ("tp", "ahead", "look"), [(1, False, True), (2, True, True), (2, True, False)]
)
def test_every_decode_step_has_the_fixed_rows_and_every_answer_its_bits(
    tiny_model, tp, ahead, look
):
    model = tiny_model("qwen3", kv_heads=2)
    free, fixed = [], []
    asked = requests()
    expected = run(model, asked, change=watch(free))
    change = watch(fixed, poison=True)
    found = run(model, asked, tp, change=change, ahead=ahead, look=look, fixed_batch=FIXED)
    for request in asked:
        name = request.request_id
        for choice in range(request.params.n):
            assert found.answer(name, choice) == expected.answer(name, choice)
        assert found.prompt(name) == expected.prompt(name)
    assert found.logits.keys() == (expected.logits.keys() if look else set())
    for key, logits in expected.logits.items() if look else ():
        assert torch.equal(found.logits[key].view(torch.int32), logits.view(torch.int32)), key
    assert {rows for rows, count in fixed if count == 1} == {FIXED}
    assert max(rows for rows, _ in fixed) == FIXED
    # Otherwise the same requests make batches of many sizes, over it too.
    assert len({rows for rows, count in free if count == 1}) > 2
    assert max(rows for rows, _ in free) > FIXED


def row(tokens: int, logits: int = 1) -> Row:
    return Row(0, 0, 9, 4, tuple(range(7, 7 + tokens)), (3,), (1,), logits)


def test_pads_follow_a_decode_steps_rows_and_nothing_else_is_padded():
    found = gather_rows(PlanRows.of([row(1), row(1)]), 4, 99)
    assert found.sequences == (
        PagedSequence(0, 1, 4, (3,)),
        PagedSequence(1, 1, 4, (3,)),
        PagedSequence(2, 1, 0, (99,)),
        PagedSequence(3, 1, 0, (99,)),
    )
    assert (found.token_ids, found.wanted) == ([7, 7, 0, 0], [0, 1, 2, 3])
    assert gather_rows(PlanRows.of([row(1), row(1)]), 0, 99).wanted == [0, 1]
    assert gather_rows(PlanRows.of([row(1), row(1)]), 2, 99).wanted == [0, 1]
    chunk = gather_rows(PlanRows.of([row(1), row(3, 2)]), 4, 99)
    assert (chunk.token_ids, chunk.wanted) == ([7, 7, 8, 9], [0, 2, 3])


def test_graphs_are_captured_for_the_fixed_rows_alone():
    assert row_buckets(256, 5) == [5]
    assert row_buckets(20) == [1, 2, 4, 8, 16, 20]
    assert row_buckets(4096)[-1] == HEAD_ROWS


def test_a_fixed_batch_that_cannot_be_is_refused():
    for values, text in (
        ({"fixed_batch": 0}, "fixed_batch"),
        ({"fixed_batch": 257}, "fixed_batch"),
        ({"fixed_batch": 9, "max_num_seqs": 8}, "fixed_batch 9 is over max_num_seqs 8"),
        ({"fixed_batch": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens 8"),
    ):
        with pytest.raises(UsageError, match=text):
            EngineConfig.from_values(model="m", **values)
    assert EngineConfig.from_values(model="m", fixed_batch=9).max_running == 9
    assert EngineConfig.from_values(model="m").max_running == 256
    # Pads never cross a block of the output head, nor a graph's rows.
    limit = EngineConfig.model_json_schema()["properties"]["fixed_batch"]["anyOf"][0]["maximum"]
    assert limit <= HEAD_ROWS
