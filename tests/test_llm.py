"""The offline API, alone and as every rank of a torchrun job."""

import json
import subprocess
import sys
import textwrap

import msgspec
import pytest

from tpdet import LLM, SamplingParams
from tpdet.errors import NotFoundError, RequestError, UsageError
from tpdet.launch.torchrun import rank_environment, torchrun_command

SCRIPT = """
import json, sys
import msgspec
from tpdet import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], kv_pages=64)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, logprobs=2, n=2)
    first = llm.generate(["The for statement", [5, 6, 7]], params)
    second = llm.generate("A list", SamplingParams(temperature=0, max_tokens=5))
    rank = llm._world.rank
    with open(f"{sys.argv[2]}/{rank}.json", "wb") as file:
        file.write(msgspec.json.encode([first, second]))
    llm.close()
"""


@pytest.fixture(scope="module")
def llm(tiny_model):
    return LLM(str(tiny_model("qwen3", kv_heads=2)), kv_pages=64)


def test_prompts_of_text_and_ids_are_answered_in_order(llm):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    text = "The for statement"
    answers = llm.generate([text, llm.tokenizer.encode(text), [9, 8]], params)
    assert answers[0].outputs == answers[1].outputs
    assert answers[0].prompt == text and answers[1].prompt is None
    choice = answers[2].outputs[0]
    assert len(choice.token_ids) == len(choice.logprobs) == len(choice.logprob_bits) == 6
    for token, position, bits in zip(
        choice.token_ids, choice.logprobs, choice.logprob_bits, strict=True
    ):
        import struct

        assert struct.pack(">f", position[token]).hex() == bits
        assert max(position.values()) == position[token]
    assert choice.finish_reason == "length"
    assert answers[0].system_fingerprint == llm.system_fingerprint


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 3)]
    answers = llm.generate([[1, 2], [1, 2]], params)
    assert [len(a.outputs[0].token_ids) for a in answers] == [1, 3]


def test_stop_strings_cut_the_text_and_end_the_choice(llm):
    free = llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    text = free[0].outputs[0].text
    stop = text[3:5]
    cut = llm.generate(
        [[1, 2]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,))
    )[0].outputs[0]
    assert cut.text == text[: text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_prompt_scores_are_those_of_every_position(llm):
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2)
    answer = llm.generate([[4, 5, 6, 7]], params)[0]
    assert answer.prompt_logprobs[0] is None
    assert [6 in p for p in answer.prompt_logprobs[2:3]] == [True]
    assert answer.outputs[0].token_ids == ()


def test_a_replay_digest_names_the_answer_not_its_company(llm):
    params = SamplingParams(temperature=1.0, max_tokens=6, seed=2, n=2)
    alone = llm.generate([[3, 4]], params)[0]
    crowd = llm.generate([[3, 4], [9], [3, 4]], params)
    assert alone.replay_digest == crowd[0].replay_digest == crowd[2].replay_digest
    assert crowd[1].replay_digest != alone.replay_digest
    shown = msgspec.structs.replace(params, logprobs=3)
    assert llm.generate([[3, 4]], shown)[0].replay_digest == alone.replay_digest


def test_a_seed_that_was_drawn_replays(llm):
    first = llm.generate([[3, 4]], SamplingParams(temperature=1.0, max_tokens=8))[0]
    again = llm.generate([[3, 4]], SamplingParams(temperature=1.0, max_tokens=8, seed=first.seed))
    assert again[0].outputs == first.outputs


def test_more_prompts_than_the_queue_holds_are_all_answered(tiny_model):
    small = LLM(str(tiny_model("qwen3", kv_heads=2)), kv_pages=8, max_queue=2, max_num_seqs=2)
    answers = small.generate([[i] for i in range(9)], SamplingParams(temperature=0, max_tokens=2))
    assert [a.prompt_token_ids for a in answers] == [(i,) for i in range(9)]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], {}, "prompt is empty"),
        ([[99999]], {}, "outside the vocabulary"),
        ([[1]], {"max_tokens": 99999}, "over the model's context"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(llm, prompts, params, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, SamplingParams(**params))
    assert not llm.engine.has_work
    with pytest.raises(RequestError, match="2 prompts but 1 sampling_params"):
        llm.generate([[1], [2]], [SamplingParams()])


def test_what_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(NotFoundError, match="is not a directory"):
        LLM("./nowhere")
    with pytest.raises(UsageError, match="unknown setting 'surprise'"):
        LLM(str(tmp_path), surprise=1)


def test_it_works_on_ids_alone(tiny_model, llm):
    bare = LLM(str(tiny_model("qwen3", kv_heads=2)), kv_pages=64, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=4)
    answer, whole = (one.generate([[1, 2, 3]], params)[0].outputs[0] for one in (bare, llm))
    assert answer.token_ids == whole.token_ids and answer.text == ""
    with pytest.raises(RequestError, match="needs a tokenizer"):
        bare.generate(["text"], params)


def test_every_rank_of_torchrun_gets_the_answers_of_one_process(tiny_model, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    model = str(tiny_model("qwen3", kv_heads=2))
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        arguments = [model, str(folder)]
        command = (
            torchrun_command(ranks, [str(script)], arguments, tmp_path / "logs")
            if ranks > 1
            else [sys.executable, str(script), *arguments]
        )
        done = subprocess.run(command, env=rank_environment(ranks), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    one = json.loads((tmp_path / "1" / "0.json").read_text())
    for rank in (0, 1):
        assert json.loads((tmp_path / "2" / f"{rank}.json").read_text()) == one
