"""What a golden answer is asked of: a model that is loaded here, or a running server."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tpdet.client.batch import recorded_body
from tpdet.client.connection import Connection, client_key
from tpdet.errors import UsageError
from tpdet.requests.routes import COMPLETIONS, path_of
from tpdet.tools.check.answers import Line, Question
from tpdet.tools.check.computed import Compared
from tpdet.tools.golden.golden_file import Json

LIKELIEST = 5


class Likely(NamedTuple):
    """A token, its text and its log-probability at one position."""

    token_id: int
    text: str
    logprob: float


class GoldenTarget(Protocol):
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


def target_of(target: Any) -> GoldenTarget:
    """What answers: an `LLM`, or a server by its URL. Raises UsageError for anything else."""
    if isinstance(target, str):
        return ServerTarget.of(target)
    if hasattr(target, "recompute"):
        return ModelTarget(target)
    raise UsageError(
        f"golden() is given {type(target).__name__}: give it an LLM, or the URL of a server"
    )


def _checkable(asked: Sequence[Question], date: str | None) -> list[Question]:
    """The questions with all that a check of their answers needs."""
    return [one._replace(body=recorded_body(one.url, one.body, date)) for one in asked]
