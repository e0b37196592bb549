"""Commands that read JSON of others refuse 100 MB of it in words."""

import pytest

NOBODY = ("--url", "http://127.0.0.1:9")
COMMANDS = (
    ("certify", "FILE"),
    ("diff", "FILE", "FILE"),
    ("golden", "check", "FILE", *NOBODY),
    ("check", "FILE", *NOBODY),
    ("audit", "verify", "FILE", "--keys", "FILE"),
)
TEXTS = {
    "long": lambda: b'{"a": "' + b"a" * 100_000_000 + b'"}',
    "deep": lambda: b"[" * 100_000_000,
}
"""Made by the tests that want them: every process that collects tests imports this file."""


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_json_of_100_megabytes_is_refused_in_words(tpdet, tmp_path, text):
    file = tmp_path / "file.json"
    file.write_bytes(TEXTS[text]())
    for command in COMMANDS:
        code, _, error = tpdet(*(file if one == "FILE" else one for one in command))
        assert code == 65 and "file.json" in error and len(error) < 400, (command, error)
