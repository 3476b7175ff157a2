"""The layers of a setting: flag, environment, YAML file, default, in this order of precedence.

Everything here is read off the fields of ServerConfig and EngineConfig: flag and variable names,
what is allowed, the panels of `--help`, the page `docs/flags.md`. A wrong value is reported with
the place it came from.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.config import ServerConfig
from server.exits import MEANINGS

PREFIX = "PENSTOCK_"
CONFIG_VARIABLE = "PENSTOCK_CONFIG"
# Kubernetes sets PENSTOCK_PORT=tcp://... and more in every pod beside a Service named `penstock`.
SERVICE_LINK = re.compile(r"PENSTOCK_(SERVICE_|PORT_\d+_)\w+")
SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")
HUMAN_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt])(i?b?)", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    """One field of a configuration, as the command line, the environment and the docs see it."""

    owner: type[msgspec.Struct]
    name: str
    annotation: Any
    kind: Any  # the annotation without its Meta and without None
    meta: msgspec.Meta
    default: Any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def panel(self) -> str:
        return str((self.meta.extra or {})["panel"])

    @property
    def is_size(self) -> bool:
        return bool((self.meta.extra or {}).get("size"))

    @property
    def is_secret(self) -> bool:
        return bool((self.meta.extra or {}).get("secret"))

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def repeats(self) -> bool:
        return typing.get_origin(self.kind) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        if typing.get_origin(self.kind) is not Literal:
            return ()
        return tuple(str(choice) for choice in typing.get_args(self.kind))

    @property
    def default_text(self) -> str:
        if self.default is None or self.default == ():
            return ""
        return str(self.default).lower() if self.is_switch else f"{self.default:{self._format}}"

    @property
    def _format(self) -> str:
        return "g" if isinstance(self.default, float) else ""

    @property
    def allowed(self) -> str:
        """What a value may be, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = {bool: "true or false", int: "a whole number", float: "a number"}
        text = words.get(self.kind, "a list of texts" if self.repeats else "a text")
        bounds = {"at least": self.meta.ge, "above": self.meta.gt, "at most": self.meta.le}
        limits = " and ".join(
            f"{word} {value}" for word, value in bounds.items() if value is not None
        )
        sizes = " (32k, 32K and 2GiB are understood)" if self.is_size else ""
        return " ".join(filter(None, [text, limits])) + sizes


def settings() -> Iterator[Setting]:
    """Every field of both configurations, in the order of declaration, the engine's first."""
    for owner in (EngineConfig, ServerConfig):
        hints = typing.get_type_hints(owner, include_extras=True)
        for field in msgspec.structs.fields(owner):
            annotation = hints[field.name]
            inner = annotation
            if typing.get_origin(annotation) in (Union, types.UnionType):
                inner = typing.get_args(annotation)[0]
            kind, meta = typing.get_args(inner)
            yield Setting(owner, field.name, annotation, kind, meta, field.default)


def human_size(text: str) -> str:
    """`32k` as digits: k m g are thousands, K M G and Ki Mi Gi powers of 1024, kB MB GB thousands.

    The one-letter suffixes are vLLM's. Other text is returned as it is, for validation to refuse.
    """
    if not (match := HUMAN_SIZE.fullmatch(text.strip())):
        return text
    number, letter, rest = match.groups()
    binary = "i" in rest.lower() or (letter.isupper() and not rest)
    return str(
        int(float(number) * (1024 if binary else 1000) ** ("kmgt".index(letter.lower()) + 1))
    )


@dataclass(frozen=True)
class Given:
    """A value from a layer, and the words that name its source."""

    value: Any
    source: str


def load(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None
) -> tuple[ServerConfig, EngineConfig, list[str]]:
    """Both configurations and warnings for the user, from all layers.

    `flags` holds field names; a value of None or an empty list was not given. `file` falls back to
    PENSTOCK_CONFIG. Raises ConfigError naming every wrong value and its source.
    """
    known = {setting.name: setting for setting in settings()}
    if file is None and (named := environ.get(CONFIG_VARIABLE)):
        file = Path(named)
    given: dict[str, Given] = _from_file(file, known) if file else {}
    from_environment, warnings = _from_environment(environ, known)
    given |= from_environment
    for name, value in flags.items():
        if value is not None and value != []:
            given[name] = Given(value, known[name].flag)
            if known[name].is_secret:
                warnings.append(
                    f"{known[name].flag} shows the secret to everyone who can list processes; "
                    f"{known[name].variable} or --api-key-file does not."
                )
    errors: list[str] = []
    values = {name: _convert(known[name], entry, errors) for name, entry in given.items()}
    if errors:
        raise ConfigError("\n".join(errors))
    parts = [
        owner(**{name: value for name, value in values.items() if known[name].owner is owner})
        for owner in (ServerConfig, EngineConfig)
    ]
    return typing.cast(ServerConfig, parts[0]), typing.cast(EngineConfig, parts[1]), warnings


def _convert(setting: Setting, given: Given, errors: list[str]) -> Any:
    value = given.value
    if setting.is_size and isinstance(value, str):
        value = human_size(value)
    if setting.repeats and isinstance(value, str):
        value = [value]
    try:
        return msgspec.convert(value, setting.annotation, strict=False)
    except msgspec.ValidationError:
        shown = "***" if setting.is_secret else given.value
        errors.append(f"{given.source}: {shown!r} is not {setting.allowed}.")
        return None


def _from_environment(
    environ: Mapping[str, str], known: Mapping[str, Setting]
) -> tuple[dict[str, Given], list[str]]:
    given, warnings = {}, []
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE or not text:
            continue  # an empty variable is how compose files say "not given"
        setting = known.get(variable.removeprefix(PREFIX).lower())
        if SERVICE_LINK.fullmatch(variable) or SERVICE_LINK_VALUE.match(text):
            continue
        if setting is None or setting.variable != variable:
            hint = _hint(variable, [known[name].variable for name in known])
            warnings.append(f"The environment variable {variable} is not a setting.{hint}")
            continue
        value = [part.strip() for part in text.split(",") if part.strip()]
        given[setting.name] = Given(value if setting.repeats else text, variable)
    return given, warnings


def _from_file(file: Path, known: Mapping[str, Setting]) -> dict[str, Given]:
    import yaml  # here, so that `--help` need not pay for it

    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"Cannot read the configuration file {file}: {error}") from error
    if not isinstance(document, dict | None):
        raise ConfigError(
            f"{file} must hold `setting: value` lines, not {type(document).__name__}."
        )
    given: dict[str, Given] = {}
    for key, value in (document or {}).items():
        name = str(key).replace("-", "_")
        if name not in known:
            hint = _hint(name, list(known))
            raise ConfigError(f"{key} in {file} is not a setting.{hint}")
        if name in given:
            raise ConfigError(f"{key} stands twice in {file}, with a dash and an underscore.")
        given[name] = Given(value, f"{key} in {file}")
    return given


def _hint(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {close[0]}?" if close else ""


def flags_page() -> str:
    """The text of `docs/flags.md`."""
    lines = [
        "# Flags of `penstock serve`",
        "",
        "Written by `penstock flags`; do not edit. A flag goes before the environment variable,",
        "the variable before the YAML file (`--config FILE` or `PENSTOCK_CONFIG`; keys as the",
        "flags, without `--`), the file before the default. The variable of a repeatable flag is",
        "split at commas.",
        "Sizes may be written `32k` (32000), `32K` or `32KiB` (32768), `2GiB`, `2GB`.",
    ]
    panel = ""
    for setting in sorted(settings(), key=lambda setting: _panels().index(setting.panel)):
        if setting.panel != panel:
            panel = setting.panel
            lines += ["", f"## {panel}", "", "| flag | variable | default | what |"]
            lines.append("|---|---|---|---|")
        flag = f"{setting.flag}, --no-{setting.flag[2:]}" if setting.is_switch else setting.flag
        what = str(setting.meta.description) + (" Repeatable." if setting.repeats else "")
        what += f" One of {', '.join(setting.choices)}." if setting.choices else ""
        lines.append(f"| `{flag}` | `{setting.variable}` | {setting.default_text} | {what} |")
    lines += ["", "## Exit statuses", "", "| status | meaning |", "|---|---|"]
    lines += [f"| {status} | {meaning} |" for status, meaning in MEANINGS.items()]
    return "\n".join(lines) + "\n"


def _panels() -> list[str]:
    return list(dict.fromkeys(setting.panel for setting in settings()))
