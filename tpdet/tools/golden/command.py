"""`tpdet golden record` and `tpdet golden check`, for those without pytest."""

import argparse
import time

from tpdet.client.batch import read_requests
from tpdet.errors import DisagreementError, NotFoundError
from tpdet.tools.check.answers import Question
from tpdet.tools.check.targets import open_target
from tpdet.tools.golden.golden_file import read_goldens, stored_form, write_goldens
from tpdet.tools.golden.verdicts import line_of_golden, verdicts

_HELD = "golden answers are held"


def record(options: argparse.Namespace) -> int:
    """Answer a file of requests, and write the answers into a golden file beside its others.

    Raises UsageError for a malformed request, else as the target.
    """
    questions = [Question(*request) for request in read_requests(options.input_file)]
    names = [question.name for question in questions]
    with open_target(options, None, _HELD) as target:
        lines = target.record(questions)
    stored = {name: stored_form(line) for name, line in zip(names, lines, strict=True)}
    write_goldens(options.golden, stored)
    print(f"{len(stored)} golden answers written to {options.golden}")
    return 0


def check(options: argparse.Namespace) -> int:
    """Hold the target to a golden file: 0 if all is equal, 1 if an answer differs.

    Raises NotFoundError without a file or golden, DisagreementError (exit code 78) after all else
    was printed where some cannot be compared, else as the target.
    """
    goldens = read_goldens(options.golden)
    if not goldens:
        raise NotFoundError(
            f"{options.golden} has no golden answers: write some with tpdet golden record"
        )
    source = options.golden.name
    lines = [line_of_golden(name, stored, source) for name, stored in goldens.items()]
    with open_target(options, lines[0].origin.logprobs_mode, _HELD) as target:
        begin = time.monotonic()
        judged = verdicts(target, goldens, source)
        seconds = time.monotonic() - begin
    differing = [verdict for verdict in judged if not verdict.equal and verdict.comparable]
    incomparable = [verdict for verdict in judged if not verdict.comparable]
    for verdict in (*differing, *incomparable):
        print(f"{verdict.text}\n")
    tokens = sum(line.tokens for line in lines)
    equal = len(judged) - len(differing) - len(incomparable)
    print(
        f"{len(judged)} golden answers, {tokens} tokens: {equal} equal, {len(differing)} differ, "
        f"{len(incomparable)} cannot be compared; {seconds:.1f} s"
    )
    if incomparable:
        raise DisagreementError(
            f"{len(incomparable)} golden answers cannot be compared: check them with what recorded "
            "them, or record them anew: tpdet golden record"
        )
    return int(bool(differing))
