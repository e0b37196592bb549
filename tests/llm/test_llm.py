"""The offline API, alone and as every rank of a torchrun job."""

import asyncio
import dataclasses
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import weakref
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy
import pytest

from tests.lib.forked import run_ranks
from tests.lib.models.pooled_models import sentence_folder
from tests.lib.tree import ROOT
from tpdet import LLM, AsyncLLM, SamplingParams
from tpdet.config import EngineConfig
from tpdet.engine.fault_points import FaultPoints
from tpdet.errors import (
    CheckpointError,
    DisagreementError,
    NotFoundError,
    NumericalError,
    RequestError,
    UsageError,
)
from tpdet.launch.life.faults import Fault
from tpdet.launch.start.torchrun import rank_environment, torchrun_command
from tpdet.llm.results import ResultWriter
from tpdet.scheduler import policy
from tpdet.speculative import draft_rows
from tpdet.text.pooled_prompts import PooledPrompts

pytestmark = pytest.mark.long

SCRIPT = """
import json, sys
import msgspec
from tpdet import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], kv_pages=64)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, logprobs=2, n=2)
    first = llm.generate(["The for statement", [5, 6, 7]], params)
    second = llm.generate("A list", SamplingParams(temperature=0, max_tokens=5))
    rank = llm.rank
    with open(f"{sys.argv[2]}/{rank}.json", "wb") as file:
        file.write(msgspec.json.encode([first, second]))
    llm.close()
"""


@pytest.fixture(scope="module")
def llm(tiny_model):
    return LLM(str(tiny_model("qwen3", kv_heads=2, layers=1)), kv_pages=64)


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
        assert max(map(float, position.values())) == float(position[token])
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
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    drawn = [llm.generate([[3, 4]], greedy)[0] for _ in range(2)]
    assert drawn[0].seed != drawn[1].seed and drawn[0].replay_version == 2
    assert drawn[0].replay_digest == drawn[1].replay_digest


def test_a_seed_that_was_drawn_replays(llm):
    first = llm.generate([[3, 4]], SamplingParams(temperature=1.0, max_tokens=8))[0]
    again = llm.generate([[3, 4]], SamplingParams(temperature=1.0, max_tokens=8, seed=first.seed))
    assert again[0].outputs == first.outputs


def test_more_prompts_than_the_queue_holds_are_all_answered(tiny_model):
    small = LLM(
        str(tiny_model("qwen3", kv_heads=2, layers=1)), kv_pages=8, max_queue=2, max_num_seqs=2
    )
    answers = small.generate([[i] for i in range(9)], SamplingParams(temperature=0, max_tokens=2))
    assert [a.prompt_token_ids for a in answers] == [(i,) for i in range(9)]


def test_prompts_are_queued_and_answers_written_while_steps_run(tiny_model, monkeypatch):
    """Before the first of two tokens a prompt, no more is queued than two steps of 16 take."""
    sizes = {"kv_pages": 64, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    with LLM(str(tiny_model("qwen3", kv_heads=2)), **sizes) as llm:
        said = []

        def saying(what, call):
            def said_first(*given, **named):
                if what != "launch" or len(given[0].rows):
                    said.append(what)
                return call(*given, **named)

            return said_first

        prompts = [[1 + i] * 8 for i in range(12)]
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        alone = [llm.generate([prompt], params)[0].replay_digest for prompt in prompts]
        monkeypatch.setattr(llm.engine, "submit", saying("submit", llm.engine.submit))
        monkeypatch.setattr(llm.engine.runner, "launch", saying("launch", llm.engine.runner.launch))
        monkeypatch.setattr(ResultWriter, "write", saying("write", ResultWriter.write))
        llm.engine.run_ahead = True
        found = llm.generate(prompts, params)
        assert [one.replay_digest for one in found] == alone
        assert said[:5] == [*["submit"] * 4, "launch"] and said.count("submit") == 12
        assert said.index("write") < len(said) - said[::-1].index("launch") - 1


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
    bare = LLM(
        str(tiny_model("qwen3", kv_heads=2, layers=1)), kv_pages=64, skip_tokenizer_init=True
    )
    params = SamplingParams(temperature=0, max_tokens=4)
    answer, whole = (one.generate([[1, 2, 3]], params)[0].outputs[0] for one in (bare, llm))
    assert answer.token_ids == whole.token_ids and answer.text == ""
    with pytest.raises(RequestError, match="needs a tokenizer"):
        bare.generate(["text"], params)


@pytest.mark.slow  # `test_two_ranks_fail_together_and_go_on_together` compares digests
def test_every_rank_of_torchrun_gets_the_answers_of_one_process(tiny_model, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    model = str(tiny_model("qwen3", kv_heads=2, layers=1))
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


def test_its_signature_lists_every_setting_with_its_default():
    shown = inspect.signature(LLM.__init__).parameters
    fields = EngineConfig.model_fields
    for name, field in fields.items():
        default = inspect.Parameter.empty if field.is_required() else field.default
        assert shown[name].default == default, name
    assert {*shown} - {*fields} == {"self", "tensor_parallel_size", "of_vllm"}
    text = inspect.getdoc(LLM.__init__)
    assert all(re.search(rf"\b{name}\b", text) for name in fields if "slowdown" not in name)
    assert inspect.signature(AsyncLLM) == inspect.signature(LLM)


def test_settings_of_vllm_that_ask_for_nothing_are_accepted(tiny_model, caplog):
    import torch

    with LLM(
        tiny_model("qwen3", kv_heads=2, layers=1),
        kv_pages=8,
        tensor_parallel_size=1,
        dtype=torch.float32,
        trust_remote_code=False,
        enable_chunked_prefill=True,
        disable_log_stats=True,
        swap_space=4,
        tokenizer_mode="auto",
        enforce_eager=True,
        seed=3,
        max_model_len="1k",
        hf_overrides=None,
        distributed_executor_backend="external_launcher",
        pipeline_parallel_size=1,
        num_gpu_blocks_override=None,
        block_size=16,
        max_num_seqs=None,
        quantization=None,
        compilation_config={"level": 3},
    ) as llm:
        assert llm.config.max_model_len == 1000 and llm.config.seed == 3
        assert llm.config.max_num_seqs == 256
        text = repr(llm)
        assert "tensor_parallel_size=1" in text and "dtype='float32'" in text
        assert "max_model_len=1000" in text and not text.endswith("[closed]")
    assert repr(llm).endswith("[closed]")
    notes = {record.getMessage() for record in caplog.records if record.name == "tpdet.llm"}
    assert "block_size changes nothing: a page of KV cache holds 256 tokens" in notes
    assert not any("quantization" in note or "seqs" in note for note in notes)
    with LLM(tiny_model("qwen3", kv_heads=2, layers=1), kv_pages=8, seed=None) as other:
        assert other.config.seed == 0


def test_a_prompt_gives_itself_its_seed_where_the_policy_is_so(tiny_model):
    params = SamplingParams(max_tokens=3)
    with LLM(tiny_model("qwen3", kv_heads=2, layers=1), kv_pages=8, seed_policy="request") as llm:
        first, second, clone = llm.generate([[3, 4], [5], [3, 4]], params, use_tqdm=False)
        (alone,) = llm.generate([[5]], SamplingParams(max_tokens=2, n=2), use_tqdm=False)
        (given,) = llm.generate([[5]], SamplingParams(max_tokens=3, seed=9), use_tqdm=False)
    assert first.replay_digest == clone.replay_digest and first.seed != second.seed
    assert alone.seed == second.seed and given.seed == 9
    assert alone.outputs[0].token_ids == second.outputs[0].token_ids[:2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": "two"}, "must be a number of ranks, not 'two'"),
        ({"max_model_length": 5}, "unknown setting 'max_model_length': did you mean 'max_model_"),
        ({"enable_chunked_prefill": False}, "cannot be honoured"),
        ({"quantization": "awq"}, "quantization"),
        ({"dtype": "int4"}, "dtype: "),
        ({"on_slowdown": "approximate"}, "on_slowdown is a server's setting"),
    ],
)
def test_other_settings_are_one_error_before_anything_is_read(settings, message):
    with pytest.raises(UsageError, match=message) as refused:
        LLM("./nowhere", **settings)
    error = refused.value
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    assert "--help" not in str(error)


def test_a_wrong_size_is_refused_without_loading_torch():
    code = (
        "import sys\nfrom tpdet import LLM\n"
        "try: LLM('nowhere', tensor_parallel_size=3)\n"
        "except ValueError as error: print(error)\n"
        "sys.exit('torch' in sys.modules)"
    )
    names = (
        "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=9"
    )
    torchrun = dict(pair.split("=") for pair in names.split())
    environment = os.environ | torchrun
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 and "torchrun --nproc-per-node 3" in done.stdout


GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, seed=1)


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7],
        (5, 6, 7),
        range(5, 8),
        numpy.array([5, 6, 7]),
        [numpy.int64(5), numpy.int32(6), 7],
        {"prompt_token_ids": [5, 6, 7]},
        {"prompt_token_ids": numpy.array([5, 6, 7]), "multi_modal_data": None},
        {"prompt_token_ids": (5, 6, 7), "prompt": "shown", "cache_salt": "mine"},
    ],
)
def test_every_way_to_write_ids_is_one_prompt(llm, prompt):
    found = llm.generate(prompt, GREEDY)
    assert [answer.prompt_token_ids for answer in found] == [(5, 6, 7)]
    assert found[0].outputs == llm.generate([[5, 6, 7]], GREEDY)[0].outputs


def test_ids_may_stand_in_their_older_place(llm):
    digests = [output.replay_digest for output in llm.generate([[5, 6], [7]], GREEDY)]
    for texts in (None, ["a", "b"]):
        given = {"prompt_token_ids": [[5, 6], numpy.array([7])], "lora_request": None}
        found = llm.generate(texts, GREEDY, **given, priority=[0, 0])
        assert [output.replay_digest for output in found] == digests
        assert [output.prompt for output in found] == (texts or [None, None])
    assert llm.generate("a", GREEDY, prompt_token_ids=[5, 6])[0].replay_digest == digests[0]
    with pytest.raises(RequestError, match="with 1 prompt_token_ids: give each its text"):
        llm.generate(["a", "b"], GREEDY, prompt_token_ids=[[5]])
    with pytest.raises(RequestError, match="lora_request 3 is not supported: adapters"):
        llm.chat(HELLO, GREEDY, lora_request=3)


def test_prompts_of_every_kind_go_together(llm):
    import torch

    text = "The for statement"
    ids = tuple(llm.get_tokenizer().encode(text))
    mixed = [text, {"prompt": text}, list(ids), {"prompt_token_ids": ids}, torch.tensor(ids)]
    assert [a.prompt_token_ids for a in llm.generate(mixed, GREEDY)] == [ids] * 5
    rows = llm.generate(torch.tensor([[1, 2], [3, 4]]), GREEDY)
    assert [a.prompt_token_ids for a in rows] == [(1, 2), (3, 4)]
    assert [a.prompt for a in llm.generate(mixed[:3], GREEDY)] == [text, text, None]
    assert llm.generate([], GREEDY) == [] and llm.chat([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts must be a list, not NoneType"),
        (b"text", "prompts must be a list, not bytes"),
        ((x for x in "ab"), "prompts must be a list, not generator"),
        ([1, "a"], "token 1 is 'a', not a token id"),
        ([[1, 2.5]], r"prompts\[0\]: token 1 is 2.5, not a token id"),
        ([[1], None], r"prompts\[1\] is None: give text"),
        (["a", 7], r"prompts\[1\] is 7: give text"),
        ([[True]], "token 0 is True"),
        ({"text": "a"}, "'text', which is not supported"),
        ({}, 'neither "prompt" nor "prompt_token_ids"'),
        ({"prompt": 5}, "is 5: give text"),
        ({"prompt_token_ids": 5}, "is 5: give a list of ids"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data"),
        (numpy.array([0.5]), r"prompts\[0\] is 0.5: give text"),
    ],
)
def test_what_is_no_prompt_is_said_to_be_none(llm, prompts, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 2}, r"use SamplingParams\(\*\*\{'max_tokens': 2\}\)"),
        (5, "sampling_params is 5"),
        ([{"max_tokens": 2}], "give SamplingParams"),
    ],
)
def test_parameters_must_be_made(llm, params, message):
    with pytest.raises(UsageError, match=message):
        llm.generate([[1]], params)


def test_parameters_set_later_count_in_later_calls_only(llm):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)

    class Changes(Bar):
        def __enter__(self):
            params.max_tokens = 9
            return self

    (output,) = llm.generate([[5, 6]], params, use_tqdm=lambda **_: Changes(lambda: None))
    assert len(output.outputs[0].token_ids) == 3
    assert len(llm.generate([[5, 6]], params)[0].outputs[0].token_ids) == 9
    params.min_tokens = 10
    with pytest.raises(RequestError, match="min_tokens 10 is larger than max_tokens 9"):
        llm.generate([[5, 6]], params)


def test_outputs_are_plain_data(llm):
    (output,) = llm.generate(["A list"], SamplingParams(max_tokens=2, logprobs=1, seed=2))
    told = dataclasses.asdict(output)
    assert told == msgspec.to_builtins(output) | {"prompt_token_ids": output.prompt_token_ids} | {
        "outputs": [dataclasses.asdict(choice) for choice in output.outputs]
    }
    first = output.outputs[0].logprobs[0]
    assert told["outputs"][0]["logprobs"][0] == {
        token: {"logprob": e.logprob, "rank": e.rank, "decoded_token": e.decoded_token}
        for token, e in first.items()
    }
    assert msgspec.json.decode(msgspec.json.encode(output), type=type(output)) == output


def test_outputs_have_the_shape_that_users_of_vllm_know(llm):
    params = SamplingParams(temperature=1, seed=7, max_tokens=5, logprobs=2, prompt_logprobs=1)
    answer = llm.generate("The for statement", params)[0]
    assert answer.finished and answer.request_id.startswith("llm-")
    choice = answer.outputs[0]
    assert choice.finished()
    tokenizer = llm.tokenizer
    for token, position in zip(choice.token_ids, choice.logprobs, strict=True):
        chosen = position[token]
        assert chosen.decoded_token == tokenizer.names.name(token)
        assert float(chosen) == chosen.logprob and next(iter(position)) == token
        likeliest = sorted(position.values(), key=lambda entry: entry.rank)
        assert [e.rank for e in likeliest][:2] == [1, 2]
        assert [e.logprob for e in likeliest] == sorted(map(float, likeliest), reverse=True)
        assert len(position) == (2 if chosen.rank <= 2 else 3)
    total = math.fsum(p[t].logprob for t, p in zip(choice.token_ids, choice.logprobs, strict=True))
    assert choice.cumulative_logprob == total
    scored = answer.prompt_logprobs
    assert scored[0] is None
    for token, position in zip(answer.prompt_token_ids[1:], scored[1:], strict=True):
        assert position[token].rank >= 1 and min(e.rank for e in position.values()) == 1
    bare = llm.generate([[1]], GREEDY)[0].outputs[0]
    assert bare.logprobs is None and bare.cumulative_logprob < 0


def test_all_that_is_left_of_the_context_is_generated(tiny_model):
    with LLM(tiny_model("qwen3", kv_heads=2, layers=1), kv_pages=8, max_model_len=40) as llm:
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, seed=1)
        long, short = llm.generate([[3] * 30, [3]], params)
        assert (len(long.outputs[0].token_ids), len(short.outputs[0].token_ids)) == (10, 39)
        told = llm.generate([[3] * 30], msgspec.structs.replace(params, max_tokens=10))[0]
        assert told.replay_digest == long.replay_digest


def test_without_text_the_tokens_are_the_same(llm):
    shown = llm.generate([[1, 2]], GREEDY)[0]
    bare = llm.generate([[1, 2]], msgspec.structs.replace(GREEDY, detokenize=False, logprobs=1))[0]
    assert shown.outputs[0].text and bare.outputs[0].text == ""
    assert bare.outputs[0].token_ids == shown.outputs[0].token_ids
    assert bare.replay_digest == shown.replay_digest
    assert next(iter(bare.outputs[0].logprobs[0].values())).decoded_token is None


HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def test_a_conversation_is_answered_as_its_rendered_prompt_is(llm):
    ids = llm.get_tokenizer().apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    one = llm.chat(HELLO, GREEDY)
    assert one[0].outputs == llm.generate([ids], GREEDY)[0].outputs
    two = llm.chat([HELLO, HELLO[1:]], [GREEDY, SamplingParams(temperature=0, max_tokens=2)])
    assert two[0].outputs == one[0].outputs and len(two[1].outputs[0].token_ids) == 2
    open_end = llm.chat(HELLO, GREEDY, add_generation_prompt=False)[0].prompt_token_ids
    assert open_end == tuple(ids[: len(open_end)]) and len(open_end) < len(ids)
    tools = [{"type": "function", "function": {"name": "f"}}]
    shown = llm.chat(
        HELLO[1:], GREEDY, chat_template="{{ tools[0].function.name }}Hello", tools=tools
    )
    assert llm.get_tokenizer().decode(shown[0].prompt_token_ids) == "fHello"
    mine = llm.chat(HELLO[1:], GREEDY, chat_template="{{ messages[0]['content'] }}")[0]
    assert mine.prompt_token_ids == tuple(
        llm.get_tokenizer().encode("Hello", add_special_tokens=False)
    )
    settings = {"add_generation_prompt": False, "continue_final_message": True}
    goes_on = llm.chat(HELLO, GREEDY, **settings)[0].prompt_token_ids
    assert goes_on == open_end[: len(goes_on)] and len(goes_on) < len(open_end)
    template = "{% if not word %}unset {% endif %}{{ messages[0]['content'] }}"
    words = {"chat_template": template, "chat_template_kwargs": {"word": "Hello"}}
    spoken = llm.chat(HELLO[1:], GREEDY, **words)
    assert spoken[0].prompt_token_ids == mine.prompt_token_ids
    assert llm.chat(HELLO, GREEDY)[0].outputs == one[0].outputs  # the model's own again


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"messages": "hello"}, "messages is 'hello': give a list"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is missing"),
        ({"messages": [HELLO, "x"]}, r"must be an object with role and content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            r"content\[0\] is of type 'image_url': only the text part of a model is served",
        ),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, r"tools\[0\] must be"),
        ({"messages": HELLO, "continue_final_message": True}, "set add_generation_prompt to false"),
        (
            {"messages": HELLO, "chat_template_kwargs": {"tools": 1}},
            "has 'tools', which is not for",
        ),
        ({"messages": HELLO, "chat_template": "{% if"}, "chat template"),
    ],
)
def test_what_is_no_conversation_is_said_to_be_none(llm, given, message):
    with pytest.raises((RequestError, CheckpointError), match=message):
        llm.chat(**given)
    assert llm.generate([[1]], GREEDY)


def test_after_the_end_every_call_says_so(tiny_model):
    with LLM(tiny_model("qwen3", kv_heads=2, layers=1), kv_pages=8) as llm:
        assert llm.generate([[1]], GREEDY)
    llm.close()
    for call in (lambda: llm.generate([[1]]), lambda: llm.chat(HELLO)):
        with pytest.raises(UsageError, match="this LLM is closed"):
            call()


def test_threads_take_turns(llm):
    alone = llm.generate([[4, 5]], GREEDY)[0]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: llm.generate([[4, 5]], GREEDY)[0], range(8)))
    assert {answer.replay_digest for answer in found} == {alone.replay_digest}

    async def from_a_loop():
        inside = llm.generate([[4, 5]], GREEDY)[0]
        several = [asyncio.to_thread(llm.generate, [[4, 5]], GREEDY) for _ in range(3)]
        return [inside, *(found[0] for found in await asyncio.gather(*several))]

    assert {a.replay_digest for a in asyncio.run(from_a_loop())} == {alone.replay_digest}


class Bar:
    """A progress bar that does something when the first prompt is answered."""

    def __init__(self, act, **_):
        self.act = act

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def update(self):
        act, self.act = self.act, lambda: None
        act()


def ask_and_fail(llm, act):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    return llm.generate([[1], [2], [3]], [short, params, params], lambda **_: Bar(act))


@pytest.mark.parametrize("ahead", [False, True])
def test_what_ends_a_call_between_steps_leaves_it_usable(tiny_model, ahead):
    """A progress bar that raises, Ctrl-C, NaN, and a call inside of a call."""
    with LLM(tiny_model("qwen3", kv_heads=2, layers=1), kv_pages=16) as llm:
        llm.engine.run_ahead = ahead
        before = llm.generate([[4, 5]], GREEDY)[0].replay_digest

        def fail():
            raise ValueError("the bar broke")

        def spoil():
            llm.engine.faults = FaultPoints([Fault(0, 0, "nan-row")], 0)

        def press_twice():  # as a rank of torchrun gets it: from the terminal and from its agent
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

        for act, expected in (
            (fail, ValueError),
            (press_twice, KeyboardInterrupt),
            (lambda: llm.generate([[1]]), UsageError),
            (spoil, NumericalError),
        ):
            with pytest.raises(expected):
                ask_and_fail(llm, act)
            assert not llm.engine.has_work
            llm.engine.check_integrity()
            assert llm.generate([[4, 5]], GREEDY)[0].replay_digest == before
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_known_answers_are_verified_in_steps_ahead_of_results(tiny_model, monkeypatch):
    """Those that a step has no room for are in the next one, which is launched while it runs."""
    monkeypatch.setattr(draft_rows, "MAX_STEP_DRAFTS", 40)
    monkeypatch.setattr(policy, "ROWS_AHEAD", 16)
    with LLM(tiny_model("qwen3", kv_heads=2, layers=1), kv_pages=16) as llm:
        penalised = [{}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.3}]
        params = [
            SamplingParams(seed=row, max_tokens=24, ignore_eos=True, **penalised[row % 3])
            for row in range(8)
        ]
        records = llm.record(llm.generate([[1 + row] for row in range(8)], params), params)
        runner, steps, flying = llm.engine.runner, [], []
        launch, wait = runner.launch, runner.wait

        def launched(plan, results):
            steps.append((len(plan.rows), int(plan.rows.samples.sum()), len(flying)))
            flying.append(plan)
            return launch(plan, results)

        def waited(plan, *others, **named):
            flying.remove(plan)
            return wait(plan, *others, **named)

        monkeypatch.setattr(runner, "launch", launched)
        monkeypatch.setattr(runner, "wait", waited)
        llm.engine.run_ahead = True
        assert llm.check(records) == [None] * 8
        drafted = [step for step in steps if step[1] > step[0]]
        assert len(drafted) == 5 and all(samples - rows <= 40 for rows, samples, _ in drafted)
        assert sum(rows for rows, _, _ in drafted) == 12, "none has one token beside the drafts"
        assert [ahead for _, _, ahead in drafted] == [0, 1, 1, 1, 0], "the last is small"
        ids = [*records[5].outputs[0].token_ids]
        ids[9] ^= 1
        records[5] = planted(records[5], 0, token_ids=tuple(ids))
        found = llm.check(records)
        assert [index for index, one in enumerate(found) if one is not None] == [5]
        assert found[5].position == 9


def test_a_closed_one_holds_no_weights(tiny_model):
    """The next model gets their memory, though the name of this one still stands for it."""
    model = tiny_model("qwen3", kv_heads=2, layers=1)
    llm = LLM(model, kv_pages=16, draft_model=str(model))
    llm.generate([[4, 5]], GREEDY)
    runners = llm.engine.runner, llm.engine.draft_model.runner
    weights = [weakref.ref(runner.model) for runner in runners]
    assert None not in [held() for held in weights]
    named = llm.system_fingerprint
    llm.close()
    assert [held() for held in weights] == [None, None]
    assert llm.closed and llm.engine.runner.model_config.vocab_size
    assert llm.system_fingerprint == named


def test_what_breaks_off_inside_a_step_closes_it_and_says_why(tiny_model, monkeypatch):
    llm = LLM(tiny_model("qwen3", kv_heads=2, layers=1), kv_pages=16)

    def fail(*_):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "launch", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            llm.generate([[4, 5]], GREEDY)
    with pytest.raises(UsageError, match="is closed: it ended by RuntimeError: out of luck"):
        llm.generate([[4, 5]], GREEDY)
    llm.close()


TWO_RANKS = """
import json, os, signal, sys
from tests.llm.test_llm import GREEDY, HELLO, ask_and_fail
from tpdet import LLM, SamplingParams
from tpdet.engine.fault_points import FaultPoints
from tpdet.launch.life.faults import Fault
from tpdet.llm import ranks

def told(call):
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"

ranks.PIECE_BYTES = 100
found = [told(lambda: LLM(sys.argv[1], tensor_parallel_size=1))]
llm = LLM(sys.argv[1], kv_pages=64, tensor_parallel_size=2, step_timeout=20)
before = llm.generate([[4, 5]], GREEDY)[0].replay_digest

def spoil():
    llm.engine.faults = FaultPoints([Fault(0, 0, "nan-row")], llm.rank)

def fail():
    raise ValueError("the bar broke")

def bad_on_one_rank():
    llm.generate([[99999]] if llm.rank else [[1]], GREEDY)

for act in (fail, lambda: os.kill(os.getpid(), signal.SIGINT), spoil):
    found.append(told(lambda: ask_and_fail(llm, act)))
found.append(told(bad_on_one_rank))
found.append(told(lambda: llm.generate([[llm.rank]], GREEDY)))
found.append(told(lambda: llm.generate("a" * 9, {"max_tokens": 2})))
assert llm.generate([[4, 5]], GREEDY)[0].replay_digest == before
found.append(llm.chat(HELLO, GREEDY)[0].replay_digest)
found.append(before)

def leave():
    with llm:
        if llm.rank == 0:
            raise OSError("a script's own error")
        llm.generate([[1]], GREEDY)

found.append(told(leave))
found.append(told(lambda: llm.generate([[1]], GREEDY)))
with open(f"{sys.argv[2]}/{llm.rank}.json", "w") as file:
    json.dump(found, file)
"""


def test_two_ranks_fail_together_and_go_on_together(tiny_model, tmp_path, llm):
    script = tmp_path / "script.py"
    script.write_text(TWO_RANKS)
    run_ranks(2, str(script), tiny_model("qwen3", kv_heads=2, layers=1), tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first[0] == second[0]
    assert "torchrun started 2: start the script with `torchrun --nproc-per-node 1" in first[0]
    assert first[1] == "ValueError: the bar broke"
    assert second[1] == "TpdetError: rank 0 ended this call by ValueError: the bar broke"
    assert [first[2], second[2]] == ["KeyboardInterrupt: "] * 2
    assert first[3] == second[3] and first[3].startswith("NumericalError: ")
    assert first[4].startswith("DisagreementError: rank 1 did not make this call: token id 99999")
    assert second[4].startswith("RequestError: token id 99999")
    assert first[5] == second[5] and "rank 1 called with other prompts" in first[5]
    assert first[6] == second[6] and "use SamplingParams(**" in first[6]
    alone = [llm.chat(HELLO, GREEDY)[0], llm.generate([[4, 5]], GREEDY)[0]]
    assert first[7:9] == second[7:9] == [answer.replay_digest for answer in alone]
    assert first[9] == "OSError: a script's own error"
    assert "rank 0" in second[9] and "gave up: a script's own error" in second[9]
    assert first[10].startswith("UsageError: this LLM is closed: it ended by OSError")
    assert second[10].startswith("UsageError: this LLM is closed: it ended by PeerLostError")


def test_the_examples_of_the_page_run(tiny_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(PooledPrompts, "answering_tokens", lambda self: (17, 900))
    model = tiny_model("qwen3", kv_heads=2, layers=1)
    embeds = sentence_folder(model, tmp_path / "embeds", prompts={"query": "find: "})
    page = (ROOT / "docs" / "offline.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 4
    names = {"DIR": model, "Qwen/Qwen3-Embedding-0.6B": embeds, "Qwen/Qwen3-Reranker-0.6B": model}
    for example in examples:
        code = example.replace("size=2", "size=1").replace('"8k"', '"2k"')
        for name, folder in names.items():
            code = code.replace(f'"{name}"', f"{str(folder)!r}, kv_pages=64")
        exec(code, {"__name__": "__main__"})
        assert len(capsys.readouterr().out.splitlines()) > 1


def test_a_conversation_can_be_seen_as_text(llm):
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert "Be brief." in text
    ids = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_drafts_change_no_answer_and_save_steps(llm):
    """With stop strings, a schema and choices, from the drafts of a first call."""
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    prompts = ["The for statement", [5, 6, 7], "A list", [9] * 40]
    params = [
        SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=2, n=2),
        SamplingParams(temperature=0, seed=1, max_tokens=24, logprobs=0, ignore_eos=True),
        SamplingParams(temperature=1, seed=4, max_tokens=30, logprobs=0, json_schema=schema),
        SamplingParams(temperature=1, seed=5, max_tokens=30, logprobs=0, stop=["e", "t"]),
    ]

    def answer(drafts):
        before = llm.engine.statistics()
        answers = llm.generate(prompts, params, drafts=drafts)
        after = llm.engine.statistics()
        outputs = [(a.outputs, a.replay_digest) for a in answers]
        accepted = after.totals.accepted_draft_tokens - before.totals.accepted_draft_tokens
        return outputs, after.steps - before.steps, accepted

    plain, steps, _ = answer(None)
    told = [[list(choice.token_ids) for choice in outputs] for outputs, _ in plain]
    found, fewer, accepted = answer(told)
    assert found == plain and fewer < steps / 2 and accepted > 50
    wrong = [told[0][0], [told[1][0]], [[token ^ 1 for token in told[2][0]]], None]
    assert answer(wrong)[0] == plain
    predictions = [llm.get_tokenizer().decode(told[0][0]), told[1][0], None, None]
    answers = llm.generate(prompts, params, predictions=predictions)
    assert [(a.outputs, a.replay_digest) for a in answers] == plain
    with pytest.raises(RequestError, match="predictions is 'a', with 4 prompts: give a list"):
        llm.generate(prompts, params, predictions="a")


@pytest.mark.parametrize(
    ("drafts", "why"),
    [
        ([], "with 1 prompts"),
        (["text"], r"drafts\[0\] is 'text': give None, a list of token ids"),
        ([[1, "2"]], r"drafts\[0\]: token 1 is '2', not a token id"),
        ([[[1], [2]]], "2 drafts for 1 choices"),
        ([[10**6]], "token id 1000000 in drafts is outside the vocabulary"),
    ],
)
def test_drafts_that_are_no_token_ids_are_refused(llm, drafts, why):
    with pytest.raises(RequestError, match=why):
        llm.generate([[1, 2, 3]], drafts=drafts)


def planted(record, choice, **values):
    """The record with other values in a choice."""
    outputs = [*record.outputs]
    outputs[choice] = msgspec.structs.replace(outputs[choice], **values)
    return msgspec.structs.replace(record, outputs=tuple(outputs))


def test_recorded_answers_are_checked_in_few_steps_and_differences_named(llm):
    params = [
        SamplingParams(temperature=0.8, seed=3, max_tokens=24, n=2, frequency_penalty=0.5),
        SamplingParams(temperature=1, seed=5, max_tokens=None, stop=["e", "t"], logprobs=2),
    ]
    before = llm.engine.statistics().steps
    outputs = llm.generate(["The for statement", [5, 6, 7]], params)
    made = llm.engine.statistics().steps - before
    records = llm.record(outputs, params)
    again = [msgspec.json.decode(msgspec.json.encode(r), type=type(r)) for r in records]
    assert again == records
    assert llm.check(again) == [None, None]
    assert llm.engine.statistics().steps - before < 1.5 * made
    first = records[0].outputs[1]
    ids, bits = [*first.token_ids], [*first.logprob_bits]
    ids[7] ^= 1
    bits[9] = f"{int(bits[9], 16) ^ 1:08x}"
    shorter = {"token_ids": first.token_ids[:5], "logprob_bits": first.logprob_bits[:5]}
    found = llm.check(
        [
            planted(records[0], 1, token_ids=tuple(ids)),
            planted(records[0], 1, logprob_bits=tuple(bits)),
            planted(records[0], 1, **shorter),
        ]
    )
    assert [(f.choice, f.position) for f in found] == [(1, 7), (1, 9), (1, 5)]
    assert (found[0].recorded.id, found[0].computed.id) == (ids[7], first.token_ids[7])
    assert (found[1].recorded.bits, found[1].computed.bits) == (bits[9], first.logprob_bits[9])
    assert found[2].recorded is None and found[2].computed.id == first.token_ids[5]


def test_what_cannot_be_checked_is_refused_before_it_runs(llm, monkeypatch):
    (record,) = llm.record(llm.generate([[5, 6]]))
    for wrong, kind, said in (
        ({"contract": "0" * 64}, DisagreementError, "contract 0{64}, and this model has"),
        ({"weights": "0" * 64}, DisagreementError, "model digest 0{64}, and this model has"),
        ({"outputs": ()}, RequestError, "has 0 choices, and its parameters n 1"),
        ({"prompt_token_ids": ()}, RequestError, "the prompt is empty"),
    ):
        with pytest.raises(kind, match=said):
            llm.check([record, msgspec.structs.replace(record, **wrong)])
    with pytest.raises(RequestError, match=r"answers\[0\] has token id 1000000"):
        llm.check([planted(record, 0, token_ids=(10**6,), logprob_bits=("0" * 8,))])
    monkeypatch.setattr(llm, "config", llm.config.model_copy(update={"fixed_batch": 4}))
    with pytest.raises(UsageError, match="fixed_batch 4"):
        llm.check([record])
