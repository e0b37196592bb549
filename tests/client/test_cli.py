"""The command line: its commands and flags are frozen, and each does what it says."""

import argparse
import json
import re
import subprocess
import sys

import pytest

from tests.lib.forked import run_forked
from tpdet.cli import command_parser, main
from tpdet.client.engine_settings import engine_config
from tpdet.errors import UsageError
from tpdet.requests.request import SamplingParams
from tpdet.server.settings.settings import make_parser

pytestmark = pytest.mark.long


def tpdet(*arguments):
    """`server/commands/test_real_starts.py` starts what users do."""
    return run_forked("tpdet", *arguments)


def test_the_commands_are_those_users_know():
    done = tpdet("--help")
    assert done.returncode == 0
    for command in (
        "serve",
        "generate",
        "score",
        "check",
        "golden",
        "certify",
        "verify",
        "bench",
        "make-model",
        "env",
        "stop",
        "chat",
        "complete",
        "run-batch",
        "launch",
        "plan",
        "tune",
        "reload",
    ):
        assert command in done.stdout


def test_the_servers_flags_keep_their_names():
    done = tpdet("serve", "--help")
    assert done.returncode == 0, done.stderr
    for flag in (
        "--model",
        "--revision",
        "--tokenizer",
        "--chat-template",
        "--load-format",
        "--host",
        "--port",
        "--served-model-name",
        "--api-key-file",
        "--max-model-len",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--gpu-memory-utilization",
        "--kv-pages",
        "--enable-prefix-caching",
        "--no-enable-prefix-caching",
        "--dtype",
        "--seed",
        "--device",
        "--transport",
        "--fold-order",
        "--row-layers",
        "--leaves",
        "--run-dir",
        "--start-timeout",
        "--step-timeout",
        "--drain-timeout",
        "--max-queue",
        "--config",
        "--print-limits",
        "--tp",
        "--tensor-parallel-size",
        "-tp",
    ):
        assert flag in done.stdout, flag


def test_limits_are_printed_as_json():
    done = tpdet("serve", "--print-limits")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_env_prints_what_may_change_bits(capsys):
    assert main(["env"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"].startswith("cpu-")
    assert {"code", "blas", "cpu capability", "package torch"} <= facts.keys()


def test_make_model_and_generate_answer_reproducibly(tmp_path, capsys):
    """By this process and by another one."""
    model = str(tmp_path / "model")
    shape = ["--like", "llama", "--hidden", "128", "--layers", "1", "--heads", "2"]
    assert main(["make-model", model, *shape, "--vocab", "1024"]) == 0
    capsys.readouterr()
    asked = ["generate", model, "--prompt", "The list", "--max-tokens", "5", "--json"]
    asked += ["--temperature", "0.9", "--seed", "4"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    other = tpdet(*asked)
    assert (other.returncode, other.stdout) == (0, text), other.stderr
    (output,) = [json.loads(line) for line in text.splitlines()]
    assert output["seed"] == 4 and len(output["outputs"][0]["token_ids"]) <= 5


def test_generate_puts_a_message_into_the_chat_template(tiny_model, capsys, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}|{% endfor %}")
    asked = ["generate", str(tiny_model("qwen3")), "--seed", "1", "--max-tokens", "2", "--json"]
    chat = ["--chat", "--chat-template", str(template), "--system", "a", "--prompt", "b"]
    ids = []
    for given in (chat, ["--prompt", "a|b|"]):
        assert main([*asked, *given]) == 0
        ids.append(json.loads(capsys.readouterr().out)["prompt_token_ids"])
    assert ids[1][-len(ids[0]) :] == ids[0]  # beside what begins a text
    assert main([*asked, "--chat", "--chat-template", "nope", "--prompt", "b"]) == 66
    assert "chat template nope does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_writes_its_rows(tiny_model, tmp_path):
    """`bench throughput` does in `tools/bench/test_bench.py`."""
    output = tmp_path / "latency.json"
    done = tpdet(
        "bench",
        tiny_model("qwen3"),
        "--batch",
        "1,2",
        "--prompt-tokens",
        8,
        "--prefill-tokens",
        32,
        "--steps",
        2,
        "--output",
        output,
    )
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(output.read_text())
    assert [row["case"] for row in run["rows"]][:2] == ["decode", "decode"]
    assert all(row["value"] > 0 for row in run["rows"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "/nowhere", "--prompt", "x"], 66, "is not a directory"),
        (["stop", "/nowhere"], 2, "is not a run directory"),
        (["make-model", "X", "--like", "llama", "--vocab", "10"], 2, "use 1024 to"),
        (["make-model", "X", "--like", "llama", "--heads", "6", "--kv-heads", "4"], 2, "divide"),
        (["make-model", "/proc/no/x", "--like", "llama"], 2, "/proc/no/x cannot be made"),
        (["compile", "m", "--gpu", "h200", "--output", "/proc/no/x"], 2, "/proc/no/x cannot be"),
        (["verify", "--output", "/proc/no/x"], 2, "--output: '/proc/no/x' cannot be written"),
        (["chat", "nowhere", "hello"], 2, "'nowhere' is no model directory and no GGUF file"),
        (["verify", "--tp", "one"], 2, "not a list of numbers"),
        (["serve", "x", "--tp", "99"], 2, "--tp: 99 is out of range"),
        (["serve", "x", "--tp", "x"], 2, "--tp: 'x' is not a whole number"),
        (["serve"], 2, "no model is given"),
        (["serve", "--config", "/nowhere.toml"], 66, "does not exist"),
    ],
)
def test_mistakes_have_their_exit_codes_and_a_remedy(
    tmp_path, monkeypatch, capfd, arguments, code, message
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "no command 'nothing': use one of serve, "),
        (["serv", "m"], "did you mean 'serve'?"),
        (["verify", "--surprise"], "unknown flag --surprise: see tpdet verify --help"),
        (["verify", "--divice", "cpu"], "did you mean --device? See tpdet verify --help"),
        (["verify", "--device", "gpu"], "--device: 'gpu' is none of auto, cpu, cuda"),
        (["bench", "foo"], "no benchmark 'foo': use one of latency, "),
        (["bench", "latncy", "m"], "did you mean 'latency'?"),
        (["bench", "latency", "m", "--fold-order", "pear"], "none of sequential, pairs, tree"),
        (["bench", "serve", "--requests", "many"], "--requests: 'many' is not a whole number"),
        (["generate", "m"], "are required: --prompt: see tpdet generate --help"),
        (["generate", "m", "--prompt", "x", "--max-model-len", "2x"], "--max-model-len: '2x'"),
        (["generate", "m", "--prompt", "x", "--temperature", "nan"], "'nan' is not a number"),
        (["generate", "m", "--prompt", "x", "--temperature", "-1"], "tpdet: --temperature -1.0 "),
        (["make-model", "X", "--like", "lama"], "did you mean 'llama'?"),
        (
            ["make-model", "X", "--like", "llama", "--vocab", "10"],
            "--vocab 10: use 1024 to 1048576",
        ),
        (["generate", "m", "--prompt", "x", "--system", "s"], "--system counts with --chat only"),
        (["stop"], "are required: RUN_DIR: see tpdet stop --help"),
        (["launch", "slrum"], "'slurm'"),
    ],
)
def test_unknown_names_get_the_nearest_and_mistakes_one_line(capsys, arguments, message):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("tpdet: ") and err.count("\n") == 1


def test_alone_it_shows_an_overview_with_an_example_of_each_command(capsys):
    assert main([]) == 2
    err = capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert text == err
    for command in command_parser()._subparsers._group_actions[0].choices:
        assert f"\n  tpdet {command}" in text, command


def leaves(parser):
    """Every parser of a command, its subcommands' too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from leaves(child)
    yield parser


def test_every_flag_has_a_help_and_a_word_for_its_value():
    for parser in [*leaves(command_parser()), make_parser("tpdet serve")]:
        if parser.prog in ("tpdet serve", "tpdet launch") and len(parser._actions) == 1:
            continue  # their flags are the server's
        assert parser.description, parser.prog
        text = parser.format_help()
        for action in parser._actions:
            if action.help == argparse.SUPPRESS or not action.option_strings:
                continue
            assert action.help, f"{parser.prog} {action.option_strings}"
            assert " STR" not in text and " INT\n" not in text and "(default False)" not in text
            usual = action.default
            if type(usual) in (int, str) and usual != argparse.SUPPRESS:
                assert "default" in parser.formatter_class("x")._get_help_string(action)


def test_help_is_instant_and_needs_no_torch():
    code = (
        "import sys; from tpdet.cli import main\n"
        "for a in (['--help'], ['serve', '--help'], ['generate', '--help'], ['chat', '--help'],"
        " ['score', '--help'], ['bench', 'serve', '--help'], ['plan', '--help'],"
        " ['tune', '--help']):\n"
        "    try: main(a)\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_generate_has_the_defaults_of_the_api_and_says_so(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    usual = SamplingParams()
    for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p"):
        flag, value = "--" + name.replace("_", "-"), getattr(usual, name)
        assert re.search(rf"{flag} \S+ [^-]*-?[^-]*\(default {value}\)", text), flag
    given = command_parser().parse_args(["generate", "m", "--prompt", "x"])
    for name in ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos"):
        assert getattr(given, name) == getattr(usual, name), name


def test_generate_takes_an_engines_settings_from_flags_environment_and_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(
        'model = "f"\nport = 8000\nhost = "0.0.0.0"\nmax_num_seqs = 4\ndtype = "half"\n'
    )
    arguments = ["generate", "--prompt", "x", "--config", str(file), "--max_model_len", "2k"]
    environ = {"TPDET_MAX_NUM_SEQS": "5", "TPDET_KV_PAGES": "9", "TPDET_HOST": "0.0.0.0"}
    found = engine_config(command_parser().parse_args(arguments), environ)
    assert (found.model, found.max_model_len, found.dtype) == ("f", 2000, "float16")
    assert (found.max_num_seqs, found.kv_pages) == (5, 9)
    with pytest.raises(UsageError, match="TPDET_KV_PAGES: 0 is out of range"):
        engine_config(command_parser().parse_args(arguments), {"TPDET_KV_PAGES": "0"})
