"""`kernels/ops` is the door from the rest of the product to the kernels of a device.

Rooms that choose, try, record or time kernels name them directly: `DIRECT` lists them.
"""

from pathlib import Path

from tests.policy.test_policy import ROOT, imports, part, sources

DEVICES = ("tpdet.kernels.cpu.", "tpdet.kernels.cuda.", "tpdet.kernels.stock.")
FACTS = "tpdet.kernels.cuda.hardware."
"""What is known of GPUs is no kernel: everybody may read it."""
DIRECT = {
    "tools/bench/kernels": "times single kernels",
    "comm/exchange": "gives kernels the memory of peers",
    "layers": "stock attention of the approximate mode; the products a model has",
    "tools/compile": "compiles kernels for a GPU that is not there",
    "nn/invariant_mode": "tries the CPU's products for the terms that a model shows it",
    "tools/plan": "reads what is known of a GPU",
    "runner": "sets the threads of the CPU path",
    "runner/start": "compiles kernels ahead and tries them before they serve",
    "tools/tune": "measures every variant",
}


def test_other_rooms_reach_a_devices_kernels_by_ops_alone():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}: ask kernels/ops for it, or list its room"
        for path in sources()
        if part(path) != "kernels" and not listed(path)
        for name in imports(path)
        if f"{name}.".startswith(DEVICES) and not name.startswith(FACTS)
    ]
    assert not wrong, "\n".join(wrong)
    assert set(DIRECT) == {listed(path) for path in sources()} - {None}


def listed(path: Path) -> str | None:
    """The entry of `DIRECT` for a file's folder."""
    folder = path.parent.relative_to(ROOT).as_posix().removeprefix("tpdet/")
    return folder if folder in DIRECT else None
