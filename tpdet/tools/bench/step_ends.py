"""Tokens a second of an engine's steady steps: those in which all sequences of a batch decode."""

import time

from tpdet.engine.engine import Engine, EngineOutput
from tpdet.requests.request import TokenOutput

_LEAST = 8  # steps that tell a rate


class StepEnds:
    """When the engine's steps end, and how many sequences got how many tokens."""

    def __init__(self, engine: Engine) -> None:
        self._found: list[tuple[float, int, int]] = []
        step = engine.step

        def timed() -> list[EngineOutput]:
            outputs = step()
            sequences = {(it.request_id, it.choice) for it in outputs if type(it) is TokenOutput}
            self._found.append((time.perf_counter(), len(sequences), len(outputs)))
            return outputs

        self._methods = vars(engine)
        self._methods["step"] = timed

    def clear(self) -> None:
        """Forget the steps so far."""
        self._found.clear()

    def steady(self, batch: int) -> float | None:
        """Tokens a second from the third step in which `batch` sequences got tokens to the last."""
        whole = [(end, tokens) for end, count, tokens in self._found if count == batch][2:]
        if len(whole) < _LEAST:
            return None
        return sum(tokens for _, tokens in whole[1:]) / (whole[-1][0] - whole[0][0])

    def close(self) -> None:
        """Look no longer."""
        del self._methods["step"]
