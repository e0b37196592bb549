"""Steps behind unverified drafts on a GPU: their answers are those without drafts, on graphs."""

import torch

from tests.engine import test_drafts_ahead as ahead
from tests.gpu.lib.suite import Check
from tests.lib.engine_harness import run
from tpdet.runner.graphs.draft_moves import DraftMoves
from tpdet.tools.synthetic.make_model import make_model


def drafts_behind_drafts(folder):
    """Right, wrong and half right drafts behind drafts, greedy, random and filtered, on graphs."""
    moved, settled, notes = [], [], []
    write, settle = DraftMoves.write, DraftMoves.settle

    def noting(self, ids, parts):
        write(self, ids, parts)
        moved.append(self.moved)

    def waiting(self):
        settled.append(1)
        return settle(self)

    runners: list = []
    how = {"device": "cuda", "max_num_seqs": 16, "max_model_len": 1024, "runners": runners}
    DraftMoves.write, DraftMoves.settle = noting, waiting
    try:
        model = make_model(folder, like="qwen3", dtype="bfloat16", vocab=1100)
        plain = run(model, ahead.ALL, look=False, **how)
        for kind in ("right", "half", "wrong"):
            moved.clear()
            found = ahead.with_drafts(plain, model, kind, **how)
            ahead.assert_same(found, plain, ahead.ALL)
            places = torch.cat(moved).cpu().tolist()
            assert len(places) > 50, "no row followed unverified drafts"
            assert set(places) == {0} if kind == "wrong" else len({*places}) > 3
            notes.append(f"{kind}: {len(places)} tokens behind drafts, moved by {max(places)}")
        found = ahead.with_drafts(plain, model, "half", preempt_every=5, **how)
        ahead.assert_same(found, plain, ahead.ALL)
        notes.append(f"preempted: {len(settled)} steps waited for the tokens")
    finally:
        DraftMoves.write, DraftMoves.settle = write, settle
        for runner in runners:
            runner.close()
    return "; ".join(notes)


def drafts_ahead_checks(folder):
    """One check, which makes its model in a folder."""
    return [Check("drafts behind drafts", drafts_behind_drafts, (folder / "drafts-ahead",))]
