"""A world's exchange whose ranks keep their own rows of the stream alone, as over peer memory."""

import torch

from tpdet.comm.exchange.fold import GatherExchange


class OwnedStream(GatherExchange):
    """h of rows that a rank does not own is NaN; a step of few rows is everybody's."""

    few = 8

    def owners(self, rows):
        """The owner of each row of a micro-batch [M]; -1 where every rank has it."""
        share = -(-rows // self._world.size)
        return torch.arange(rows) // share if rows > self.few else torch.full((rows,), -1)

    def fold_and_norm(self, sums, finish, plan=None):
        """As that of a gather, but for the rows of others: of them each rank has y alone."""
        h, y = super().fold_and_norm(sums, finish, plan)
        owners = self.owners(len(h))
        theirs = (owners >= 0) & (owners != self._world.rank)
        return h.masked_fill(theirs[:, None], float("nan")), self._of_owners(y, owners)

    def stream_rows(self, hidden_MH, numbers_R, parts):
        """Those that their owners have."""
        owners = torch.cat([self.owners(rows) for rows in parts])[numbers_R]
        return self._of_owners(hidden_MH[numbers_R], owners)

    def _of_owners(self, mine, owners):
        everyone = self._world.all_gather(mine)
        return everyone[owners.clamp(min=0), torch.arange(len(mine))]
