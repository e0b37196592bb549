"""Makes one self-contained HTML page of a template: no script, nothing fetched, all text escaped.

A template is named by its package and file, `tpdet.pages/base.html`, and extends that one. A page
has one style sheet, and a content policy that admits this sheet alone; so whatever a model's name,
a reason or a file says, nothing of it can run or load anything.
"""

import base64
import hashlib
import unicodedata
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

MOST_SHOWN = 240
"""Characters of one text that a page shows, where its template bounds it (`|shown`)."""
_BASE = "tpdet.pages/base.css"


class HtmlPage(NamedTuple):
    """A whole page, and the content policy that it is to be shown under."""

    html: str
    policy: str


def render(template: str, *styles: str, served: bool = False, **values: Any) -> HtmlPage:
    """The page of a template.

    styles: sheets behind the base sheet, named as templates are. served: its policy is sent beside
    it; else it is in the page. values: what the template shows.
    """
    style = "".join(_source(name) for name in (_BASE, *styles))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    text = _environment().get_template(template)
    html = text.render(style=Markup(style), policy=policy, served=served, **values)
    return HtmlPage(html, policy)


def shown(value: object, most: int = MOST_SHOWN) -> str:
    """A text as a page shows it: of a long one the beginning, and no control characters.

    Those that turn the direction of what follows are among these.
    """
    text = str(value)
    cut = text[:most]
    safe = "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(one) in ("Cc", "Cf", "Cs") else one
        for one in cut.replace("\n", " ")
    )
    return safe if len(text) <= most else f"{safe}… ({len(text):,} characters)"


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_source),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = shown
    environment.filters["grouped"] = lambda number: f"{number:,}"
    return environment


@cache
def _source(name: str) -> str:
    """The text of a template or sheet, by package and file."""
    package, _, file = name.partition("/")
    return files(package).joinpath(file).read_text("utf-8")
