"""A schema tried in a process of its own, whose time and memory are bounded.

An intersection of a few patterns can take the library for ever, and a thread cannot be stopped. So
before a schema reaches the engine this module is run as a program on it, over a vocabulary of the
256 bytes: schema on standard input, the refusal (or nothing) on standard output.
"""

import functools
import resource
import subprocess
import sys

from tpdet.errors import RequestError
from tpdet.grammar.compile import FIELD, compile_schema, import_library
from tpdet.launch.host.processes import die_with_parent

CPU_SECONDS = 2
_WALL_SECONDS = 20.0  # on a machine that has other things to do
_MEMORY_BYTES = 2 << 30


@functools.lru_cache(maxsize=256)
def refusal(schema: str) -> str | None:
    """Why a schema cannot be used, or None; answers are kept. Waits for the other process."""
    try:
        found = subprocess.run(
            [sys.executable, "-m", "tpdet.grammar.trial"],
            input=schema.encode(),
            capture_output=True,
            timeout=_WALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return _too_complex()
    if found.returncode:
        return _too_complex()
    return found.stdout.decode() or None


def check(schema: str) -> None:
    """Raise RequestError for a schema that cannot be used, or not within the bounds."""
    import_library()
    reason = refusal(schema)
    if reason is not None:
        raise RequestError(reason, FIELD)


def _too_complex() -> str:
    return (
        f"the schema is too complex: it took more than {CPU_SECONDS} s or "
        f"{_MEMORY_BYTES >> 30} GiB to compile; simplify its patterns and allOf"
    )


class _Bytes:
    """The vocabulary of a trial: id b is byte b, 256 is the end."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a text."""
        return list(text.encode() if isinstance(text, str) else text)


def main() -> None:
    """Try the schema on standard input."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    schema = sys.stdin.buffer.read().decode()
    library = import_library()
    try:
        compile_schema(schema, library.LLTokenizer(_Bytes(), slices=[]))
    except RequestError as error:
        sys.stdout.write(str(error))


if __name__ == "__main__":
    main()
