"""Key files: the API keys, and what each may use.

This module imports no HTTP library, so that a bad file is refused before anything is loaded.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from engine.errors import ConfigError
from server.config import ServerConfig
from server.http.addresses import is_loopback
from server.http.key_limits import ApiKey, parse_limits

LABEL = re.compile(r"[A-Za-z0-9._@-]{1,64}")


def check_access(config: ServerConfig) -> None:
    """Raise ConfigError if the keys cannot be read, or if the pages need one and there is none."""
    check_ui(config, has_keys=bool(read_limited_keys(config)))


def check_ui(config: ServerConfig, *, has_keys: bool) -> None:
    """Raise ConfigError if the network could open the pages without a key."""
    if config.ui and not has_keys and not is_loopback(config.host):
        raise ConfigError(
            f"--ui needs an API key if the server listens on {config.host}, because the pages show "
            "what the server computes. Set --api-key-file, or listen on 127.0.0.1."
        )


def read_limited_keys(config: ServerConfig) -> list[ApiKey]:
    """Return the keys of --api-key and of both key files.

    Raises ConfigError if a key or a limit is invalid, or if a file cannot be read or contains no
    key, which would open the server to everyone.
    """
    keys = {f"--api-key, key {place}": ApiKey(key) for place, key in enumerate(config.api_key, 1)}
    if config.api_key_file is not None:
        keys |= _keys_in(Path(config.api_key_file))
    if config.admin_key_file is not None:
        for where, key in _keys_in(Path(config.admin_key_file)).items():
            keys[where] = replace(key, is_admin=True)
    for where, key in keys.items():
        if not key.text or not key.text.isprintable() or " " in key.text:
            raise _invalid_key(where)
    return list(keys.values())


def _invalid_key(where: str) -> ConfigError:
    return ConfigError(
        f"{where}: an API key must not be empty or contain white space; "
        "a comment in a key file needs a line of its own."
    )


def _keys_in(file: Path) -> dict[str, ApiKey]:
    """Return the keys of a file by their places. A line is a key, and its limits behind it."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the API keys in {file}: {error}") from error
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if line and not line.startswith("#"):
            where = f"{file}, line {number}"
            key = _key_in(line, where)
            earlier = [place for place, other in keys.items() if other.text == key.text]
            if earlier:
                raise ConfigError(f"{where} repeats the key of {earlier[0]}; give each key once.")
            keys[where] = key
    if not keys:
        raise ConfigError(f"{file} contains no API key; write one key per line.")
    return keys


def _key_in(line: str, where: str) -> ApiKey:
    text, *words = re.split("[ \t]+", line)
    if not all("=" in word for word in words):
        raise _invalid_key(where)
    label = ""
    may_prioritize = False
    limits = []
    for word in words:
        name, _, value = word.partition("=")
        if name == "label":
            label = _label(value, where)
        elif name == "priority":
            may_prioritize = _permission(name, value, where)
        else:
            limits.append(word)
    try:
        key_limits = parse_limits(limits)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}.") from error
    return ApiKey(text, key_limits, label=label, may_prioritize=may_prioritize)


def _label(value: str, where: str) -> str:
    if not LABEL.fullmatch(value):
        message = "label must be 1 to 64 letters, digits, or characters of `._@-`"
        raise ConfigError(f"{where}: {message}.")
    return value


def _permission(name: str, value: str, where: str) -> bool:
    if value not in ("true", "false"):
        raise ConfigError(f"{where}: {name} must be true or false.")
    return value == "true"
