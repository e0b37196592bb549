"""Makes the picture of a report that the README shows: docs/verify-report.png.

    python scripts/report_picture.py

The page is that of `tpdet verify --html` for a run on four H200s, of `docs/results`; it is
opened in a headless Chromium, which must be installed.
"""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.lib.headless import PROGRAM, Browser  # noqa: E402
from tpdet.tools.verify.page import write_page  # noqa: E402
from tpdet.tools.verify.results import runs_of  # noqa: E402

RESULTS, COMMIT, RELATIONS = ROOT / "docs" / "results" / "verify.h200.json", "59dc10b", 20
WIDTH, BELOW = 960, 24  # pixels: of the picture, and below the matrix
END = "document.querySelector('.matrix').getBoundingClientRect().bottom"


def main() -> None:
    """Render the run, and take the picture."""
    if PROGRAM is None:
        sys.exit("install chromium first")
    records = [
        run
        for run in json.loads(RESULTS.read_text())
        if run["commit"] == COMMIT and len(run["rows"]) == RELATIONS
    ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        page = Path(name) / "page.html"
        write_page(page, runs_of(records))
        browser = Browser(Path(name) / "profile")
        try:
            browser.call("Emulation.setScrollbarsHidden", hidden=True)
            browser.open(page.as_uri(), width=WIDTH)
            height = int(browser.evaluate(END)) + BELOW
            browser.open(page.as_uri(), width=WIDTH, height=height)
            browser.screenshot(ROOT / "docs" / "verify-report.png")
        finally:
            browser.close()


if __name__ == "__main__":
    main()
