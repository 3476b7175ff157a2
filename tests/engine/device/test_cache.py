"""Cache folders: others can neither write them nor replace what is in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.device.cache import (
    UNUSED_S,
    delete_unused,
    make_cache_folder,
    protect_triton_folder,
    triton_folder,
)


def test_delete_unused_deletes_old_folders_too_and_follows_no_link(tmp_path: Path) -> None:
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    (cache / "old").mkdir(parents=True)
    elsewhere.mkdir()
    (cache / "old" / "file").touch()
    (elsewhere / "file").touch()
    (cache / "link").symlink_to(elsewhere)
    for path in (cache / "old", cache / "link"):
        os.utime(path, (0, 0), follow_symlinks=False)
    delete_unused(cache, lambda name: False)
    assert list(cache.iterdir()) == []
    assert (elsewhere / "file").exists()
    delete_unused(tmp_path / "absent", lambda name: False)


def test_delete_unused_keeps_what_is_current_at_any_age(tmp_path: Path) -> None:
    file = tmp_path / "current"
    file.touch()
    os.utime(file, (UNUSED_S, UNUSED_S))
    delete_unused(tmp_path, lambda name: name == "current")
    assert file.exists()


@pytest.mark.parametrize(("mode", "is_used"), [(0o700, True), (0o755, True), (0o775, False)])
def test_triton_compiles_into_a_private_folder_if_others_can_write_its_own(
    mode: int, is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "triton"
    make_cache_folder(folder)
    folder.chmod(mode)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    protect_triton_folder()
    now = triton_folder(os.environ)
    assert now is not None
    assert (now == folder) == is_used
    assert now.stat().st_mode & 0o22 == 0
