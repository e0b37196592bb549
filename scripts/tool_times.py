"""Times what tools cost a server beside the model: reading calls, and a grammar of 20 tools.

    python scripts/tool_times.py MODEL docs/results

MODEL is a directory or a GGUF file with a tokenizer. A time is the least of five, of the processor.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tpdet.grammar.constraint import Grammars  # noqa: E402
from tpdet.grammar.tool_calls import CallForm  # noqa: E402
from tpdet.requests.answer_form import AnswerForm  # noqa: E402
from tpdet.text.detokenizer import IncrementalDetokenizer  # noqa: E402
from tpdet.text.parsing.calls import CallParser, output_parser  # noqa: E402
from tpdet.text.tokenizer import Tokenizer  # noqa: E402
from tpdet.tools.measurement.results_file import append_run  # noqa: E402
from tpdet.tools.worlds.machine import machine  # noqa: E402

FAMILY, REPEATS, TOOLS = "hermes", 5, 20
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"enum": ["metric", "imperial"]},
        "stops": {"type": "array", "items": {"type": "string", "maxLength": 40}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "f0", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
TEXTS = {"text": "The weather in Paris is fine today. " * 60, "calls": CALL * 20}


def main() -> None:
    """Print and record the rows of one tokenizer."""
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    tokenizer = Tokenizer.load(path)
    rows = [*parser_rows(tokenizer), *grammar_rows(tokenizer)]
    append_run(folder, "tools", machine("cpu", 1), f"scripts/tool_times.py {path.name}", rows)
    for row in rows:
        print(row)


def parser_rows(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """A token's time through the parser, and through the detokenizer that is there without it."""
    rows = []
    for case, text in TEXTS.items():
        ids = marked(tokenizer, text)

        def decode(ids: list[int] = ids) -> list[str]:
            detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
            return [detokenizer.push(token) for token in ids]

        texts = decode()

        def read(ids: list[int] = ids, texts: list[str] = texts) -> None:
            calls = CallParser(FAMILY, tokenizer)
            reader = output_parser(tokenizer, [], None, calls, {"f0": SCHEMA})
            for token, piece in zip(ids, texts, strict=True):
                reader.feed([token], [piece])
            reader.finish()

        per = 1e6 / len(ids)
        value, peer = least(read) * per, least(decode) * per
        peers = {"peer": "the detokenizer", "peer_value": peer, "ratio": value / peer}
        rows.append({"case": f"parser, {case}", "value": value, "unit": "us a token", **peers})
    return rows


def marked(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text whose marks are tokens, where the tokenizer has them."""
    known, ids = tokenizer.added_tokens, []
    for line in text.splitlines(keepends=True):
        mark = line.rstrip("\n")
        if mark in known:
            ids += [known[mark], *tokenizer.encode("\n", add_special_tokens=False)]
        else:
            ids += tokenizer.encode(line, add_special_tokens=False)
    return ids


def grammar_rows(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The time to make a grammar of 20 tools, and to ask for it again."""
    size = tokenizer.vocab_size
    grammars = Grammars(tokenizer, size)
    grammars.constrain(form(1))  # the first one reads the vocabulary
    several = iter(range(2, 2 + REPEATS))
    made = least(lambda: grammars.constrain(form(next(several))))
    again = least(lambda: grammars.constrain(form(2)))
    case = f"grammar of {TOOLS} tools"
    return [
        {"case": case, "mode": f"{size} tokens", "value": made * 1e3, "unit": "ms"},
        {"case": f"{case}, again", "mode": f"{size} tokens", "value": again * 1e3, "unit": "ms"},
    ]


def form(number: int) -> AnswerForm:
    """Twenty tools with schemas that no other number has."""
    more = SCHEMA["properties"] | {"number": {"const": number}}
    schemas = {f"f{i}": SCHEMA | {"properties": more | {f"p{i}": {}}} for i in range(TOOLS)}
    return AnswerForm("tool_calls", CallForm(FAMILY, True, True, schemas).text)


def least(run: Callable[[], object]) -> float:
    """The least processor seconds of some runs."""
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return min(times)


if __name__ == "__main__":
    main()
