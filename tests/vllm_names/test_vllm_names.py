"""vLLM's names: each exists, or the error of its import says what replaces it."""

import dataclasses
import importlib
import inspect
import subprocess
import sys

import pytest

import tpdet
from tpdet import LLM, EngineArgs, LLMEngine
from tpdet.errors import RequestError, UsageError
from tpdet.llm.vllm_keywords import KEYWORDS, METHODS
from tpdet.vllm_names.finder import vllm_names

FOUND, REPLACED, MODULES, NO_MODULES = vllm_names()
TOP = [name for name in tpdet.__all__ if name != "__version__"]


@pytest.mark.parametrize("module", ["", *sorted(MODULES)])
def test_every_name_of_a_module_is_there_or_says_what_replaces_it(module):
    found = importlib.import_module(f"tpdet.{module}".rstrip("."))
    names = MODULES.get(module, (*TOP, *REPLACED))
    for name in names:
        if name in FOUND:
            place, _, attribute = FOUND[name].partition(":")
            assert getattr(found, name) is getattr(importlib.import_module(place), attribute)
        else:
            with pytest.raises(ImportError, match=f"has no {name}: ") as refused:
                exec(f"from {found.__name__} import {name}", {})
            assert REPLACED[name] in str(refused.value)
    assert {n for n in dir(found) if not n.startswith("_")} == {n for n in names if n in FOUND}


def test_all_names_of_the_table_are_in_some_module():
    held = {name for names in MODULES.values() for name in names} | {*TOP}
    assert {*FOUND} <= held and held <= {*FOUND, *REPLACED}


@pytest.mark.parametrize("name", sorted(NO_MODULES))
def test_a_module_that_is_missing_says_so(name):
    for path in (f"tpdet.{name}", f"tpdet.{name}.image"):
        with pytest.raises(ModuleNotFoundError, match=f"there is no tpdet.{name}: "):
            importlib.import_module(path)


def test_what_nobody_has_is_python_s_own_error():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'tpdet\.nonsense'"):
        importlib.import_module("tpdet.nonsense")
    with pytest.raises(AttributeError, match="no attribute 'SamplingParam': did you mean 'Samp"):
        tpdet.SamplingParam  # noqa: B018
    assert not hasattr(tpdet, "nonsense") and not hasattr(tpdet, "__wrapped__")


def test_dir_lists_what_there_is_and_imports_no_torch():
    assert dir(tpdet) == sorted(tpdet.__all__)
    code = "import tpdet, sys; dir(tpdet); from tpdet.inputs import TokensPrompt; from tpdet import"
    code += " SamplingParams, EngineArgs, LLMEngine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_methods_of_vllm_say_what_to_use_instead():
    llm = object.__new__(LLM)
    for name, remedy in METHODS.items():
        assert not hasattr(llm, name)
        with pytest.raises(AttributeError) as refused:
            getattr(llm, name)
        assert str(refused.value) == f"LLM has no {name}: {remedy}"
    with pytest.raises(AttributeError, match=r"^LLM has no nonsense$"):
        llm.nonsense  # noqa: B018


def test_engine_args_are_the_settings_of_llm():
    args = EngineArgs("DIR", max_num_seqs=3, trust_remote_code=False, swap_space=4)
    settings = dataclasses.asdict(args)
    shown = inspect.signature(LLM.__init__).parameters
    assert {*settings} == {*shown} - {"self", "of_vllm", "on_slowdown", "max_slowdown"}
    assert settings.pop("model") == "DIR" and settings.pop("max_num_seqs") == 3
    assert settings == {name: shown[name].default for name in settings}
    with pytest.raises(UsageError, match="unknown setting 'max_num_seq': did you mean 'max_num_s"):
        EngineArgs(model="DIR", max_num_seq=3)
    with pytest.raises(UsageError, match="enable_lora cannot be honoured: adapters"):
        EngineArgs(model="DIR", enable_lora=True)
    with pytest.raises(UsageError, match="engine_args is a str: give EngineArgs"):
        LLMEngine.from_engine_args("DIR")
    with pytest.raises(RequestError, match=r"stat_loggers .* is not supported: a server has"):
        LLMEngine.from_engine_args(args, stat_loggers=[print])


def test_engine_args_come_from_a_command_line_too(capsys):
    import tpdet.utils

    parser = EngineArgs.add_cli_args(tpdet.utils.FlexibleArgumentParser())
    parser.add_argument("--max-tokens", type=int)
    parser.set_defaults(model="DIR")
    line = "--max_model_len=2k --enforce-eager -tp 2 --swap-space 4 --no-enable-prefix-caching"
    read = parser.parse_args([*line.split(), "--dtype", "bf16", "--max-tokens", "7", "--seed=5"])
    assert read.swap_space == "4" and read.max_tokens == 7
    changed = {"tensor_parallel_size": 2, "max_model_len": "2k", "dtype": "bf16", "seed": 5}
    switched = {"enforce_eager": True, "enable_prefix_caching": False}
    assert EngineArgs.from_cli_args(read) == EngineArgs("DIR", **changed, **switched)
    assert "trust_remote_code" not in parser.parse_args([])
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "--max-model-len TOKENS" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(KEYWORDS))
def test_keywords_of_calls_that_ask_for_nothing_are_taken(name):
    from tpdet.llm.vllm_keywords import refuse_what_asks

    remedy, *idle = KEYWORDS[name]
    for value in (None, [None, None], *idle):
        refuse_what_asks("generate", {name: value}, ())
    with pytest.raises(RequestError, match="is not supported") as refused:
        refuse_what_asks("generate", {name: "surprise"}, ())
    assert remedy in str(refused.value)
    with pytest.raises(TypeError, match="keyword argument 'draft': did you mean 'drafts'"):
        refuse_what_asks("generate", {"draft": 1}, ("drafts",))


def test_a_sampling_parameter_beside_the_prompts_says_where_it_belongs():
    llm = object.__new__(LLM)
    with pytest.raises(
        TypeError, match=r"'top_p': give it in sampling_params=SamplingParams\(top_"
    ):
        llm.generate("Hi", top_p=0.5)
    with pytest.raises(TypeError, match=r"keyword argument 'draft': did you mean 'drafts'"):
        llm.generate("Hi", draft=[[1]])
