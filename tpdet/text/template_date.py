"""The date that a chat template prints: an input of the request, never the clock.

Templates call `strftime_now(format)`, as in transformers. Here it formats a date that the request
or the operator gives, at midnight.
"""

import datetime
import re
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes

from tpdet.arguments.dates import date_of
from tpdet.errors import CheckpointError, RequestError, UsageError
from tpdet.text.template_language import TemplateLanguage, loads_name

CLOCK, DATE = "strftime_now", "current_date"
"""The function that templates call, and the variable by which a request gives the date."""
LONGEST_FORMAT = 100
_DIRECTIVE = re.compile(r"%[-_0^#]?(.?)", re.DOTALL)
# Without those that read the zone (%Z, %z, %s), a locale (%c, %x, %X), or fractions of a second.
_KNOWN = frozenset("aAbBCdDeFgGhHIjklmMnpPrRStTuUVwWyY%")


class TemplateDate:
    """`strftime_now` of one date."""

    def __init__(self, date: datetime.date) -> None:
        self._time = datetime.datetime.combine(date, datetime.time())

    def __call__(self, format: str) -> str:
        """The date by Python's `strftime`. Raises jinja2.TemplateError for other directives."""
        if not isinstance(format, str) or len(format) > LONGEST_FORMAT:
            raise jinja2.TemplateError(f"{CLOCK} takes a text of {LONGEST_FORMAT} characters")
        for found in _DIRECTIVE.finditer(format):
            if found[1] not in _KNOWN:
                raise jinja2.TemplateError(
                    f"{CLOCK} cannot give {found[0]!r}: its text would depend on the machine"
                )
        return self._time.strftime(format)


class ClockUse(NamedTuple):
    """Whether a template calls `strftime_now`, and whether it asks first if there is one."""

    reads: bool
    needs: bool

    @classmethod
    def of(cls, tree: nodes.Template) -> "ClockUse":
        """How a parsed template uses the clock."""
        reads = loads_name(tree, CLOCK)
        asks = any(
            test.name == "defined" and isinstance(test.node, nodes.Name) and test.node.name == CLOCK
            for test in tree.find_all(nodes.Test)
        )
        return cls(reads, reads and not asks)

    def variables(self, given: object, usual: str | None) -> dict[str, Any]:
        """What the template reads of a date: the request's (`given`), else the operator's.

        Raises RequestError for what is no date, and for none where one is needed.
        """
        place = "chat_template_kwargs"
        if not self.reads:
            return {}
        if given is None and usual is None:
            if self.needs:
                raise RequestError(
                    "this chat template prints the date, and an answer must not depend on the "
                    f'clock: send {place} {{"{DATE}": "YYYY-MM-DD"}}, or start with '
                    "--chat-template-date YYYY-MM-DD (TPDET_CHAT_TEMPLATE_DATE)",
                    place,
                )
            return {}
        date = date_of(usual if given is None else given)
        if date is None:
            raise RequestError(
                f"{place} has {DATE} {str(given)[:40]!r}: give a date such as 2026-01-31", place
            )
        return {CLOCK: TemplateDate(date)}


def check_date_setting(date: str | None, template: str | None) -> None:
    """Refuse (UsageError) a date that the template would never read."""
    if date is None:
        return
    try:
        read = template is not None and ClockUse.of(TemplateLanguage().parse(template)).reads
    except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError) as error:
        raise CheckpointError(
            f"chat template: {str(error)[:500]}: correct it or give another with --chat-template"
        ) from error
    if not read:
        raise UsageError(
            f"--chat-template-date {date}: the chat template never calls {CLOCK}, so no date "
            "reaches it: leave it out"
        )
