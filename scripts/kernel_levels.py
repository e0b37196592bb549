"""Times one product by each of the GPU's levels and by the library; docs/kernels.md has them.

    python scripts/kernel_levels.py docs/results

Each level is its fastest tile whose bits are the reference's, on weights that no cache holds.
"""

import sys
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch.nn.functional import linear

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tpdet.kernels.cuda import hardware  # noqa: E402
from tpdet.kernels.cuda.gemm import trial_data  # noqa: E402
from tpdet.kernels.cuda.gemm.admission import REFERENCE, by_tile  # noqa: E402
from tpdet.kernels.cuda.gemm.choice.candidates import column_candidates  # noqa: E402
from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile  # noqa: E402
from tpdet.kernels.cuda.gemm.variants.tile import Tile  # noqa: E402
from tpdet.kernels.inputs.product import Product  # noqa: E402
from tpdet.tools.measurement.results_file import append_run  # noqa: E402
from tpdet.tools.tune.column_operands import ColumnOperands  # noqa: E402
from tpdet.tools.tune.measure import compile_all_of, full_us, quick_us  # noqa: E402
from tpdet.tools.worlds.machine import machine  # noqa: E402

SIZE = 4096
ROWS = (1, 16, 64, 2048)
TILES_OF_ROWS = (1, 16, 64, 128, 2048)  # whose candidates are tried at all ROWS
REPEATS = 9
LEVELS = {
    "2, pointers": ("pointer", "pointer_swapped"),
    "3, descriptors": ("descriptor", "descriptor_swapped"),
    "4, warps that specialise": ("warp_specialised", "warp_swapped"),
}


def main() -> None:
    """Append one run to the results file or folder that the first argument names."""
    device = torch.device("cuda")
    operands = ColumnOperands([Product("column", SIZE, SIZE)], max(ROWS), device)
    x = trial_data.trial_rows("random", max(ROWS), SIZE, device)
    reference = by_tile("column", x, operands.cold[0], REFERENCE.at(SIZE))
    gpu = hardware.gpu_of(device)
    by_rows = [column_candidates(rows, SIZE, SIZE, "column", gpu) for rows in TILES_OF_ROWS]
    tiles = list(dict.fromkeys(chain.from_iterable(by_rows)))
    rows = [row for count in ROWS for row in times_of(operands, tiles, reference, count)]
    append_run(Path(sys.argv[1]), "levels", machine("cuda", 1), "scripts/kernel_levels.py", rows)


def times_of(
    operands: ColumnOperands, tiles: list[Tile], reference: torch.Tensor, count: int
) -> list[dict[str, object]]:
    """A row for each level's fastest tile at `count` rows, beside the library."""
    x = trial_data.trial_rows("random", max(ROWS), SIZE, reference.device)[:count]
    fastest: dict[str, Tile] = {}
    for level, variants in LEVELS.items():
        runs = {
            tile: partial(by_tile, "column", x, tile=tile)
            for tile in tiles
            if tile.variant in variants
        }
        compile_all_of([partial(run, operands.cold[0]) for run in runs.values()])
        fastest[level] = next(iter(quick_us(runs, operands.cold)))
        result = runs[fastest[level]](operands.cold[0])
        if result.view(torch.int16).ne(reference[:count].view(torch.int16)).any():
            raise SystemExit(f"{fastest[level]} has other bits than the reference")
    runs = [partial(by_tile, "column", x, tile=tile) for tile in fastest.values()]
    *ours, library = full_us([*runs, partial(linear, x)], operands.cold, REPEATS)
    rows = [
        {"case": f"level {level}", "value": round(us, 2), "unit": "us", "batch": count}
        | {"tile": format_tile(tile), "peer": "cuBLAS", "peer_value": round(library, 2)}
        | {"ratio": round(us / library, 4), "model": f"{SIZE} x {SIZE}", "dtype": "bfloat16"}
        for (level, tile), us in zip(fastest.items(), ours, strict=True)
    ]
    for row in rows:
        print(row, flush=True)
    return rows


if __name__ == "__main__":
    main()
