"""Compiles the form of an answer in a separate process with limited time and memory, as a trial.

The library may never finish with an intersection of a few patterns, and a thread cannot be stopped.
So before a form reaches the engine, this module runs as a program on it, with the 256 bytes as the
vocabulary. It reads the form from standard input, its kind on the first line, and writes the
refusal, or nothing, to standard output.
"""

import functools
import resource
import subprocess
import sys
from typing import cast

from tpdet.errors import RequestError
from tpdet.grammar.byte_texts import byte_vocabulary, import_library
from tpdet.grammar.compile import compile_form, marks_of
from tpdet.launch.host.interpreter import python_command, python_environment
from tpdet.launch.host.processes import die_with_parent
from tpdet.requests.answer_form import AnswerForm, FormKind

CPU_SECONDS = 2
_WALL_SECONDS = 20.0  # more than CPU_SECONDS, for a busy machine
_MEMORY_BYTES = 2 << 30


@functools.lru_cache(maxsize=256)
def refusal(form: AnswerForm) -> str | None:
    """Why a form cannot be used, or None; results are cached. Waits for the trial."""
    try:
        found = subprocess.run(
            python_command("-m", "tpdet.grammar.trial"),
            input="\n".join(form).encode(),
            capture_output=True,
            timeout=_WALL_SECONDS,
            env=python_environment(),
        )
    except subprocess.TimeoutExpired:
        return _too_complex(form)
    if found.returncode:
        return _too_complex(form)
    return found.stdout.decode() or None


def check(form: AnswerForm) -> None:
    """Raise RequestError for a form that cannot be used, or not within the limits."""
    import_library()
    reason = refusal(form)
    if reason is not None:
        raise RequestError(reason, form.field)


def _too_complex(form: AnswerForm) -> str:
    parts = " it" if form.kind == "regex" else " its patterns and allOf"
    return (
        f"the {form.noun} is too complex: it took more than {CPU_SECONDS} s or "
        f"{_MEMORY_BYTES >> 30} GiB to compile; simplify{parts}"
    )


def main() -> None:
    """Try the form on standard input."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kind, _, text = sys.stdin.buffer.read().decode().partition("\n")
    form = AnswerForm(cast(FormKind, kind), text)
    try:
        marks = marks_of(form)
        compile_form(form, byte_vocabulary(marks), {m: 257 + i for i, m in enumerate(marks)})
    except RequestError as error:
        sys.stdout.write(str(error))


if __name__ == "__main__":
    main()
