"""Names of the weights that serve: a number, a label, a digest; on rank 0."""

from typing import NamedTuple

from tpdet.errors import ReloadError

FIRST_VERSION = "default"
"""What the weights of the start are called, as in vLLM."""


class WeightName(NamedTuple):
    """The operators' label of some weights, and the model digest, 64 hex digits."""

    version: str
    digest: str


class WeightVersions:
    """The names of the present weights and of those before; a label names one digest for ever.

    number: 0 at start, and one more after each update.
    """

    def __init__(self, digest: str) -> None:
        self._names = [WeightName(FIRST_VERSION, digest)]  # by number
        self._labels = {FIRST_VERSION: digest}

    @property
    def number(self) -> int:
        """The number of the present weights."""
        return len(self._names) - 1

    @property
    def version(self) -> str:
        """The label of the present weights."""
        return self._names[-1].version

    @property
    def digest(self) -> str:
        """The digest of the present weights."""
        return self._names[-1].digest

    def named(self, number: int) -> WeightName:
        """The names of the weights of a number."""
        return self._names[number]

    def check(self, version: str, digest: str) -> None:
        """Refuse (ReloadError) a label that other weights had."""
        before = self._labels.get(version)
        if before not in (None, digest):
            raise ReloadError(
                f"version {version!r} was the name of weights {before[:12]}, these are "
                f"{digest[:12]}: choose a name that was not used",
                code="conflict",
            )

    def rename(self, version: str) -> None:
        """Call the present weights `version` from now on. Raises ReloadError as `check`."""
        self.check(version, self.digest)
        self._names[-1] = WeightName(version, self.digest)
        self._labels[version] = self.digest

    def advance(self, digest: str, version: str | None = None) -> None:
        """Other weights serve from now on; without a label they are called by their number.

        Raises ReloadError as `check`, and changes nothing then.
        """
        label = str(self.number + 1) if version is None else version
        if version is None and self._labels.get(label, digest) != digest:
            label = f"{label}-{digest[:12]}"  # somebody has used the number as a name
        self.check(label, digest)
        self._names.append(WeightName(label, digest))
        self._labels[label] = digest
