"""The fixture `golden` and its plugin, in runs of pytest on a tiny model."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.lib.tree import ROOT
from tpdet import LLM
from tpdet.tools.golden.golden_file import read_goldens
from tpdet.tools.golden.pytest_plugin import GoldenUse

pytest_plugins = ["pytester"]

PLUGIN = "tpdet.tools.golden.pytest_plugin"
SHARED: dict[str, object] = {}
CONFTEST = f"""
import pytest
from {__name__} import SHARED

@pytest.fixture
def llm():
    return SHARED["llm"]
"""
TESTS = """
def test_text(golden, llm):
    answer = golden(llm, "The for", max_tokens=6, temperature=0)
    assert len(answer.token_ids) == len(answer.logprob_bits) == 6
    assert answer.body["choices"][0]["text"] == answer.text

def test_several(golden, llm):
    golden(llm, [{"role": "user", "content": "Hi"}], max_tokens=4, n=2)
    golden(llm, [5, 6], max_tokens=3, seed=7)
    golden(llm, "A", name="by name", max_tokens=2)
"""
NAMES = ["test_several", "test_several # 2", "test_several # by name", "test_text"]


@pytest.fixture(scope="module", autouse=True)
def shared_model(tiny_model):
    with LLM(tiny_model("qwen3", kv_heads=2), device="cpu", kv_pages=64) as llm:
        SHARED["llm"] = llm
        yield llm
    SHARED.clear()


@pytest.fixture
def project(pytester, monkeypatch):
    """A folder of tests, and a function that runs them with the plugin."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("CI", "BUILD_NUMBER"):  # set, they make pytest's summary repeat a failure whole
        monkeypatch.delenv(name, raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TESTS)
    pytester.run_golden = lambda *flags: pytester.runpytest_inprocess("-p", PLUGIN, *flags)
    pytester.file = pytester.path / "__golden__" / "test_it.json"
    return pytester


@pytest.fixture
def recorded(project):
    """The folder with its goldens, written once."""
    project.file.parent.mkdir()
    if "goldens" not in SHARED:
        project.run_golden("--tpdet-update").assert_outcomes(passed=2)
        SHARED["goldens"] = project.file.read_bytes()
    project.file.write_bytes(SHARED["goldens"])
    return project


def change(project, name, change_body):
    """Change an answer of the golden file, as an editor would."""
    content = json.loads(project.file.read_text())
    change_body(content["goldens"][name]["response"]["body"])
    project.file.write_text(json.dumps(content))


def test_goldens_are_written_once_and_then_pass_in_any_order(project):
    missing = project.run_golden()
    missing.assert_outcomes(failed=2)
    missing.stdout.fnmatch_lines(
        [
            "*there is no golden 'test_text' in __golden__/test_it.json*",
            "*write it: pytest --tpdet-update, and commit the file*",
        ]
    )
    assert not project.file.exists()
    project.run_golden("--tpdet-update").stdout.fnmatch_lines(["4 written to *test_it.json: *"])
    written = project.file.read_bytes()
    assert sorted(read_goldens(project.file)) == NAMES
    for flags in (("test_it.py::test_several",), ("-k", "text"), ("--tpdet-update",)):
        result = project.run_golden(*flags)
        assert result.ret == 0
        result.stdout.no_fnmatch_line("*golden answers*")
    assert project.file.read_bytes() == written
    SHARED["goldens"] = written


def test_a_golden_file_is_read_in_a_diff(recorded):
    """A line has one field, or at most a hundred columns of numbers."""
    lines = recorded.file.read_text().splitlines()
    assert max(map(len, lines)) <= 100
    assert sum('"token_ids": [' in line for line in lines) == 5
    body = read_goldens(recorded.file)["test_text"]["response"]["body"]
    assert (body["id"], body["created"]) == ("golden", 0) and body["tpdet"]["replay_digest"]
    assert not [line for line in lines if str(recorded.path) in line]


def test_a_failure_names_place_tokens_log_probabilities_and_the_likeliest(recorded):
    def other_token(body):
        body["choices"][0]["token_ids"][3] ^= 1

    change(recorded, "test_text", other_token)
    result = recorded.run_golden()
    result.assert_outcomes(passed=1, failed=1)
    text = result.stdout.str()
    assert "golden 'test_text' of __golden__/test_it.json is not what the model answers now" in text
    assert 'POST /v1/completions {"prompt":"The for","max_tokens":6,"temperature":0}' in text
    assert re.search(r"place +token 4 of 6 \(position 3\), behind '.+'", text)
    number = r"log-probability -\d+\.\d{7} \(bits [0-9a-f]{8}\)"
    for kind in ("recorded", "computed"):
        assert re.search(rf"{kind} +'.*' \(token \d+\), {number}", text), kind
    assert "the 5 likeliest tokens at this place, as computed now:" in text
    likely = re.findall(r"E? +(-\d+\.\d{7}) +\d+ '.*?'(?:   <- (.*))?$", text, re.MULTILINE)
    assert len(likely) == 5 and likely == sorted(likely, key=lambda row: -float(row[0]))
    assert likely[0][1] == "computed"  # greedy
    assert "If this is meant, write it: pytest --tpdet-update" in text
    assert "tools/golden" not in text  # no frame of ours


def test_a_changed_bit_of_a_log_probability_fails(recorded):
    def other_bit(body):
        bits = body["choices"][0]["logprob_bits"]
        bits[2] = f"{int(bits[2], 16) ^ 1:08x}"

    change(recorded, "test_several # 2", other_bit)
    result = recorded.run_golden()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*golden 'test_several # 2'*", "*the same token; its log-probability is off by *1 step*"]
    )


def test_a_golden_of_another_contract_or_weights_is_an_error(recorded):
    change(recorded, "test_text", lambda body: body["tpdet"].update(contract="0" * 64))
    change(recorded, "test_several # 2", lambda body: body["tpdet"].update(weights="1" * 64))
    result = recorded.run_golden()
    result.assert_outcomes(errors=2)
    assert result.ret == 1
    for name, digit in (("test_text", "0"), ("test_several # 2", "1")):
        line = f"*golden '{name}' of * cannot be compared: *{digit * 64}*"
        result.stdout.fnmatch_lines_random([line])
    recorded.run_golden("--tpdet-update").assert_outcomes(passed=2)
    assert recorded.file.read_bytes() == SHARED["goldens"]


def test_another_architecture_is_an_error_only_where_bits_differ(recorded):
    def elsewhere(body):
        body["system_fingerprint"] = body["system_fingerprint"][:-8] + "00000000"

    change(recorded, "test_text", elsewhere)
    recorded.run_golden().assert_outcomes(passed=2)
    change(recorded, "test_text", lambda b: b["choices"][0]["token_ids"].__setitem__(0, 9))
    result = recorded.run_golden()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*cannot be compared: it was recorded on cpu-*"])


def test_a_field_that_later_answers_have_is_no_difference(recorded):
    change(recorded, "test_text", lambda body: body.pop("usage"))
    recorded.run_golden("-k", "text").assert_outcomes(passed=1, deselected=1)
    change(recorded, "test_text", lambda body: body.update(usage={"prompt_tokens": 1}))
    result = recorded.run_golden("-k", "text")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(["*usage.prompt_tokens: recorded 1, computed *"])


def test_another_request_than_the_recorded_one_fails(recorded):
    source = TESTS.replace("max_tokens=6", "max_tokens=7").replace("== 6", "> 5")
    recorded.makepyfile(test_it=source)
    result = recorded.run_golden()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*was recorded for another request:", "*body.max_tokens: recorded 6, asked for now 7"]
    )
    recorded.run_golden("--tpdet-update").assert_outcomes(passed=2)
    recorded.run_golden().assert_outcomes(passed=2)


def test_unused_goldens_are_named_and_deleted_by_an_update(recorded):
    recorded.makepyfile(test_it=TESTS.replace("test_several", "test_new"))
    result = recorded.run_golden("-k", "text")
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(["3 unused in *test_it.json: test_several, test_several # 2, *"])
    recorded.run_golden("test_it.py::test_text").stdout.no_fnmatch_line("* unused in *")
    result = recorded.run_golden("--tpdet-update")
    result.stdout.fnmatch_lines(["3 written to *: test_new, *", "3 unused, deleted from *"])
    assert sorted(read_goldens(recorded.file))[:1] == ["test_new"]
    recorded.makepyfile(test_it="def test_text(): pass")
    result = recorded.run_golden()
    result.stdout.fnmatch_lines(["4 unused in *"])  # a test that passed without it


def test_a_file_that_is_no_golden_file_is_refused(recorded):
    for content, why in (("{", "not valid JSON"), ("{}", "*has format None*tpdet-golden-1*")):
        recorded.file.write_text(content)
        result = recorded.run_golden("-k", "text")
        result.assert_outcomes(failed=1, deselected=1)
        result.stdout.fnmatch_lines([f"*test_it.json*{why}*"])


def test_wrong_arguments_are_refused(project):
    project.makepyfile(
        test_it="""
        import pytest
        from tpdet.errors import UsageError

        def test_it(golden, llm):
            for target, asked, params in (
                (llm, ["a", "b"], {}), (llm, "a", {"stream": True}), (llm, 5, {}),
                (llm, "a", {"stop": object()}), (llm, "a", {"name": ""}),
            ):
                with pytest.raises(UsageError, match="golden"):
                    golden(target, asked, **params)
        """
    )
    project.run_golden("--tpdet-update").assert_outcomes(passed=1)


def test_what_workers_of_xdist_used_is_put_together():
    one, other, all_of_them = GoldenUse(False), GoldenUse(False), GoldenUse(False)
    one.used(Path("a"), "x")
    other.used(Path("a"), "y")
    other.wrote(Path("a"), "y", {})
    for use in (one, other):
        all_of_them.add_report(json.loads(json.dumps(use.report())))
    assert all_of_them.used_names == {("a", "x"), ("a", "y")}
    assert all_of_them.written == {("a", "y")}


@pytest.mark.slow
def test_workers_of_xdist_name_what_none_of_them_used(recorded):
    """The goldens of tests that are in no module, of a run by two processes."""
    recorded.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.parametrize("number", range(6))
        def test_it(golden, number):
            golden._use.used(golden.path, golden._key(None))
        """
    )
    names = {f"test_it[{number}]": {} for number in range(7)}
    recorded.file.write_text(json.dumps({"format": "tpdet-golden-1", "goldens": names}))
    result = recorded.run_golden("-p", "xdist", "-n", "2")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["1 unused in *test_it.json: test_it[[]6]"])


def test_an_install_names_the_plugin_to_pytest():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"tpdet": PLUGIN}


def test_loading_the_plugin_takes_no_torch_and_under_50_milliseconds():
    code = (
        "import sys, pytest, time; begin = time.process_time(); "
        f"import {PLUGIN}; used = time.process_time() - begin; "
        "assert not {'torch', 'numpy', 'msgspec', 'pydantic'} & {*sys.modules}; print(used)"
    )
    command = [sys.executable, "-c", code]
    # The first start may compile modules; a busy machine slows one start or another.
    assert any(float(subprocess.check_output(command)) < 0.05 for _ in range(5))
