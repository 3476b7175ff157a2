"""ApiKeys: who may come in."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from engine.errors import ConfigError
from server.config import ServerConfig


class ApiKeys:
    """The keys of the settings and of their file, as digests; none at all lets everyone in.

    Raises ConfigError where the file gives none, which would open the server, or a key that no
    client could send.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._digests = _digests(config)

    def __len__(self) -> int:
        return len(self._digests)

    def reload(self) -> None:
        """Reads the file again. Raises ConfigError, and leaves the keys as they were."""
        self._digests = _digests(self._config)

    def find(self, key: bytes) -> str | None:
        """A name for whoever sent `key`, or None. All keys are compared, whichever fits: the time
        taken tells nothing."""
        given = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return given.hex() if any(matches) else None


def _digests(config: ServerConfig) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in read_keys(config)]


def read_keys(config: ServerConfig) -> list[str]:
    """All of them, as text. Raises ConfigError."""
    keys = {f"--api-key, key {place}": key for place, key in enumerate(config.api_key, 1)}
    if config.api_key_file is not None:
        keys |= _keys_in(Path(config.api_key_file))
    for where, key in keys.items():
        if not key or not key.isprintable() or " " in key:
            raise ConfigError(
                f"{where}: a key has no white space, and in a file a comment is a line of its own."
            )
    return list(keys.values())


def _keys_in(file: Path) -> dict[str, str]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the API keys in {file}: {error}") from error
    found = {f"{file}, line {number}": line.strip() for number, line in enumerate(lines, 1)}
    keys = {where: line for where, line in found.items() if line and not line.startswith("#")}
    if not keys:
        raise ConfigError(f"{file} has no API key, one a line.")
    return keys
