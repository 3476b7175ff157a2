"""DiskUse: how full the disk of --batch-dir is, for the metrics."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path


class DiskUse:
    """The used share of the disk that holds `folder`.

    It is looked at in a thread, because a network file system may hang.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._share = used_share(folder)
        self._look: threading.Thread | None = None

    def share(self) -> float:
        """Return the share that the last look found, and begin the next look."""
        found = self._share
        if self._look is None or not self._look.is_alive():
            self._look = threading.Thread(target=self._update, daemon=True)
            self._look.start()
        return found

    def _update(self) -> None:
        self._share = used_share(self._folder)


def used_share(folder: Path) -> float:
    """Return the used share of a disk, 0 to 1: of its bytes or of its files, the larger one.

    Blocks that only root may use count as used, as in `df`. NaN: the disk cannot be looked at.
    """
    try:
        disk = os.statvfs(folder)
    except OSError:
        return math.nan
    used = disk.f_blocks - disk.f_bfree
    shares = [_share(used, disk.f_bavail), _share(disk.f_files - disk.f_ffree, disk.f_favail)]
    return max(shares)


def _share(used: int, free: int) -> float:
    return used / (used + free) if used + free else 0.0  # some file systems count no files
