"""How many tokens of prompts a step reads while sequences decode: by what their readers feel.

Every decoding row's next token waits for the step's prompts. So a step has few rows, yet so many
that prompts are read nearly as fast as by any number of rows beside these decoding rows. The larger
the part of a step that those take anyway (their rows, their keys, the weights), the longer it is.
Several prompts lose little by a short step, as the first of them ends sooner; one prompt that is
cut into many does. Chunks lie on no bit. The times are estimates: no clock is read.
"""

from bisect import bisect_right
from typing import NamedTuple

from tpdet.control.step_seconds import StepSeconds

LEAST_SPEED, SPEED, MOST_SPEED = 0.8, 0.92, 0.98
"""Prompt tokens a second, as shares of the most: of any step; of one that the first prompt alone
could fill; and the most that a step has where many tokens wait."""
WAITING_STEPS = 4
"""Steps in which all prompts that wait are to be read, if `MOST_SPEED` allows that."""


class WaitingPrompts(NamedTuple):
    """Tokens of prompts that no step has computed yet.

    first: of the prompt that is read next, behind `depth` tokens of it; total: of all.
    """

    first: int
    depth: int
    total: int


class PromptBudget:
    """The rows of a step with prompts, by the decoding rows that are in it."""

    def __init__(self, seconds: StepSeconds) -> None:
        self._seconds = seconds

    def rows(self, decoding: int, keys: int, prompts: WaitingPrompts, most: int) -> int:
        """How many rows the next step may have, those that decode among them; `most` at most.

        decoding: rows, which read `keys` keys.
        """
        speeds = self._speeds(decoding, keys, prompts.depth, most)
        if not speeds:
            return most
        best = max(speed for _, speed in speeds)
        least, usual, longest = (
            next(rows for rows, speed in speeds if speed >= share * best)
            for share in (LEAST_SPEED, SPEED, MOST_SPEED)
        )
        whole = min(decoding + prompts.first, usual)
        sooner = min(decoding + prompts.total // WAITING_STEPS, longest)
        return next(rows for rows, _ in speeds if rows >= max(least, whole, sooner))

    def _speeds(self, decoding: int, keys: int, depth: int, most: int) -> list[tuple[int, float]]:
        """Prompt tokens a second of steps with each graph's rows, ascending."""
        table = self._seconds
        first, end = bisect_right(table.rows, decoding), bisect_right(table.rows, most)
        return [
            (rows, (rows - decoding) / table.of(rows, keys, (rows - decoding) * depth))
            for rows in table.rows[first:end]
        ]
