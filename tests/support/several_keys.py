"""A server with several API keys: its key files, and the header of each key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

KEYS = """\
plain
first priority=true label=first
pair concurrent_requests=2
slow requests_per_minute=2
"""


def settings(tmp_path: Path, keys: str = KEYS) -> dict[str, Any]:
    """Write the files of keys and of admin keys. Return the settings of their flags."""
    (tmp_path / "keys").write_text(keys)
    (tmp_path / "admins").write_text("admin\n")
    return {
        "api_key_file": str(tmp_path / "keys"),
        "admin_key_file": str(tmp_path / "admins"),
    }


def by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
