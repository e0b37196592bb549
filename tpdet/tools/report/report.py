"""Writes a report: one self-contained HTML file, which appears whole."""

from pathlib import Path
from typing import Any

from tpdet.errors import NotPermittedError
from tpdet.launch.host.whole_file import write_text
from tpdet.pages.page import render

_STYLE = "tpdet.tools.report/report.css"


def write_report(path: Path, template: str, title: str, **values: Any) -> None:
    """Write the page of a template that extends `report.html`. Raises NotPermittedError."""
    page = render(template, _STYLE, title=title, **values)
    try:
        write_text(path, page.html)
    except OSError as error:
        raise NotPermittedError(f"{path} cannot be written: {error.strerror}") from error


def share(part: float, whole: float) -> float:
    """A part as percent of the whole, from 0 to 100, to two decimals."""
    return round(100 * min(max(part / whole, 0.0), 1.0), 2) if whole else 0.0
