"""The flags of `tpdet run-batch`."""

import argparse

from tpdet.arguments.flags import add_command, count, flag, later, switch
from tpdet.client.arguments import add_server
from tpdet.client.engine_settings import add_engine_settings, add_tp

_FLAGS = (
    flag("paths", "a model's directory, if it is to be loaded here, then the two files; - for "
         "standard input and output", nargs="*", metavar="[MODEL] IN.jsonl OUT.jsonl"),
    flag("-i --input-file", "another way to name the requests", metavar="FILE"),
    flag("-o --output-file", "another way to name the answers", metavar="FILE"),
    count("--concurrency",
          "requests in flight, at most (default: 64 by a server, 1024 by a model)"),
    switch("--record",
           "keep each request beside its answer, with token ids and bits, for tpdet check"),
)  # fmt: skip


def add_run_batch(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet run-batch`."""
    command = add_command(
        commands,
        "run-batch",
        later("tpdet.tools.run_batch.command", "run_batch"),
        _FLAGS,
        help="answer a file of requests in OpenAI's batch format",
        usage="tpdet run-batch [MODEL] IN.jsonl OUT.jsonl [flags]",
        description="Answer a file of requests in OpenAI's batch format (JSONL), by a running "
        "server or, with MODEL, by a\nmodel that is loaded here; answers come in the order of the "
        "requests. A line:\n"
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "The"}}'
        "\nThe digest that is printed last is that of all answers, in any order. A body without a "
        "seed gets one\nthat its custom_id gives. The exit code is 1 if a request failed.",
        epilog="  tpdet run-batch requests.jsonl answers.jsonl --url http://host:8000\n"
        "  tpdet run-batch models/smollm2 requests.jsonl answers.jsonl --tp 2",
    )
    add_server(command)
    add_tp(command)
    add_engine_settings(command, leave_out=("share_draws", "fixed_batch", "approximate"))
