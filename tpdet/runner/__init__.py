"""One rank's step: plan to tensors, through the model, to token ids."""

from tpdet.runner.runner import Runner
from tpdet.runner.start.contracts import Contracts
from tpdet.runner.start.loading import Tick
from tpdet.runner.step.shared_rows import RowSharing
from tpdet.runner.step.taking import Follower, LogitBlock, TakeLogits

__all__ = ["Contracts", "Follower", "LogitBlock", "RowSharing", "Runner", "TakeLogits", "Tick"]
