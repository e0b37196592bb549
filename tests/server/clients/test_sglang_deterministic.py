"""SGLang's own test of determinism, its file unchanged, against a served model.

`TPDET_TEST_SGLANG` names a directory with `sglang/test/test_deterministic.py` and `long_prompt.txt`
beside it, as the wheel of SGLang 0.5.23 has them: `pip download --no-deps sglang==0.5.23`, `unzip`.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.lib.server.served import Served
from tpdet.launch.host.interpreter import python_command

FOLDER = os.environ.get("TPDET_TEST_SGLANG")
FILE = "55c9a4780abf12fb41c9ee12786cf1b65c0b9eb91714b292f7da5c88accc07b3"
"""SHA-256 of the file."""
MODES = {
    "single": ("--n-trials", "8"),
    "prefix": ("--n-start", "1", "--n-trials", "6", "--return-logprob"),
    "radix_cache": (),
    "p_vs_d": ("--n-trials", "3"),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER is None, reason="TPDET_TEST_SGLANG names no files of SGLang's"),
]


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    """Serves random weights of more than the 50,000 ids that the file draws from."""
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 128}
    folder = tmp_path_factory.mktemp("s")
    model = folder / "model"
    shutil.copytree(tiny_model("qwen3", context=8192, **sizes), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 50304}))
    flags = ("--load-format", "dummy", "--admin-listen", "127.0.0.1:0")
    made = Served(model, folder, 1, *flags)
    yield made
    made.end()


@pytest.fixture(scope="module")
def script():
    path = Path(FOLDER) / "sglang" / "test" / "test_deterministic.py"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == FILE
    return path


def run(script, server, folder, mode, *flags):
    """What the file prints; of `sglang.profiler`, which it imports, it uses nothing."""
    package = folder / "sglang"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "profiler.py").write_text("run_profile = None\n")
    port = server.ready["admin_url"].rsplit(":", 1)[1]
    command = python_command(str(script), "--host", "127.0.0.1", "--port", port)
    done = subprocess.run(
        [*command, "--test-mode", mode, "--max-new-tokens", "12", *MODES[mode], *flags],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout[-2000:])
    return done.stdout


@pytest.mark.parametrize("temperature", ["0.0", "0.8"])
@pytest.mark.parametrize("mode", MODES)
def test_its_file_sees_one_answer(script, server, tmp_path, mode, temperature):
    text = run(script, server, tmp_path, mode, "--temperature", temperature)
    unique = re.findall(r"otal samples: (\d+), Unique samples: (\d+)", text)
    if mode == "single":
        assert unique == [("8", "1")]
    elif mode == "prefix":
        assert sum(int(total) for total, _ in unique) == 21 and {n for _, n in unique} == {"1"}
        assert text.count("samples have identical logprobs") >= 3 and "mismatches" not in text
    elif mode == "radix_cache":
        assert "TEST PASSED" in text and text.count("✓ YES") == 4 and "✗" not in text
    else:
        assert text.count("Logprobs match") == text.count("Token match") == 6
        assert "mismatch" not in text


def test_another_seed_is_seen(script, server, tmp_path):
    """Negative control: two seeds, and the file's answers differ."""
    texts = {
        run(script, server, tmp_path, "single", "--temperature", "0.8", "--sampling-seed", seed)
        for seed in ("1", "2")
    }
    assert len(texts) == 2
