"""How full the disk of --batch-dir is, and what the metrics show of it."""

from __future__ import annotations

import errno
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from server.batch.disk import DiskUse, used_share
from tests.support.fake_engine import FakeEngine
from tests.support.rig import serving


def disk(**fields: int) -> os.statvfs_result:
    """Return the answer of statvfs for a disk of 1,000 blocks and 100 files, all free."""
    names = ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail")
    free = (4096, 4096, 1000, 1000, 1000, 100, 100, 100)
    values = dict(zip(names, free, strict=True)) | fields
    return os.statvfs_result((*values.values(), 0, 255))


@pytest.mark.parametrize(
    ("found", "share"),
    [
        (disk(), 0.0),
        (disk(bfree=250, bavail=250), 0.75),
        (disk(bfree=50, bavail=0), 1.0),  # the last blocks are root's
        (disk(bfree=500, bavail=500, ffree=10, favail=10), 0.9),  # inodes run out first
        (disk(files=0, ffree=0, favail=0, bfree=100, bavail=100), 0.9),  # as on btrfs
    ],
)
def test_used_share_is_that_of_bytes_or_inodes(
    monkeypatch: pytest.MonkeyPatch, found: os.statvfs_result, share: float
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    assert used_share(Path("/")) == share


def test_used_share_of_a_disk_that_is_gone_is_nan(tmp_path: Path) -> None:
    assert math.isnan(used_share(tmp_path / "none"))


async def test_metric_shows_a_disk_that_fills_up_and_no_scrape_waits_for_a_hanging_one(
    model: Path, says: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Semaphore(0)
    looks: list[int] = []

    def statvfs(path: Any) -> os.statvfs_result:
        looks.append(1)
        answers.acquire()
        return disk(bfree=20, bavail=20)

    store = str(tmp_path / "dir")
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: disk(bfree=600, bavail=600))
        async with serving(FakeEngine(says("x")), model, batch_dir=store) as served:
            patched.setattr(os, "statvfs", statvfs)
            name = "batch_disk_usage_perc"
            assert await served.metric(name) == 0.4
            assert await served.metric(name) == 0.4, "the first look still hangs"
            assert len(looks) == 1, "no second thread waits for the disk"
            answers.release(2)
            use = served.app.state.batches.storage.disk
            use._look.join(10)
            assert await served.metric(name) == 0.98


async def test_metric_without_batch_dir_is_zero(served: Any) -> None:
    assert await served.metric("batch_disk_usage_perc") == 0


def test_disk_use_after_an_error_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = DiskUse(tmp_path)

    def refuse(path: Any) -> os.statvfs_result:
        raise OSError(errno.EIO, "Input/output error")

    for look, expected in ((refuse, math.nan), (lambda path: disk(bfree=0, bavail=0), 1.0)):
        monkeypatch.setattr(os, "statvfs", look)
        use.share()
        assert use._look is not None
        use._look.join(10)
        assert use.share() == pytest.approx(expected, nan_ok=True)
        use._look.join(10)
