"""API keys: read them, and check the key of a request."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from engine.errors import ConfigError
from server.config import ServerConfig


class ApiKeys:
    """SHA-256 digests of the keys of --api-key and --api-key-file.

    Without these settings, requests need no key. Raises ConfigError if the file contains no key,
    which would open the server to everyone, or if a client could not send one of the keys.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._digests = _digests(config)

    def __len__(self) -> int:
        return len(self._digests)

    def reload(self) -> None:
        """Read the file again. If that raises ConfigError, the keys are unchanged."""
        self._digests = _digests(self._config)

    def find(self, key: bytes) -> str | None:
        """Return a name for the owner of `key` (its hex digest), or None if the key is invalid.

        Compares all keys, so that the time taken reveals nothing about them.
        """
        given = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return given.hex() if any(matches) else None


def _digests(config: ServerConfig) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in read_keys(config)]


def read_keys(config: ServerConfig) -> list[str]:
    """Return all keys as text. Raises ConfigError if a key or the file is invalid."""
    keys = {f"--api-key, key {place}": key for place, key in enumerate(config.api_key, 1)}
    if config.api_key_file is not None:
        keys |= _keys_in(Path(config.api_key_file))
    for where, key in keys.items():
        if not key or not key.isprintable() or " " in key:
            raise ConfigError(
                f"{where}: an API key must not be empty or contain white space; "
                "a comment in a key file needs a line of its own."
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
        raise ConfigError(f"{file} contains no API key; write one key per line.")
    return keys
