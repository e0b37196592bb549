"""`kernels/ops` is the door from the rest of the product to the kernels of a device.

Rooms that choose, try, record or time kernels name them directly: `DIRECT` lists them.
"""

from tests.policy.test_policy import ROOT, imports, room, sources

DEVICES = ("tpdet.kernels.cpu.", "tpdet.kernels.cuda.", "tpdet.kernels.stock.")
DIRECT = {
    "bench/kernels": "times single kernels",
    "comm/exchange": "gives kernels the memory of peers",
    "layers": "stock attention of the approximate mode; the products a model has",
    "precompile": "compiles kernels for a GPU that is not there",
    "planner": "reads what is known of a GPU",
    "runner": "sets the threads of the CPU path",
    "runner/start": "compiles kernels ahead and tries them before they serve",
    "tune": "measures every variant",
}


def test_other_rooms_reach_a_devices_kernels_by_ops_alone():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}: ask kernels/ops for it, or list its room"
        for path in sources()
        if not room(path).startswith("kernels/") and room(path) not in DIRECT
        for name in imports(path)
        if f"{name}.".startswith(DEVICES)
    ]
    assert not wrong, "\n".join(wrong)
    assert set(DIRECT) <= {room(path) for path in sources()}
