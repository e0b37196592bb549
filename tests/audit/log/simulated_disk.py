"""A disk in memory that loses power at any operation, and with it what was not synced.

A file's bytes survive if the file was synced after them, its name if its folder was. Without that
either may survive, whole, cut or followed by zeros, or not: `after_power_loss` draws it.
"""

from __future__ import annotations

import copy
import errno
import random
from collections.abc import Callable
from pathlib import Path

from tpdet.audit.log.disk import Disk

FOLDER = "folder"


class PowerLoss(BaseException):
    """The machine is off: every operation raises it from here on."""


class File:
    """The bytes of a file, and those of them that are durable."""

    def __init__(self, durable: bytes = b"") -> None:
        self.data = self.durable = durable

    def survived(self, draw: random.Random | None) -> bytes:
        if draw is None or self.data == self.durable:
            return self.durable
        kept = draw.choice([self.durable, self.data])
        if kept is self.durable:
            return kept
        least = len(self.durable) if kept.startswith(self.durable) else 0
        cut = kept[: draw.randrange(least, len(kept) + 1)]
        return draw.choice([kept, cut, cut + bytes(len(kept) - len(cut))])


class SimulatedDisk(Disk):
    """All under one root. `power_loss_at`: the number of the operation that is not done any more.

    `watch` is called before each operation. `failing`: the errno that operations of a name fail
    with; `room`: bytes until it is full.
    """

    def __init__(self, power_loss_at: int | None = None, draw: random.Random | None = None) -> None:
        self.folders: dict[Path, dict[str, File | str]] = {Path("/"): {}}
        self.durable: dict[Path, dict[str, File | str]] = {Path("/"): {}}
        self.open: dict[int, File] = {}
        self.operations = 0
        self.power_loss_at, self.draw = power_loss_at, draw or random.Random(0)
        self.failing: dict[str, int] = {}
        self.room: int | None = None
        self.watch: Callable[[], None] = lambda: None

    def _operation(self, name: str) -> None:
        if self.power_loss_at is not None and self.operations >= self.power_loss_at:
            raise PowerLoss
        self.watch()
        self.operations += 1
        if name in self.failing:
            raise OSError(self.failing[name], "failed on purpose")

    def _entry(self, path: Path) -> File | str:
        try:
            return self.folders[path.parent][path.name]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path)) from None

    def read(self, path: Path) -> bytes:
        entry = self._entry(path)
        assert isinstance(entry, File)
        return entry.data

    def read_durable(self, path: Path) -> bytes:
        entry = self._entry(path)
        assert isinstance(entry, File)
        self._operation("sync")
        entry.durable = entry.data
        return entry.data

    def names(self, folder: Path) -> list[str]:
        return sorted(self.folders.get(folder, {}))

    def has_folder(self, path: Path) -> bool:
        return path in self.folders

    def lock(self, path: Path) -> int:
        return self.create(path)

    def create(self, path: Path) -> int:
        self._operation("create")
        if path.parent not in self.folders:
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(path))
        entry = self.folders[path.parent].setdefault(path.name, File())
        assert isinstance(entry, File)
        entry.data = b""
        self.open[len(self.open)] = entry
        return len(self.open) - 1

    def write(self, descriptor: int, data: bytes) -> int:
        file = self.open[descriptor]
        data = bytes(data)
        try:
            self._operation("write")
        except PowerLoss:
            file.data += data[: self.draw.randrange(len(data) + 1)]
            raise
        if self.room is not None:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            data = data[: self.room]
            self.room -= len(data)
        file.data += data
        return len(data)

    def sync(self, descriptor: int) -> None:
        self._operation("sync")
        self.open[descriptor].durable = self.open[descriptor].data

    def close(self, descriptor: int) -> None:
        pass

    def rename(self, old: Path, new: Path) -> None:
        self._operation("rename")
        self.folders[new.parent][new.name] = self._entry(old)
        del self.folders[old.parent][old.name]

    def remove(self, path: Path) -> None:
        self._operation("remove")
        self.folders[path.parent].pop(path.name, None)

    def make_folder(self, path: Path) -> bool:
        self._operation("make_folder")
        made = path not in self.folders
        if made:
            self.folders[path.parent][path.name] = FOLDER
            self.folders[path] = {}
            self.durable.setdefault(path, {})
        return made

    def remove_folder(self, path: Path) -> None:
        self._operation("remove_folder")
        assert not self.folders[path]
        del self.folders[path], self.folders[path.parent][path.name]

    def sync_folder(self, path: Path) -> None:
        self._operation("sync_folder")
        self.durable[path] = dict(self.folders[path])

    def after_power_loss(self, draw: random.Random | None = None) -> SimulatedDisk:
        """The disk after the power is back: what was not synced is gone, or drawn."""
        after = SimulatedDisk()
        waiting = [Path("/")]
        while waiting:
            folder = waiting.pop()
            durable, live = self.durable.get(folder, {}), self.folders.get(folder, {})
            after.folders[folder] = {}
            for name in sorted({*durable, *live}):
                entry = durable.get(name)
                if draw is not None and live.get(name) is not entry:
                    entry = draw.choice([entry, live.get(name)])
                if entry == FOLDER:
                    after.folders[folder][name] = FOLDER
                    waiting.append(folder / name)
                elif isinstance(entry, File):
                    after.folders[folder][name] = File(entry.survived(draw))
        after.durable = {folder: dict(names) for folder, names in after.folders.items()}
        return after

    def after_kill(self) -> SimulatedDisk:
        """The disk for the next process: nothing is lost, and nothing is synced."""
        watch, self.watch = self.watch, lambda: None
        after = copy.deepcopy(self)
        self.watch = watch
        return after
