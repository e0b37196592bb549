"""The flags of `tpdet run-batch`."""

from tpdet.arguments.flags import count, flag, switch
from tpdet.client.command import SERVER_AND_MODEL, UNVERIFIED, Command

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

RUN_BATCH = Command(
    name="run-batch",
    run="tpdet.tools.run_batch.command:run_batch",
    flags=_FLAGS,
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
    server=SERVER_AND_MODEL,
    ranks=True,
    without=UNVERIFIED,
)
