"""AsyncLLM: many requests at a time in an event loop, alone and over two ranks."""

import asyncio
import dataclasses
import json
import re
import threading
import time

import msgspec
import pytest

from tests.lib.forked import run_ranks
from tests.llm.test_llm import GREEDY
from tpdet import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from tpdet.engine.fault_points import FaultPoints
from tpdet.errors import (
    DisagreementError,
    NotFoundError,
    NumericalError,
    PeerLostError,
    RequestError,
    UsageError,
)
from tpdet.launch.life.faults import Fault

pytestmark = pytest.mark.long

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, seed=1)


def mixed_requests():
    """Twelve requests that differ in everything."""
    drawn = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=6 + i, logprobs=i % 3, n=1 + i % 2)
        for i in range(6)
    ]
    penalised = SamplingParams(temperature=0.7, top_k=9, repetition_penalty=1.2, seed=4)
    scored = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2, seed=1)
    params = [*drawn, GREEDY, penalised, scored, LONG, GREEDY, penalised]
    prompts = ["The for statement", [5, 6, 7], {"prompt_token_ids": [9] * 300}, [1], "A list", [2]]
    return list(zip(prompts * 2, params, strict=True))


async def whole(generator):
    """The last output of a request, after checking that each grows out of the one before."""
    last = None
    async for output in generator:
        assert last is None or not last.finished
        for old, new in zip(last.outputs if last else (), output.outputs, strict=False):
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
            assert new.text.startswith(old.text)
        assert output.finished or output.replay_digest is None
        last = output
    assert last.finished and last.replay_digest
    return last


def named(output, request_id=""):
    return dataclasses.replace(output, request_id=request_id)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", kv_heads=2, layers=1)


@pytest.fixture(scope="module")
def expected(model):
    """What LLM answers to the requests, one by one."""
    with LLM(model, kv_pages=64) as llm:
        return [named(llm.generate([p], s)[0]) for p, s in mixed_requests()]


def run(model, body, **settings):
    async def main():
        async with AsyncLLM(model, **{"kv_pages": 64} | settings) as llm:
            found = await asyncio.wait_for(body(llm), 120)
            deadline = time.monotonic() + 10
            while llm.engine.has_work or llm._thread._streams or llm._streams:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
        llm.engine.check_integrity()
        assert llm.engine.statistics().pages_used == 0
        return found

    return asyncio.run(main())


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_seqs": 3, "max_queue": 2, "max_num_batched_tokens": 64}]
)
def test_answers_are_those_of_llm_whatever_else_runs(model, expected, settings):
    async def body(llm):
        asked = mixed_requests() * 2
        return await asyncio.gather(*(whole(llm.generate(p, s)) for p, s in asked))

    found = [named(output) for output in run(model, body, **settings)]
    assert found == expected * 2
    bits = [[choice.logprob_bits for choice in output.outputs] for output in found]
    assert bits == [[c.logprob_bits for c in output.outputs] for output in expected * 2]


def test_deltas_in_a_row_are_the_whole_and_the_whole_may_come_alone(model, expected):
    async def body(llm):
        found = {}
        for kind in RequestOutputKind:
            params = mixed_requests()[1][1].clone()
            params.output_kind = kind
            found[kind] = [output async for output in llm.generate([5, 6, 7], params)]
        return found

    found = run(model, body)
    (alone,) = found.pop(RequestOutputKind.FINAL_ONLY)
    whole = found.pop(RequestOutputKind.CUMULATIVE)[-1]
    (deltas,) = found.values()
    assert named(alone) == named(whole) == expected[1]
    assert deltas[-1].finished and deltas[-1].replay_digest == whole.replay_digest
    assert len(deltas) > 2 and {len(output.outputs) for output in deltas} <= {1, 2}
    for choice in whole.outputs:
        parts = [c for output in deltas for c in output.outputs if c.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [t for part in parts for t in part.token_ids] == [*choice.token_ids]
        assert [e for part in parts for e in part.logprobs] == choice.logprobs
        assert [b for part in parts for b in part.logprob_bits] == [*choice.logprob_bits]
        assert all(part.token_ids for part in parts)
        assert parts[-1].cumulative_logprob == choice.cumulative_logprob


def test_outputs_come_while_it_runs_and_two_loops_may_share_it(model, expected):
    async def body(llm):
        count = 0
        async for output in llm.generate([2], LONG, "mine"):
            assert output.request_id == "mine"
            count += 1
        other = await asyncio.to_thread(
            lambda: asyncio.run(whole(llm.generate(*mixed_requests()[0])))
        )
        return count, other

    count, other = run(model, body)
    assert count > 20
    assert named(other) == expected[0]


def test_a_reader_that_leaves_frees_its_pages(model):
    async def body(llm):
        async def read(how):
            async for output in llm.generate([7] * 300, LONG, how):
                if how == "break" and len(output.outputs[0].token_ids) > 3:
                    break

        async for output in llm.generate([7] * 300, LONG):
            if len(output.outputs[0].token_ids) > 3:
                break
        task = asyncio.create_task(read("cancel"))
        while not llm.engine.has_work:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await read("break")
        began = time.monotonic()
        while llm.engine.has_work:
            await asyncio.sleep(0.001)
        assert llm.engine.statistics().totals.generated_tokens < 3 * 100
        return time.monotonic() - began

    run(model, body)


def test_an_aborted_request_ends_as_such_and_nobody_else_does(model, expected):
    async def body(llm):
        async def read(name):
            async for output in llm.generate([3, 4], LONG, name):
                read_so_far.append(output)
            return read_so_far

        read_so_far = []
        doomed = asyncio.create_task(read("doomed"))
        other = asyncio.create_task(whole(llm.generate(*mixed_requests()[3])))
        while not read_so_far:
            await asyncio.sleep(0.001)
        await llm.abort("doomed")
        await llm.abort("nobody")
        last = (await doomed)[-1]
        again = await whole(llm.generate(*mixed_requests()[0], request_id="doomed"))
        return last, await other, again

    last, other, again = run(model, body)
    assert last.finished and last.outputs[0].finish_reason == "abort"
    assert last.replay_digest is None and len(last.outputs[0].token_ids) < 200
    assert [named(other), named(again)] == [expected[3], expected[0]]


async def steps_of(llm, awaited):
    """The result, and how many steps it took."""
    before = llm.engine.statistics().steps
    found = await awaited
    return found, llm.engine.statistics().steps - before


def test_drafts_and_a_prediction_change_no_bit_and_save_steps(model, expected):
    prompt, params = mixed_requests()[9]
    ids = expected[9].outputs[0].token_ids

    async def body(llm):
        found = [await steps_of(llm, whole(llm.generate(prompt, params)))]
        text = llm.get_tokenizer().decode(ids)
        for guess in ({"drafts": [ids]}, {"prediction": ids}, {"prediction": text}):
            found.append(await steps_of(llm, whole(llm.generate(prompt, params, **guess))))
        with pytest.raises(RequestError, match="drafts is 'text': give None, a list of token ids"):
            await whole(llm.generate(prompt, params, drafts="text"))
        with pytest.raises(RequestError, match="prediction is 5: give text or token ids"):
            await whole(llm.generate(prompt, params, prediction=5))
        return found

    (_, plain), *guessed = found = run(model, body, drafts="schema")
    assert [named(answer) for answer, _ in found] == [expected[9]] * 4
    assert plain >= len(ids) and all(steps < plain / 2 for _, steps in guessed[:2])


def test_an_answer_goes_on_behind_its_last_output(model, expected):
    """By outputs of AsyncLLM, and by the object that HTTP takes; wrong tokens are named."""
    prompt, params = mixed_requests()[5]

    async def body(llm):
        parts = [output async for output in llm.generate(prompt, params)]
        cut, (digests, ids) = parts[4], (llm.system_fingerprint.split("-")[1:3], parts[-1].outputs)
        unseeded = msgspec.structs.replace(params, seed=None)
        for given in (cut, parts[-1]):
            rest = [part async for part in llm.generate(prompt, unseeded, resume=given)]
            assert named(rest[-1]) == expected[5]
            had = [len(choice.token_ids) for choice in given.outputs]
            assert all(len(c.token_ids) >= n for c, n in zip(rest[0].outputs, had, strict=True))
        over_http = {"contract": digests[0], "weights": digests[1], "seed": params.seed}
        over_http |= {"choices": [[*choice.token_ids] for choice in ids]}
        found, steps = await steps_of(llm, whole(llm.generate(prompt, params, resume=over_http)))
        assert named(found) == expected[5] and steps < 6
        wrong = json.loads(json.dumps(over_http["choices"]))
        wrong[1][3] ^= 1
        processed = {"logprobs_mode": "processed_logprobs"}
        other_token = f"choice 1, position 3: the resumed token is {wrong[1][3]}, and the one here"
        for change, error, why in (
            ({"choices": wrong}, DisagreementError, other_token),
            ({"contract": "0" * 12}, DisagreementError, "the contract of the answer to resume"),
            (processed, DisagreementError, "is processed_logprobs, and here is raw_logprobs"),
            ({"seed": 99}, RequestError, "seed 5 is not the seed of the answer to resume, 99"),
            ({"seed": "x"}, RequestError, "resume: seed"),
            ({"words": 1}, RequestError, "resume: unknown field 'words'"),
            ({"choices": [[1]] * 3}, RequestError, "3 resumed choices for 2 choices"),
            ({"choices": [[1] * 99]}, RequestError, "99 tokens already, over max_tokens 11"),
        ):
            with pytest.raises(error, match=re.escape(why)):
                await whole(llm.generate(prompt, params, resume=over_http | change))
        with pytest.raises(RequestError, match="resume and drafts are given"):
            await whole(llm.generate(prompt, params, resume=cut, drafts=[1]))
        return named(await whole(llm.generate(prompt, params)))

    assert run(model, body) == expected[5]


def test_recorded_answers_are_checked_while_others_are_answered(model, expected):
    asked = mixed_requests()[:4]

    async def body(llm):
        outputs = [await whole(llm.generate(*pair)) for pair in asked]
        records = llm.record(outputs, [params for _, params in asked])
        choice = records[3].outputs[1]
        bits = (f"{int(choice.logprob_bits[0], 16) ^ 1:08x}", *choice.logprob_bits[1:])
        changed = msgspec.structs.replace(choice, logprob_bits=bits)
        outputs = records[3].outputs[0], changed
        records[3] = msgspec.structs.replace(records[3], outputs=outputs)
        other = asyncio.create_task(whole(llm.generate(*mixed_requests()[0])))
        found = await llm.check(records)
        strange = msgspec.structs.replace(records[0], weights="0" * 64)
        with pytest.raises(DisagreementError, match=r"answers\[1\] was computed with model dig"):
            await llm.check([records[1], strange])
        for wrong, why in (
            (records[0], "answers is a RecordedAnswer"),
            ([1], r"answers\[0\] is a"),
        ):
            with pytest.raises(UsageError, match=f"{why}.* give .* record made"):
                await llm.check(wrong)
        return found, named(await other), bits

    found, other, bits = run(model, body)
    assert other == expected[0]
    assert [index for index, difference in enumerate(found) if difference] == [3]
    place = found[3]
    assert (place.choice, place.position, place.recorded.bits) == (1, 0, bits[0])
    assert int(place.computed.bits, 16) ^ 1 == int(bits[0], 16)


def test_each_error_reaches_its_own_consumer(model, expected):
    async def body(llm):
        async def told(prompt, params, name=None):
            try:
                return named(await whole(llm.generate(prompt, params, name)))
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        good = mixed_requests()[0]
        return await asyncio.gather(
            told(*good, "twice"),
            told(*good, "twice"),
            told([99999], GREEDY),
            told([1], SamplingParams(max_tokens=9999)),
            told([[1], [2]], GREEDY),
            told([1], {"max_tokens": 2}),
            told([1], GREEDY, 5),
            told([1], SamplingParams(json_schema='{"type": "nonsense"}')),
            told(*good),
        )

    found = run(model, body)
    assert found[0] == found[-1] == expected[0]
    for error, text in zip(
        found[1:-1],
        (
            "'twice' is in use",
            "outside the vocabulary",
            "over the model's context",
            "token 0 is [1]",
            "use SamplingParams(**",
            "request_id must be text",
            "RequestError",
        ),
        strict=True,
    ):
        assert text in error


def test_nan_in_one_request_fails_that_one_alone(model, expected):
    async def body(llm):
        first = asyncio.create_task(whole(llm.generate([3, 4], LONG)))
        while not llm.engine.has_work:
            await asyncio.sleep(0.001)
        llm.engine.faults = FaultPoints([Fault(0, 0, "nan-row")], 0)
        with pytest.raises(NumericalError, match="NaN"):
            await first
        return await whole(llm.generate(*mixed_requests()[0]))

    assert named(run(model, body)) == expected[0]


def test_after_the_engine_has_ended_everybody_is_told_why(model, monkeypatch):
    async def main():
        llm = AsyncLLM(model, kv_pages=16)

        def fail(*_):
            raise RuntimeError("out of luck")

        monkeypatch.setattr(llm.engine.runner, "launch", fail)
        told = await asyncio.gather(
            *(whole(llm.generate([i], GREEDY)) for i in (1, 2)), return_exceptions=True
        )
        assert [type(error) for error in told] == [PeerLostError] * 2
        with pytest.raises(PeerLostError, match="ended by RuntimeError: out of luck"):
            await whole(llm.generate([1], GREEDY))
        with pytest.raises(PeerLostError, match="ended by RuntimeError: out of luck"):
            await llm.check_health()
        assert llm.closed and repr(llm).endswith("[closed]")
        await llm.close()

    asyncio.run(main())


def test_closing_ends_open_requests_and_later_ones(model):
    async def main():
        llm = AsyncLLM(model, kv_pages=16)
        task = asyncio.create_task(whole(llm.generate([1], LONG)))
        while not llm.engine.has_work:
            await asyncio.sleep(0.001)
        await asyncio.gather(llm.close(), llm.close())
        with pytest.raises(UsageError, match="this AsyncLLM is closed"):
            await task
        with pytest.raises(UsageError, match="this AsyncLLM is closed"):
            await whole(llm.generate([1], LONG))
        with pytest.raises(UsageError, match="rank 0 makes the requests"):
            await llm.follow()

    asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name == "tpdet engine"]


def test_what_cannot_be_loaded_is_refused_and_leaves_no_thread(tmp_path):
    with pytest.raises(NotFoundError, match="is not a directory"):
        AsyncLLM("./nowhere")
    with pytest.raises(NotFoundError):
        AsyncLLM(tmp_path, skip_tokenizer_init=True)
    assert not [thread for thread in threading.enumerate() if thread.name == "tpdet engine"]


TWO_RANKS = """
import asyncio, json, sys
import msgspec
from tests.llm.test_async_llm import GREEDY, LONG, mixed_requests, named, whole
from tpdet import AsyncLLM

SETTINGS = {"kv_pages": 64, "tensor_parallel_size": 2, "step_timeout": 2}

async def told(awaited):
    try:
        return await awaited
    except Exception as error:
        return f"{type(error).__name__}: {error}"

async def well():
    async with AsyncLLM(sys.argv[1], **SETTINGS) as llm:
        if llm.rank > 0:
            refused = await told(whole(llm.generate([1], GREEDY)))
            await llm.follow()
            return refused
        asked = mixed_requests()
        answers = await asyncio.gather(*(whole(llm.generate(p, s)) for p, s in asked))
        await asyncio.sleep(3)  # longer than the step timeout: idle ranks hear from rank 0
        answers.append(await whole(llm.generate(*asked[0])))
        return msgspec.to_builtins([named(a) for a in answers], str_keys=True)

async def badly():
    llm = AsyncLLM(sys.argv[1], **SETTINGS)
    if llm.rank > 0:
        def fail(*_):
            raise RuntimeError("out of luck")
        llm.engine.runner.launch = fail
        found = await told(llm.follow())
    else:
        found = await asyncio.gather(*(told(whole(llm.generate([i], LONG))) for i in (1, 2)))
    await llm.close()
    return found, llm.rank

good = asyncio.run(well())
bad, rank = asyncio.run(badly())
with open(f"{sys.argv[2]}/{rank}.json", "w") as file:
    json.dump([good, bad], file)
"""


def test_rank_0_asks_the_others_follow_and_a_failure_is_everybodys(model, expected, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_RANKS)
    run_ranks(2, str(script), model, tmp_path)
    (answers, lost), (refused, own) = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)
    )
    same = msgspec.to_builtins([*expected, expected[0]], str_keys=True)
    assert answers == json.loads(json.dumps(same))
    assert refused == "UsageError: rank 1 follows rank 0: call `await llm.follow()` here"
    assert own == "RuntimeError: out of luck"
    for error in lost:
        assert error.startswith("PeerLostError: the engine has ended by PeerLostError: rank 1")
        assert "gave up: out of luck" in error
