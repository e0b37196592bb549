"""Flags, TOML, keys: what a server is started with, and what is refused."""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.lib.server.harness import Server, write_tokenizer
from tests.lib.tree import ROOT
from tpdet.errors import NotFoundError, NotPermittedError, UsageError
from tpdet.server.settings.flags import GROUPS
from tpdet.server.settings.keys import KeyRing, read_key_file
from tpdet.server.settings.settings import SETTINGS, load_settings, make_parser
from tpdet.server.settings.sources import KEY_VARIABLES, OTHER_VARIABLES, forget_settings
from tpdet.server.wire.protocol import socket_address

# Frozen: operators' scripts and unit files hold these names.
FLAGS = """
    --admin-insecure --admin-key-file --admin-listen --allow-faults --answer-cache
    --answer-cache-bytes --api-key-file --approximate --audit-dir --audit-key --audit-policy
    --batch-dir --batch-dir-bytes
    --batch-swing-alarm --canary-interval --chat-template --chat-template-date --compile-ahead
    --config --device --disable-log-stats --disable-uvicorn-access-log --draft-model --drafts
    --drain-timeout --dtype --enable-prefix-caching --enable-return-routed-experts --enforce-eager
    --experts --fixed-batch --fold-order --gpu-memory-utilization --help --host --http-processes
    --kernel-cache --kv-cache-dtype --kv-pages --leaves --load-format --logprobs-mode
    --max-model-len --max-num-batched-tokens --max-num-seqs --max-queue --max-slowdown --model
    --no-admin-insecure
    --no-allow-faults --no-approximate --no-compile-ahead --no-disable-log-stats
    --no-disable-uvicorn-access-log
    --no-enable-prefix-caching --no-enable-return-routed-experts --no-enforce-eager
    --no-skip-tokenizer-init --on-slowdown --port --print-limits --reasoning-parser --revision
    --row-layers --run-dir --run-secret-file --seed --seed-policy --served-model-name --share-draws
    --skip-tokenizer-init --start-timeout --step-timeout --task --tensor-parallel-size --tokenizer
    --tool-call-parser --tp
    --transport --weights --weights-peers --weights-root --weights-timeout
"""


def load(*arguments: str):
    return load_settings(arguments, "test")


def test_the_flags_are_the_ones_operators_know():
    parser = make_parser("test")
    shown = [a for a in parser._actions if a.help != argparse.SUPPRESS]
    found = [o for a in shown for o in a.option_strings if o.startswith("--")]
    assert sorted(found) == FLAGS.split()


def test_the_command_line_wins_over_the_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('model = "a"\nmax-num-seqs = 4\nport = 1234\ndrain_timeout = 3\n')
    found = load("--config", str(file), "--max-num-seqs", "8")
    assert found.engine.model == "a" and found.engine.max_num_seqs == 8
    assert found.server.port == 1234 and found.server.drain_timeout == 3.0
    assert found.served_name == "a"
    assert load("b", "--config", str(file)).engine.model == "b"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "--model"),
        (("a", "--model", "b"), "two models"),
        (("a", "--nope"), "--nope"),
        (("a", "--max-queu", "3"), "--max-queu"),
        (("a", "b"), "b"),
        (("a", "--max-queue", "0"), "--max-queue: 0 is out of range: use 1 or more"),
        (("a", "--max-queue", "many"), "--max-queue: 'many' is not a whole number"),
        (("a", "--port", "80x"), "--port: '80x' is not a whole number$"),
        (("a", "--seed", "1.5"), "--seed: '1.5' is not a whole number$"),
        (("a", "--max-model-len", "1.5K"), r"--max-model-len: '1.5K' .* use 1\.5k"),
        (("a", "--fold-order", "random"), "--fold-order: 'random' is none of sequential, pairs"),
        (("a", "--dtype", "bfloat61"), "did you mean 'bfloat16'"),
        (("a", "--drain-timeout", "-1"), "--drain-timeout"),
        (("a", "--host", "0.0.0.0"), "--host 0.0.0.0 .* --api-key-file, or set TPDET_API_KEY"),
        (("a", "--max-modle-len", "2k"), "did you mean --max-model-len[?] See test --help"),
        (
            ("a", "--fixed-batch", "9", "--max-num-seqs", "8"),
            "--fixed-batch 9 is over --max-num-",
        ),
        (("a", "--approximate", "--row-layers", "gather"), "need --row-layers fold"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(arguments, word):
    with pytest.raises(UsageError, match=word):
        load(*arguments)


@pytest.mark.parametrize("text", ["nope = 1", "port = 1\nmodel = ", "max-queue=1\nmax_queue=2"])
def test_a_wrong_file_is_refused(tmp_path, text):
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(UsageError):
        load("a", "--config", str(file))
    with pytest.raises(NotFoundError):
        load("a", "--config", str(tmp_path / "other"))


def test_print_limits_prints_json_and_ends(capsys):
    with pytest.raises(SystemExit) as ended:
        load("--print-limits")
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["body_bytes"] == 10 << 20


def test_a_flag_is_spelled_with_either_line_and_sizes_take_suffixes():
    found = load(
        "a",
        "--max_model_len=2k",
        "--max_num_batched_tokens",
        "8K",
        "-tp",
        "4",
        "--dtype",
        "bf16",
        "--no-enable_prefix_caching",
    )
    assert (found.engine.max_model_len, found.engine.max_num_batched_tokens) == (2000, 8192)
    assert found.world.tp == 4 and found.engine.dtype == "bfloat16"
    assert not found.engine.enable_prefix_caching


def test_the_ranks_get_what_was_resolved_and_nothing_else(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('tp = 2\nmax-num-seqs = 4\ncompile_ahead = false\nmax_model_len = "2k"\n')
    environ = {"TPDET_PORT": "0", "TPDET_DRAIN_TIMEOUT": "3", "TPDET_MAX_NUM_SEQS": "5"}
    first = load_settings(["--config", str(file), "--api_key_file=-k", "--model=-m"], "t", environ)
    assert first.world.tp == 2
    again = load_settings(first.rank_arguments(), "tpdet.serve", {})
    assert (again.engine, again.server) == (first.engine, first.server)
    assert again.engine.max_num_seqs == 5 and again.engine.max_model_len == 2000
    assert again.world.tp is None and not again.engine.compile_ahead


def test_flag_wins_over_environment_over_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('model = "m"\nport = 1\nmax_queue = 1\nseed = 1\n')
    environ = {
        "TPDET_CONFIG": str(file), "TPDET_PORT": "2", "TPDET_MAX_QUEUE": "2k",
        "TPDET_ENABLE_PREFIX_CACHING": "off", "TPDET_TP": "2", "TPDET_DTYPE": "half",
        "TPDET_STEP_TIMEOUT": "2.5", "TPDET_HOST": "",
    }  # fmt: skip
    found = load_settings(["--port", "3"], "test", environ)
    assert (found.server.port, found.engine.max_queue, found.engine.seed) == (3, 2000, 1)
    assert not found.engine.enable_prefix_caching and found.world.tp == 2
    assert found.engine.dtype == "float16" and found.engine.step_timeout == 2.5
    assert found.server.host == "127.0.0.1" and not found.notes


def test_a_reasoning_parser_has_vllms_names_too():
    for name, own in (("qwen3", "think"), ("openai_gptoss", "harmony"), ("auto", "auto")):
        assert load("m", "--reasoning-parser", name).server.reasoning_parser == own
        assert load("m", "--reasoning-parser", own).server.reasoning_parser == own
    assert load("m").server.reasoning_parser == "off"
    with pytest.raises(UsageError, match="'qwen9' is none of off, auto, think, harmony"):
        load("m", "--reasoning-parser", "qwen9")


def test_a_parser_of_calls_has_both_engines_names():
    names = "hermes", "qwen3_xml", "glm47", "openai", "gpt-oss", "llama3", "phi4_mini_json", "auto"
    own = "hermes", "qwen3_coder", "glm", "harmony", "harmony", "llama3_json", "phi4_mini", "auto"
    loaded = [load("m", "--tool-call-parser", name).server.tool_call_parser for name in names]
    assert loaded == [*own]
    with pytest.raises(UsageError, match="'kimi_k2' is none of off, auto, hermes"):
        load("m", "--tool-call-parser", "kimi_k2")
    for flag in ("--tool-call-parser", "--reasoning-parser"):
        with pytest.raises(UsageError, match="'hf' would read a checkpoint's own response_temp"):
            load("m", flag, "hf")


def test_tp_has_its_long_name_everywhere(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("tensor_parallel_size = 2\n")
    assert load("m", "--config", str(file)).world.tp == 2
    assert load("m", "--tensor_parallel_size", "2").world.tp == 2
    environ = {"TPDET_TENSOR_PARALLEL_SIZE": "2"}
    assert load_settings(["m"], "t", environ).world.tp == 2
    forget_settings(environ)
    assert not environ
    with pytest.raises(UsageError, match="TPDET_TENSOR_PARALLEL_SIZE and TPDET_TP are set"):
        load_settings(["m"], "t", {"TPDET_TP": "2", "TPDET_TENSOR_PARALLEL_SIZE": "2"})


def test_every_setting_has_its_variable():
    for name in SETTINGS:
        if name not in ("nodes", "allow_faults", "admin_insecure"):
            variable = f"TPDET_{name.upper()}"
            try:
                found = load_settings(["--model=m"], "test", {variable: "1"})
            except UsageError as error:
                assert variable in str(error) or "allow" in variable, error
            else:
                assert found.spelled.get(name) in (variable, "--model"), name


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({"TPDET_PORT": "http"}, "TPDET_PORT: 'http' is not a whole number"),
        ({"TPDET_MAX_NUM_SEQS": "0"}, "TPDET_MAX_NUM_SEQS: 0 is out of range"),
        ({"TPDET_ENFORCE_EAGER": "maybe"}, "TPDET_ENFORCE_EAGER: 'maybe' is not true or false"),
        ({"TPDET_ALLOW_FAULTS": "1"}, "TPDET_ALLOW_FAULTS does not count: give --allow-faults"),
        ({"TPDET_HOST": "0.0.0.0"}, "TPDET_HOST 0.0.0.0 can be reached"),
        ({"TPDET_API_KEY": "a", "VLLM_API_KEY": "b"}, "hold different keys"),
        ({"TPDET_API_KEY": "a b"}, "TPDET_API_KEY is not printable"),
        ({"TPDET_API_KEY": "a", "TPDET_API_KEY_FILE": "f"}, "TPDET_API_KEY_FILE are set"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(environ, word):
    with pytest.raises(UsageError, match=word):
        load_settings(["m"], "test", environ)


def test_an_unknown_variable_is_noted_with_the_nearest_one():
    environ = {"TPDET_PROT": "1", "TPDET_COLOUR": "red", "TPDET_SESSION": "s", "TPDET_TEST": "{}",
               "OTHER": "1"}  # fmt: skip
    assert load_settings(["m"], "test", environ).notes == (
        "TPDET_COLOUR in the environment is no setting: unset it",
        "TPDET_PROT in the environment is no setting: did you mean TPDET_PORT?",
    )


def test_what_kubernetes_sets_for_a_service_of_this_name_is_no_setting():
    links = {
        "TPDET_PORT": "tcp://10.0.0.1:8000", "TPDET_SERVICE_HOST": "10.0.0.1",
        "TPDET_SERVICE_PORT": "8000", "TPDET_SERVICE_PORT_HTTP": "8000",
        "TPDET_PORT_8000_TCP": "tcp://10.0.0.1:8000", "TPDET_PORT_8000_TCP_ADDR": "10.0.0.1",
        "TPDET_API_PORT": "tcp://10.0.0.1:8000", "TPDET_API_SERVICE_HOST": "10.0.0.1",
    }  # fmt: skip
    found = load_settings(["m"], "test", links)
    assert found.server.port == 8000 and not found.notes


def test_no_variable_of_ours_is_unknown():
    """Every TPDET_ name in the sources and templates is a setting, or is known to be none."""
    root = ROOT
    places = [*(root / "tpdet").rglob("*.py"), *(root / "launch").rglob("*.*"),
              *(root / "comm").rglob("*.py")]  # fmt: skip
    found = {
        name
        for path in places
        if path.is_file() and path.suffix in (".py", ".sbatch")
        for name in re.findall(r"\bTPDET_[A-Z][A-Z_]*[A-Z]\b", path.read_text())
    }
    known = {f"TPDET_{name.upper()}" for name in SETTINGS} | OTHER_VARIABLES
    examples = {"TPDET_SERVICE", "TPDET_PORT", "TPDET_TEST"}
    assert found - known - examples == set() and OTHER_VARIABLES & found


def test_an_api_key_in_the_environment_is_a_key_and_stays_out_of_sight(tmp_path):
    digest = hashlib.sha256(b"sk-1").hexdigest()
    for variable in KEY_VARIABLES:
        found = load_settings(["m", "--host", "0.0.0.0"], "test", {variable: " sk-1 "})
        assert found.api_key_digest == digest
        assert "sk-1" not in repr(found) and digest not in repr(found)
    file = tmp_path / "c.toml"
    file.write_text('api_key_file = "f"\n')
    over_file = load_settings(["m", "--config", str(file)], "test", {"TPDET_API_KEY": "sk-1"})
    assert over_file.api_key_digest == digest and over_file.server.api_key_file is None
    flag = load_settings(["m", "--api-key-file", "f"], "test", {"TPDET_API_KEY": "sk-1"})
    assert flag.api_key_digest is None and flag.server.api_key_file == "f"


def test_settings_and_keys_leave_the_environment_and_nothing_else():
    environ = {"TPDET_PORT": "1", "TPDET_API_KEY": "a", "VLLM_API_KEY": "a", "TPDET_CONFIG": "c",
               "TPDET_PROT": "x", "TPDET_SESSION": "s", "TPDET_FAULTS": "f",
               "PATH": "p"}  # fmt: skip
    forget_settings(environ)
    assert environ == {"TPDET_SESSION": "s", "TPDET_FAULTS": "f", "PATH": "p"}


def test_arguments_of_vllm_for_what_is_always_so_are_noted(tmp_path):
    found = load(
        "a",
        "--trust-remote-code",
        "--enable_chunked_prefill",
        "--swap-space",
        "4",
        "--generation-config=vllm",
        "--disable-log-requests",
    )
    assert len(found.notes) == 5
    assert "--trust-remote-code changes nothing: no code of a model is ever run" in found.notes
    file = tmp_path / "c.toml"
    file.write_text("enable-chunked-prefill = true\n")
    (note,) = load("a", "--config", str(file)).notes
    assert note.startswith(f"enable-chunked-prefill in {file} changes nothing")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--api-key", "sk-9"), "--api-key-file, or set TPDET_API_KEY"),
        (("--no-enable-chunked-prefill",), "--no-enable-chunked-prefill cannot be honoured"),
        (("--quantization", "awq"), "--quantization cannot be honoured"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size takes only 1"),
        (("--apikey", "sk-9"), "unknown flag --apikey"),
    ],
)
def test_arguments_of_vllm_that_cannot_be_honoured(arguments, word):
    with pytest.raises(UsageError, match=word) as caught:
        load("a", *arguments)
    assert "sk-9" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('port = "8000"', "port in .*: '8000' is not a whole number: write it without quotes"),
        ('enforce_eager = "true"', "write it without quotes"),
        ("port = 8000.5", "not a whole number"),
        ("max_modle_len = 5", "unknown key max_modle_len in .*: did you mean 'max_model_len'"),
        ('api_key = "sk-9"', "--api-key-file"),
        ("fold-order = 3", "fold-order in"),
        ("max-queue = 0", "max-queue in .*: 0 is out of range"),
        ("[server]\nport = 1", r"without a section such as \[server\]"),
        ("tp = 1\ntensor-parallel-size = 1", "'tp' and 'tensor-parallel-size': leave one"),
    ],
)
def test_a_files_values_have_the_types_of_the_settings(tmp_path, text, word):
    file = tmp_path / "c.toml"
    file.write_text(text + "\n")
    with pytest.raises(UsageError, match=word) as caught:
        load("a", "--config", str(file))
    assert "sk-9" not in str(caught.value)


def test_a_number_of_ranks_has_to_be_the_launchers(tmp_path):
    load("a", "--tp", "2").check_size(2)
    with pytest.raises(UsageError, match="--tp 4, but the launcher started 2"):
        load("a", "--tp", "4").check_size(2)
    with pytest.raises(UsageError, match="TPDET_TP 4, but the launcher started 1 rank:"):
        load_settings(["a"], "t", {"TPDET_TP": "4"}).check_size(1)
    file = tmp_path / "c.toml"
    file.write_text("tp = 4\n")
    load("a", "--config", str(file)).check_size(2)  # the planner's


def test_every_setting_stands_in_one_group_of_the_help_and_everyday_ones_come_first():
    named = [name for names in GROUPS.values() for name in names]
    assert len(set(named)) == len(named)
    assert {*named} - {"config", "print_limits"} == {*SETTINGS} - {"nodes"}
    text = make_parser("tpdet serve").format_help()
    places = [
        text.index(f"\n  --{name}")
        for name in (
            "model",
            "host",
            "port",
            "max-model-len",
            "api-key-file",
            "dtype",
            "device",
            "config",
            "revision",
            "kv-pages",
        )
    ]
    assert places == sorted(places) and "\neveryday:\n" in text
    assert "(default 8000)" in text and "{auto,cpu,cuda}" in text and "TPDET_MAX_MODEL_LEN" in text


SUPERVISED = (
    "import sys; from functools import partial; from tpdet.server.commands import supervised; "
    "supervised.check_start = lambda *_: None; "  # the fake ranks' model is none
    "supervised.serve = partial(supervised.serve, program=('-m', 'tests.lib.server.fake_rank')); "
    "sys.exit(supervised.serve_command(sys.argv[1:]))"
)


def test_secrets_of_the_environment_reach_the_server_and_no_childs_environment(tmp_path):
    write_tokenizer(tmp_path / "model")
    run, secret = tmp_path / "run", "ab" * 32
    environ = os.environ | {
        "TPDET_API_KEY": "sk-hidden",
        "TPDET_RUN_SECRET": secret,
        "TPDET_RUN_DIR": str(run),
        "TPDET_SERVED_MODEL_NAME": "demo",
        "TPDET_PORT": "0",
        "TPDET_PROT": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISED, str(tmp_path / "model"), "--swap-space", "4"],
        cwd=ROOT,
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (run / "ready.json").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        url = json.loads((run / "ready.json").read_text())["url"]
        assert httpx.get(f"{url}/v1/models").status_code == 401
        key = {"Authorization": "Bearer sk-hidden"}
        assert httpx.get(f"{url}/v1/models", headers=key).json()["data"][0]["id"] == "demo"
        assert (run / "secret").read_text().strip() == secret
        assert "sk-hidden" not in (run / "keys").read_text()
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        for child in children:
            told = Path(f"/proc/{child.pid}/environ").read_bytes()
            seen = told + Path(f"/proc/{child.pid}/cmdline").read_bytes()
            assert b"sk-hidden" not in seen and secret.encode() not in seen
            assert b"TPDET_PORT" not in told
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "--swap-space changes nothing" in errors and errors.count("--swap-space") == 1
    assert errors.count("TPDET_PROT in the environment is no setting: did you mean") == 1
    assert not (run / "keys").exists()


def test_a_rank_without_a_supervisor_reads_its_environment_and_hides_keys_from_the_http_process(
    tmp_path,
):
    environ = {"TPDET_API_KEY": "sk-hidden", "TPDET_MAX_MODEL_LEN": "1k"}
    found = Server(tmp_path, environment=environ)
    try:
        assert found.complete().status_code == 401
        found.http.headers["Authorization"] = "Bearer sk-hidden"
        assert found.http.get("/v1/models").json()["data"][0]["max_model_len"] == 1000
        assert b"sk-hidden" not in Path(f"/proc/{found.child.pid}/environ").read_bytes()
    finally:
        assert found.stop() == 0


def test_keys_are_read_from_a_private_file_only(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# comment\n\nsk-1\n  sk-2  \n")
    file.chmod(0o640)
    with pytest.raises(NotPermittedError, match="0640"):
        read_key_file(str(file))
    file.chmod(0o600)
    digests = read_key_file(str(file))
    assert digests == tuple(hashlib.sha256(key).hexdigest() for key in (b"sk-1", b"sk-2"))
    for text in ("", "# none\n", "two words\n"):
        file.write_text(text)
        with pytest.raises(UsageError):
            read_key_file(str(file))


def test_what_cannot_be_a_key_file_is_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    large = tmp_path / "large"
    large.write_bytes(b"sk-1\n" + b"#" * (1 << 20))
    large.chmod(0o600)
    for path, kind, word in (
        (pipe, UsageError, "not a file"),
        (tmp_path, (UsageError, NotPermittedError), "not a file|cannot be read"),
        (large, UsageError, "1048576"),
        (tmp_path / "none", NotFoundError, "does not exist"),
    ):
        with pytest.raises(kind, match=word):
            read_key_file(str(path))


def test_a_key_file_may_hold_a_keys_digest(tmp_path):
    file = tmp_path / "keys"
    digest = hashlib.sha256(b"sk-1").hexdigest()
    file.write_text(f"sha256:{digest}\nsha256:{digest[:-1]}\n")
    file.chmod(0o600)
    short = hashlib.sha256(f"sha256:{digest[:-1]}".encode()).hexdigest()
    assert read_key_file(str(file)) == (digest, short)


def test_a_tenants_salt_is_its_keys_and_the_runs():
    digests = tuple(hashlib.sha256(key).hexdigest() for key in (b"sk-1", b"sk-2"))
    ring, other = KeyRing(digests, b"s" * 32), KeyRing(digests[::-1], b"s" * 32)
    one, two = ring.tenant_salt(b"Bearer sk-1"), ring.tenant_salt(b"Bearer sk-2")
    assert one and two and one != two and one not in digests
    assert other.tenant_salt(b"bearer sk-1") == one
    assert ring.tenant_salt(b"Bearer sk-3") is None and ring.tenant_salt(b"Basic sk-1") is None
    assert KeyRing(digests).tenant_salt(b"Bearer sk-1") != one
    assert KeyRing(()).tenant_salt(None) == ""


def test_a_key_ring_accepts_its_keys_and_nothing_near_them():
    ring = KeyRing((hashlib.sha256(b"sk-1").hexdigest(),))
    assert ring.tenant_salt(b"Bearer sk-1") == ring.tenant_salt(b"bearer  sk-1") is not None
    for wrong in (None, b"", b"sk-1", b"Bearer", b"Bearer sk-", b"Bearer sk-11", b"Basic sk-1"):
        assert ring.tenant_salt(wrong) is None
    empty = KeyRing((hashlib.sha256(b"").hexdigest(),))
    assert empty.tenant_salt(None) is empty.tenant_salt(b"Bearer ") is None


def test_a_run_directory_too_long_for_a_socket_is_refused():
    assert socket_address("/run/x") == "ipc:///run/x/engine.sock"
    with pytest.raises(UsageError, match="shorter"):
        socket_address("/" + "x" * 100)
