"""The pages of `tpdet verify` and `tpdet audit report`, in a browser and as text."""

import json
import os
import re
import shutil
import sqlite3
import time
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from tests.lib.headless import PROGRAM, Browser
from tests.lib.receipts import Audited, ended_answer, new_audited
from tests.lib.tree import ROOT
from tpdet.audit.recorded import ChangedPart, Difference, Scored
from tpdet.audit.replayed import (
    FaultySide,
    NotReplayed,
    ReceiptDiffers,
    ReplaySummary,
    read_replay,
)
from tpdet.cli import main
from tpdet.errors import UsageError
from tpdet.launch.host.regular_file import NotRegularError
from tpdet.launch.host.whole_file import write_text
from tpdet.pages.page import shown
from tpdet.tools.verify.compare import LogitDifference, Relation
from tpdet.tools.verify.report import result_rows
from tpdet.tools.worlds.ways import LaunchWay

NASTY = "</title></style><script>document.title = 1</script><img src=http://x.invalid/ onerror=x>&'"
RESULTS = ROOT / "docs" / "results"
OURS = {
    *("html", "head", "meta", "title", "link", "style", "body", "main", "header", "footer"),
    *("section", "div", "p", "b", "span", "code", "pre", "br", "h1", "h2", "h3", "dl", "dt", "dd"),
    *("table", "thead", "tbody", "tr", "th", "td", "svg", "g", "symbol", "path", "use", "rect"),
    "text",
}
"""Elements of our templates."""


def relation(tp: int, circumstance: str, digest: str = "a", mode: str = "tree", way=None):
    logit = LogitDifference("probe-0", 5, 17, "bebe6049", "bebe6030")
    equal = digest == "a"
    return Relation(
        dtype="bfloat16",
        mode=mode,
        circumstance=circumstance,
        tp=tp,
        equal=equal,
        digest=digest * 64,
        reference="a" * 64,
        positions=375,
        difference=None if equal else str(logit),
        **asdict(way or LaunchWay()),
        logit=None if equal else logit,
        differing=0 if equal else 286,
    )


def record(relations, model="tiny-qwen3", control=False, **changes):
    """A run as `tpdet verify --output` writes it."""
    fields = {
        "bench": "verify",
        "gpu": "cpu",
        "gpus": 0,
        "commit": "0123abc",
        "torch": "2.11.0",
        "triton": None,
        "driver": None,
        "date": "2026-11-26",
        "python": "3.11.7",
        "command": "tpdet verify",
        "began": "2026-11-26T10:00:00+00:00",
        "seconds": 83.2,
        "fingerprints": {"bfloat16 tree": "tpdet-0123456789ab-ba9876543210-sm_90"},
        "worlds": [
            {"tp": 2, "part": "steps", "launcher": "self", "transport": "auto", "nodes": 1,
             "seconds": 40.5},
        ],
        "rows": result_rows(model, relations, control),
    }  # fmt: skip
    return fields | changes


SEVERAL = ("alone", "batch 16", "chunks of 100", "preempted", "half right drafts, NaN behind")
EQUAL = [relation(tp, name) for tp in (1, 2, 4, 8) for name in SEVERAL]
DIFFERENT = [
    relation(tp, name, "b" if (tp, name) in ((4, "alone"), (4, "batch 16")) else "a")
    for tp in (1, 2, 4, 8)
    for name in SEVERAL
]


def verified(folder: Path, *records) -> Path:
    """The page that `tpdet verify --from` makes of some runs."""
    (folder / "runs.json").write_text(json.dumps(records))
    page = folder / "verify.html"
    assert main(["verify", "--from", str(folder / "runs.json"), "--html", str(page)]) == 0
    return page


def words(page: Path) -> str:
    """The text of a page, its blanks as one; every element is one of ours."""
    texts: list[str] = []

    class Reader(HTMLParser):
        inside = ""

        def handle_starttag(self, tag, attrs):
            assert tag in OURS, tag
            assert not [name for name, _ in attrs if name.startswith("on") or name == "src"]
            self.inside = tag

        def handle_data(self, data):
            texts.append("" if self.inside == "style" else data)

    Reader().feed(page.read_text())
    return " ".join(" ".join(texts).split())


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """A directory of six receipts: leaf 2 was altered, 3 has other content, 4 none any more."""
    audited = new_audited(tmp_path_factory.mktemp("damaged"), 6)
    assert main(["audit", "erase", str(audited.path), f"{4:032x}"]) == 0
    bundle = next((audited.path / "log" / "tile" / "entries").rglob("6"))
    parts = bundle.read_bytes().split(b'"sig":"')
    parts[3] = (b"B" if parts[3][:1] == b"A" else b"A") + parts[3][1:]
    bundle.write_bytes(b'"sig":"'.join(parts))
    with sqlite3.connect(audited.path / "content.sqlite") as store:
        query = "SELECT content FROM receipts WHERE leaf = 3"
        fields = json.loads(store.execute(query).fetchone()[0])
        fields["answers"][0]["outputs"][1]["logprob_bits"][0] = "bf000001"
        changed = json.dumps(fields).encode()
        store.execute("UPDATE receipts SET content = ? WHERE leaf = 3", (changed,))
    store.close()
    return audited


def reported(audited: Audited, page: Path, *flags: object) -> int:
    """The exit code of `tpdet audit report`."""
    names = (audited.path, "--keys", audited.keys, "--html", page)
    return main(["audit", "report", *map(str, (*names, *flags))])


REPLAY = (
    ReceiptDiffers(
        f"{1:032x}",
        1,
        (
            Difference(0, 17, Scored(264, "bf3a1c22"), Scored(264, "bf3a1c21")),
            ChangedPart("finish_reasons", ["stop"], ["length"]),
        ),
        FaultySide("receipt", ("TP 1 verified as drafts", "TP 2 generated")),
    ),
    NotReplayed(f"{2:032x}", 2, "it has contract c1, and this model c2"),
    ReplaySummary(
        contract="c2",
        weights="d1",
        system_fingerprint="fp",
        tp=1,
        receipts=5,
        different=1,
        incomparable=1,
        erased=1,
        tokens=100,
        seconds=0.5,
    ),
)


def replay_lines(*lines) -> bytes:
    return b"\n".join(map(msgspec.json.encode, lines or REPLAY)) + b"\n"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = Browser(tmp_path_factory.mktemp("profile"))
    yield program
    program.close()


@pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed")
def test_the_pages_in_a_browser(damaged, browser, tmp_path):
    """Dark and light, narrow and wide: styled, no wider than the window, and nobody is asked."""
    audit = tmp_path / "audit.html"
    assert reported(damaged, audit) == 65
    verify = verified(tmp_path, record(DIFFERENT), record(EQUAL))
    nasty = tmp_path / "nasty"
    nasty.mkdir()
    hostile = verified(nasty, record([relation(1, NASTY * 9), relation(2, NASTY, "b")], NASTY * 99))
    for page, dark, width in ((verify, True, 360), (audit, False, 360), (hostile, False, 1600)):
        browser.open(page.as_uri(), dark, width=width)
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), page
        back = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == ("rgb(20, 23, 26)" if dark else "rgb(247, 247, 244)")
        if folder := os.environ.get("TPDET_TEST_SCREENSHOTS"):
            browser.screenshot(Path(folder) / f"{page.stem}-{width}.png")
    assert "1 of 2 relations differ" in browser.evaluate("document.body.innerText")
    assert browser.evaluate("document.querySelectorAll('script, img').length") == 0
    assert browser.complaints == []
    assert {url.partition(":")[0] for url in browser.requests} <= {"file", "data"}
    # Negative control: were there a script or an image, the page's policy would refuse both.
    browser.evaluate("document.body.append(document.createElement('script'))")
    browser.evaluate("document.querySelector('script').textContent = 'document.title = 1'")
    assert browser.evaluate("document.title") != "1"
    browser.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://x.invalid/'}))")
    until = time.monotonic() + 60
    while sum("Content Security Policy" in str(one) for one in browser.complaints) < 2:
        assert time.monotonic() < until, browser.complaints
        browser.evaluate("1")


def test_equal_and_different_relations_are_words(tmp_path):
    text = words(verified(tmp_path, record(EQUAL)))
    assert "Every bit is equal 20 relations at TP 1, 2, 4, 8:" in text
    assert text.count("equal aaaaaaaa") == 20 and "differs" not in text
    for fact in ("2026-11-26 10:00 UTC", "83 s", "TP 2 steps", "40.5 s", "0123456789ab…", "sm_90"):
        assert fact in text
    text = words(verified(tmp_path, record(DIFFERENT)))
    assert "2 of 20 relations differ The first: bfloat16 tree, alone, TP 4: probe-0" in text
    assert text.count("equal aaaaaaaa") == 18 and text.count("differs bbbbbbbb") == 2
    assert "alone, batch 16 probe-0 position 5: logit of token 17 is -0.37182" in text
    assert "286 of 375" in text and "reference, 0xbebe6030" in text
    bits = re.findall(r'"flipped" x', (tmp_path / "verify.html").read_text())
    assert len(bits) == 2 * (0x6049 ^ 0x6030).bit_count()


@pytest.mark.parametrize(
    ("relations", "words_of_it"),
    [
        (DIFFERENT, "The control shows no difference at TP 2, 8"),
        ([relation(1, "alone"), relation(2, "alone", "b")], "The control differs, as it must"),
    ],
)
def test_a_control_must_differ_at_every_size(tmp_path, relations, words_of_it):
    page = verified(tmp_path, record(relations, control=True))
    assert words_of_it in words(page)
    good = "as it must" in words_of_it
    assert f'class="verdict {"good" if good else "bad"}"' in page.read_text()


def test_ways_and_groups_are_those_of_the_matrix(tmp_path):
    way = LaunchWay("mpi", "mpi", 2)
    text = words(verified(tmp_path, record([*EQUAL, relation(4, "alone", way=way)])))
    assert "alone mpi, mpi, 2 nodes not run not run equal aaaaaaaa not run" in text


@pytest.mark.parametrize("name", ["verify.cpu.json", "verify.h200.json"])
def test_a_file_of_an_older_version_is_shown(tmp_path, name):
    page = tmp_path / "page.html"
    assert main(["verify", "--from", str(RESULTS / name), "--html", str(page)]) == 0
    rows = sum(len(run["rows"]) for run in json.loads((RESULTS / name).read_text()))
    text = words(page)
    assert text.count(" equal ") + text.count("differs ") >= rows > 700
    assert "The controls differ, as they must." in text and "not counted" in text


def test_hostile_results_are_escaped_and_bounded(tmp_path):
    """Ten megabytes of markup in a name, thousands of sizes and of models."""
    long = NASTY * (10_000_000 // len(NASTY))
    rows = [relation(tp, f"c{tp % 7}", mode=f"m{tp % 3}") for tp in range(1, 6000)]
    many = [record([relation(1, "alone")], f"model {number}") for number in range(150)]
    page = verified(
        tmp_path, *many, record(rows), record([relation(1, long, long[:1])], long, command=long)
    )
    text = words(page)
    assert len(page.read_bytes()) < 3_000_000 and "document.title = 1</script>" in text
    assert "150 more runs are not shown" in text  # two fill the page
    assert "relations more were compared and are not shown" in text
    assert shown("a\u202eb\x00c\nd\ud800") == "a�b�c d�" and shown("x" * 999).endswith(
        "(999 characters)"
    )


ROW = record(EQUAL)["rows"][0]
WRONG = {
    "no file": (None, 66, "does not exist"),
    "no JSON": ("x", 2, "no results file of tpdet verify"),
    "no runs": ("[]", 2, "has no run of tpdet verify"),
    "another bench": (json.dumps([record(EQUAL, bench="gemm")]), 2, "has no run of tpdet verify"),
    "no number": (json.dumps([record(EQUAL, seconds="1")]), 2, "no results file"),
    "deep": ("[" * 100_000, 2, "no results file"),
    "equal, and not": (
        json.dumps([record(EQUAL, rows=[ROW | {"digest": "b" * 64}])]), 2, "its digests are not"
    ),
    "no bits": (
        json.dumps([record(EQUAL, rows=[ROW | {"logit": {
            "probe": "p", "position": 1, "token": 1, "bits": "00", "reference_bits": "zz"}}])]),
        2, "no results file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_results_file_is_refused(tmp_path, capsys, name):
    text, code, said = WRONG[name]
    runs, page = tmp_path / "runs.json", tmp_path / "page.html"
    if text is not None:
        runs.write_text(text)
    assert main(["verify", "--from", str(runs), "--html", str(page)]) == code
    assert said in capsys.readouterr().err and not page.exists()


def test_flags_that_do_not_go_together_are_refused(tmp_path, capsys):
    runs = str(RESULTS / "verify.h100.json")
    for arguments in (
        ["--from", runs],
        ["models/x", "--from", runs, "--html", str(tmp_path / "a")],
        ["--from", runs, "--html", str(tmp_path)],
        ["--from", runs, "--html", str(tmp_path / "no" / "a")],
    ):
        assert main(["verify", *arguments]) == 2
        assert "--html" in capsys.readouterr().err
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)  # as /dev/stdout is one, whose place no page may take
    for flags in (["--from", runs, "--html"], ["models/x", "--output"]):
        for name in (pipe, link):
            assert main(["verify", *flags, str(name)]) == 2
            assert "is a device or a pipe: name a file to write" in capsys.readouterr().err
            with pytest.raises(NotRegularError, match="it is a named pipe, not a file"):
                write_text(name, "")
    assert pipe.is_fifo() and link.is_symlink() and len([*tmp_path.iterdir()]) == 2
    os.chmod(tmp_path, 0o500)
    if os.getuid():
        assert main(["verify", "--from", runs, "--html", str(tmp_path / "a")]) == 77


def test_a_report_goes_on_behind_failures(damaged, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert reported(damaged, page, "--json") == 65
    (line,) = capsys.readouterr().out.splitlines()
    audit = json.loads(line)["audit"]
    assert [one["leaf"] for one in audit["failures"]] == [2, 3]
    assert [audit[name] for name in ("verified", "failed", "erased", "leaves")] == [4, 2, 1, 6]
    assert sum(one["verified"] + one["failed"] for one in audit["periods"]) == 6
    parts = {part["name"]: part["failure"] for part in audit["parts"]}
    assert parts["checkpoint"] is None and "leaf 2 was changed" in parts["tree"]
    text = words(page)
    assert "2 of 6 receipts do not hold The first: leaf 2: the signature by key" in text
    assert f"{3:032x}" in text and "its bits differs" in text and "does not hold" in text
    assert "a secret stop" not in text  # nothing of what was asked
    assert main(["audit", "verify", str(damaged.path), "--keys", str(damaged.keys)]) == 65


def test_a_whole_directory_is_reported_with_its_checkpoint_keys_and_replay(tmp_path, capsys):
    audited = new_audited(tmp_path, 2)
    note, page, replay = tmp_path / "note", tmp_path / "page.html", tmp_path / "replay.jsonl"
    shutil.copy(audited.path / "log" / "checkpoint", note)
    audited.write([ended_answer(number, outcome="client_gone") for number in (2, 3)])
    assert reported(audited, page, "--checkpoint", note) == 0
    assert "4 receipts hold, 0 do not" in capsys.readouterr().out
    text = words(page)
    assert "All 4 receipts hold" in text and "2 client_gone" not in text
    assert "client_gone (2), completed (2)" in text
    assert "the log goes on from that of 2 leaves holds" in text
    assert f"{audited.entry.keyid[:16]} ed25519 leaves 0 on" in text and "signed" in text
    replay.write_bytes(replay_lines())
    assert reported(audited, page, "--replay", replay) == 1
    text = words(page)
    assert "1 of 4 replayed answers differ" in text and "the receipt is at fault" in text
    assert "choice 0, position 17: recorded token 264" in text and "c1, and this model c2" in text
    replay.write_bytes(replay_lines(msgspec.structs.replace(REPLAY[2], different=0)))
    assert reported(audited, page, "--replay", replay) == 0
    assert "4 answers were computed again and are equal" in words(page)
    audited.trust(revoked=3)
    assert reported(audited, page) == 65
    text = words(page)
    assert "1 of 4 receipts do not hold" in text and "revoked from leaf 3 on" in text


def test_a_log_that_cannot_be_read_is_a_page_too(tmp_path, capsys):
    audited = new_audited(tmp_path, 1)
    other = tmp_path / "other"
    other.mkdir()
    page = tmp_path / "page.html"
    assert reported(audited._replace(keys=new_audited(other).keys), page) == 65
    text = words(page)
    assert "The log cannot be checked" in text and "none of the trusted keys" in text
    assert reported(audited._replace(path=tmp_path / "absent"), tmp_path / "no.html") == 66
    assert not (tmp_path / "no.html").exists()
    capsys.readouterr()


def test_a_replay_is_read_as_it_was_printed():
    findings, summary = read_replay(replay_lines().decode(), "here")
    assert (*findings, summary) == REPLAY and summary.equal == 3
    first = replay_lines().splitlines()
    for wrong in (
        b"",
        b"{}",
        first[2] * 2,
        b"\n".join([first[2], first[2]]),
        first[0],
        b"[" * 9999,
    ):
        with pytest.raises(UsageError, match="not what tpdet replay --json prints"):
            read_replay(wrong.decode(), "here")


def test_receipts_of_all_times_have_one_line(tmp_path):
    """Decades, and a clock that jumps back among them."""
    audited = new_audited(tmp_path)
    ends = (1e9, 1e9 - 4e8, 1.2e9, 1.7e9)
    audited.write([ended_answer(n, began=end, ended=end) for n, end in enumerate(ends)])
    page = tmp_path / "page.html"
    assert reported(audited, page) == 0
    lines = re.findall(r"<title>(\d{4}).*?: (\d+) verified, 0 failed", page.read_text())
    assert len(lines) <= 48 and sum(int(count) for _, count in lines) == 4
    assert lines[0] == ("1988", "1") and lines[-1] == ("2022", "1")
