from __future__ import annotations

from pathlib import Path

import pytest

from engine.checkpoint.gguf import folder


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of GGUF files are made in a temporary folder."""
    monkeypatch.setattr(folder, "cache_folder", lambda kind: tmp_path / "cache" / kind)
    return tmp_path / "cache" / "gguf"
