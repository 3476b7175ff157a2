"""StoreFolder: one process at a time, and a secret key that is made once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_store.folder import StoreFolder, check_folder


def test_key_is_made_once_and_only_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "a" / "kv"
    first = StoreFolder.open(path)
    key = first.key_for("x")
    assert key != first.key_for("y")
    first.close()
    again = StoreFolder.open(path)
    assert again.key_for("x") == key
    again.close()
    assert (path / "key").stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == 0o700
    other = StoreFolder.open(tmp_path / "other")
    assert other.key_for("x") != key
    other.close()


def test_second_server_of_a_folder_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    first = StoreFolder.open(tmp_path)
    with pytest.raises(ConfigError, match=f"another server uses {tmp_path}"):
        StoreFolder.open(tmp_path)
    first.close()
    StoreFolder.open(tmp_path).close()


def test_damaged_key_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    StoreFolder.open(tmp_path).close()
    (tmp_path / "key").write_bytes(b"short")
    folder = StoreFolder.open(tmp_path)
    folder.close()
    assert "is damaged" in caplog.text
    assert len((tmp_path / "key").read_bytes()) == 32


def test_key_that_others_could_read_gets_its_mode_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    StoreFolder.open(tmp_path).close()
    (tmp_path / "key").chmod(0o660)
    StoreFolder.open(tmp_path).close()
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert "could be read by other users" in caplog.text


def test_key_of_another_kind_or_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StoreFolder.open(tmp_path).close()
    key = tmp_path / "key"
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: key.stat().st_uid + 1)
        if key.stat().st_uid:
            with pytest.raises(ConfigError, match="is not a file of this user"):
                StoreFolder.open(tmp_path)
    key.unlink()
    os.mkfifo(key)
    with pytest.raises(ConfigError, match="is not a file of this user"):
        StoreFolder.open(tmp_path)
    key.unlink()
    key.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="--kv-cache-dir: "):
        StoreFolder.open(tmp_path)


def test_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="--kv-cache-dir: cannot open"):
        StoreFolder.open(tmp_path / "file")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_prefix_caching": False}, "needs --enable-prefix-caching"),
        ({"tensor_parallel_size": 2}, "works with one process only"),
        ({"load_format": "dummy"}, "needs weights that are the same"),
    ],
)
def test_settings_that_keep_nothing_are_refused(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    check_folder(EngineConfig())
    with pytest.raises(ConfigError, match=message):
        check_folder(EngineConfig(kv_cache_dir=str(tmp_path), **settings))  # type: ignore[arg-type]
    check_folder(EngineConfig(kv_cache_dir=str(tmp_path)))
