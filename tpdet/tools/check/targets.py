"""What recorded answers are held against: a model that is loaded here, or a running server."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tpdet.audit.recorded import ChangedPart, Difference
from tpdet.client.batch import recorded_body
from tpdet.client.commands import connect, refuse_server
from tpdet.client.connection import Connection, client_key
from tpdet.errors import CheckpointError, DisagreementError, RequestError, UsageError
from tpdet.requests.body.batch_lines import Json
from tpdet.requests.engine_facts import LogprobsMode
from tpdet.requests.routes import COMPLETIONS, path_of
from tpdet.tools.check.answers import Line, Question
from tpdet.tools.check.computed import Compared

LIKELIEST = 5


class Likely(NamedTuple):
    """A token, its text and its log-probability at one position."""

    token_id: int
    text: str
    logprob: float


class AnswerTarget(Protocol):
    """Answers, verifies and explains."""

    fingerprint: str
    """The `system_fingerprint` of its answers."""

    def record(self, asked: Sequence[Question]) -> list[Json]:
        """The answers, as lines of `tpdet run-batch --record`. Raises RequestError."""

    def compare(self, lines: Sequence[Line]) -> list[Compared]:
        """What differs of each, verified as drafts. Raises as `tpdet check`."""

    def likeliest(self, token_ids: Sequence[int]) -> list[Likely]:
        """The `LIKELIEST` tokens behind these ids, best first."""

    def text(self, token_id: int) -> str:
        """A token's text; empty without a tokenizer."""


class ModelTarget:
    """An `LLM` of this process, which may have ranks of its own."""

    def __init__(self, llm: Any) -> None:
        """Raises UsageError under a launcher: every rank would write, and explain alone."""
        from tpdet.tools.check.by_model import ModelCheck, refuse_launcher

        refuse_launcher("golden answers are held")
        self._llm = llm
        self._check = ModelCheck(llm, Path(llm.config.model).name)
        self.fingerprint: str = llm.system_fingerprint

    def record(self, asked: Sequence[Question]) -> list[Json]:
        """Answers that are computed together, reproducible where no seed is named: it is 0."""
        tokenizer = self._llm.tokenizer
        date = None if tokenizer is None else tokenizer.info()["chat_template_date"]
        return self._check.record_all(_checkable(asked, date), use_tqdm=False)

    def compare(self, lines: Sequence[Line]) -> list[Compared]:
        """All lines at once."""
        return self._check.compare_all(lines, use_tqdm=False)[0]

    def likeliest(self, token_ids: Sequence[int]) -> list[Likely]:
        """The first `LIKELIEST` of one step more."""
        from tpdet.requests.request import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0, logprobs=LIKELIEST)
        prompt = {"prompt_token_ids": [*token_ids]}
        (output,) = self._llm.generate(prompt, params, use_tqdm=False)
        (tokens,) = output.outputs[0].logprobs
        likely = [Likely(token, self.text(token), one.logprob) for token, one in tokens.items()]
        return sorted(likely, key=lambda one: -one.logprob)[:LIKELIEST]

    def text(self, token_id: int) -> str:
        """What the tokenizer makes of it."""
        tokenizer = self._llm.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode([token_id], False))


class ServerTarget:
    """A running server, by its address; the key is that of TPDET_API_KEY or VLLM_API_KEY."""

    def __init__(self, connection: Connection) -> None:
        from tpdet.tools.check.by_server import server_facts

        self._connection, self._facts = connection, server_facts(connection)
        self.fingerprint: str = self._facts["system_fingerprint"]

    @classmethod
    def of(cls, url: str) -> "ServerTarget":
        """The server at an address. Raises what `Connection` and `server_facts` raise."""
        return cls(Connection(url, client_key(None)))

    def record(self, asked: Sequence[Question]) -> list[Json]:
        """Answers that the server is asked for together."""
        from tpdet.tools.check.by_server import record_by_server

        date = self._connection.get("/tokenizer_info").get("chat_template_date")
        return record_by_server(self._connection, _checkable(asked, date), self._facts)

    def compare(self, lines: Sequence[Line]) -> list[Compared]:
        """Each line by a request of its own, several at a time."""
        from tpdet.tools.check.by_server import compare_by_server

        return compare_by_server(self._connection, [*lines], self._facts)

    def likeliest(self, token_ids: Sequence[int]) -> list[Likely]:
        """The first `LIKELIEST` of a completion of one token."""
        body = {
            "model": self._facts["model"],
            "prompt": [*token_ids],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": LIKELIEST,
            "return_tokens_as_token_ids": True,
        }
        answer = self._connection.post_patiently(COMPLETIONS, body)
        (tokens,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        ids = {int(name.rpartition(":")[2]): value for name, value in tokens.items()}
        likely = [Likely(token, self.text(token), value) for token, value in ids.items()]
        return sorted(likely, key=lambda one: -one.logprob)[:LIKELIEST]

    def text(self, token_id: int) -> str:
        """What the server's tokenizer makes of it."""
        body = {"model": self._facts["model"], "tokens": [token_id]}
        return str(self._connection.post_patiently(path_of("detokenize"), body)["prompt"])


def target_of(target: Any) -> AnswerTarget:
    """What answers: an `LLM`, or a server by its URL. Raises UsageError for anything else."""
    if isinstance(target, str):
        return ServerTarget.of(target)
    if hasattr(target, "recompute"):
        return ModelTarget(target)
    raise UsageError(
        f"golden() is given {type(target).__name__}: give it an LLM, or the URL of a server"
    )


@contextmanager
def open_target(
    options: argparse.Namespace, mode: LogprobsMode | None, what: str
) -> Iterator[AnswerTarget]:
    """The model or the server that flags name.

    mode: of log-probabilities, for a model; what: is done in one process, for a message. Raises
    UsageError for flags that do not go together, and as `open_model` and `server_facts`.
    """
    if options.model is None:
        if options.tp is not None:
            raise UsageError("--tp is for a model that is loaded here: leave it out beside --url")
        yield ServerTarget(connect(options))
        return
    refuse_server(options, options.model)
    from tpdet.tools.check.by_model import open_model, refuse_launcher

    refuse_launcher(what)
    with open_model(options, mode) as llm:
        yield ModelTarget(llm)


Compare = Callable[[list[Line]], list[Compared]]
"""Holds lines against a model or a server. Raises as `tpdet check`."""
_INCOMPARABLE = (DisagreementError, CheckpointError, RequestError)


def compare_each(lines: Sequence[Line], compare: Compare) -> list[Compared | str]:
    """What differs of each line, or why it cannot be compared.

    All are compared together; where one cannot be, each by itself. A field that a later tpdet adds
    to answers is no difference of a recorded one.
    """
    try:
        return [*map(_of_recorded_fields, compare([*lines]))]
    except _INCOMPARABLE:
        return [_alone(line, compare) for line in lines]


def _alone(line: Line, compare: Compare) -> Compared | str:
    try:
        return _of_recorded_fields(*compare([line]))
    except _INCOMPARABLE as error:
        return str(error).removeprefix(f"{line.where}: ").replace(line.where, "it", 1)


def _of_recorded_fields(compared: Compared) -> Compared:
    parts: list[Difference | ChangedPart] = [
        part for part in compared.differences if isinstance(part, Difference) or part.is_recorded
    ]
    return compared._replace(differences=parts)


def _checkable(asked: Sequence[Question], date: str | None) -> list[Question]:
    """The questions with all that a check of their answers needs."""
    return [one._replace(body=recorded_body(one.url, one.body, date)) for one in asked]
