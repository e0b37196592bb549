"""lm-eval's models of an OpenAI-compatible server, which keep every answer with its digest.

    python -m tpdet.tools.certify.lm_eval_models run --model tpdet-completions \
        --model_args base_url=http://host:8000/v1/completions,model=NAME,answers=answers.jsonl ...

They are `local-completions` and `local-chat-completions` of lm-eval with one argument more: the
file of answers. A line of it is one of `tpdet run-batch --record`, named TASK/DOCUMENT/REQUEST.
"""

from contextvars import ContextVar
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from tpdet.errors import UsageError
from tpdet.tools.check.answers import Question

_ASKED: ContextVar[dict[str, Any]] = ContextVar("asked")
"""The body of the request whose answer is read next in this task or thread."""


class AnsweredText(str):
    """A text with the answer over HTTP that it comes from."""

    answer: tuple[dict[str, Any], dict[str, Any]]


class AnsweredScore(tuple[float, bool]):
    """(log-probability, whether it is the likeliest) with the answer that it comes from."""

    answer: tuple[dict[str, Any], dict[str, Any]]


class RecordingModel:
    """Asks for one prompt a call, because a digest covers a whole call, and writes the answers."""

    def __init__(self, *args: Any, answers: str | None = None, **kwargs: Any) -> None:
        """answers: the file to be written. Raises UsageError without it, and if it exists."""
        super().__init__(*args, **kwargs)
        self._batch_size = 1
        if answers is None:
            raise UsageError("model_args lack answers=FILE.jsonl, where the answers are kept")
        self._path = Path(answers)
        if self._path.exists():
            raise UsageError(f"{answers} exists: name a new file, or delete it")

    def _create_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        kwargs["eos"] = None  # lm-eval adds it to `stop` where num_concurrent is 1, and only there
        payload: dict[str, Any] = super()._create_payload(*args, **kwargs)  # type: ignore[misc]
        payload["return_token_ids"] = True
        _ASKED.set(payload)
        return payload

    def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str | None]:
        """The text of the one choice."""
        texts = super().parse_generations(outputs=outputs, **kwargs)  # type: ignore[misc]
        return [None if text is None else _answered(AnsweredText(text), outputs) for text in texts]

    def parse_logprobs(self, outputs: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        """The score of the one prompt."""
        scores = super().parse_logprobs(outputs=outputs, **kwargs)  # type: ignore[misc]
        return [_answered(AnsweredScore(score), outputs) for score in scores]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """As lm-eval's; the answers are written."""
        results = super().generate_until(requests, disable_tqdm=disable_tqdm)  # type: ignore[misc]
        return self._written(requests, results)

    def loglikelihood(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """As lm-eval's; the answers are written."""
        results = super().loglikelihood(requests, **kwargs)  # type: ignore[misc]
        return self._written(requests, results)

    def _written(self, requests: list[Any], results: list[Any]) -> list[Any]:
        """The results, after the answers that they come from were written."""
        url = urlsplit(self.base_url).path  # type: ignore[attr-defined]
        counts: dict[str, int] = {}
        with self._path.open("ab") as file:
            for request, result in zip(requests, results, strict=True):
                name = f"{request.task_name}/{request.doc_id}/{request.idx}"
                repeat = counts[name] = counts.get(name, -1) + 1
                if hasattr(result, "answer"):
                    body, answer = result.answer
                    line = Question(f"{name}/{repeat}", url, body).line(answer)
                    file.write(msgspec.json.encode(line) + b"\n")
        return results


def _answered(result: Any, outputs: Any) -> Any:
    """The result, which knows the request and its answer."""
    result.answer = _ASKED.get(), outputs[0] if isinstance(outputs, list) else outputs
    return result


@register_model("tpdet-completions")
class RecordingCompletions(RecordingModel, LocalCompletionsAPI):
    """`local-completions`, recorded."""


@register_model("tpdet-chat-completions")
class RecordingChats(RecordingModel, LocalChatCompletion):
    """`local-chat-completions`, recorded."""


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
