"""Whether Python keeps the bytecode of what a start imports."""

import os
import sys
from pathlib import Path


def missing_bytecode(module: str) -> str | None:
    """What to say of an imported module whose bytecode Python did not keep; None if it is kept."""
    spec = sys.modules[module].__spec__
    if spec is None or spec.cached is None or spec.origin is None or os.path.exists(spec.cached):
        return None
    reason = "its folder cannot be written"
    if sys.dont_write_bytecode:
        reason = "PYTHONDONTWRITEBYTECODE is set"
    folder = Path(spec.origin).parent.parent
    return (
        f"Python keeps no bytecode of {module} ({reason}), so each process of a start compiles "
        f"its sources again, for seconds: run {sys.executable} -P -m compileall -q {folder} once"
    )
