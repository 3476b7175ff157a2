"""Read settings from flags, the environment, a YAML file and defaults, in this order of precedence.

The names of flags and variables, the allowed values, the panels of `--help` and the page
`docs/flags.md` are derived from the fields of ServerConfig and EngineConfig. An error about a value
names its source.
"""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError, one_line
from server.config import ServerConfig
from server.exit_codes import MEANINGS

PREFIX = "PENSTOCK_"
CONFIG_VARIABLE = "PENSTOCK_CONFIG"
# Kubernetes sets PENSTOCK_PORT=tcp://... and more in every pod if a Service is named `penstock`,
# and PENSTOCK_NAME_PORT=tcp://... if it is named `penstock-name`.
SERVICE_LINK = re.compile(r"PENSTOCK_(\w+_)?(SERVICE_(HOST|PORT)\w*|PORT_\d+_(TCP|UDP|SCTP)\w*)")
SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")
TEXTS = "a string or a list of strings; in YAML, quote numbers"
HUMAN_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?) ?([kmgt])(i?b?)", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    """One field of a configuration, with its flag, its variable and its description."""

    owner: type[msgspec.Struct]
    name: str
    annotation: Any
    kind: Any  # the annotation without its Meta and without None
    metas: tuple[msgspec.Meta, ...]
    default: Any

    def fact(self, name: str) -> Any:
        """Return the attribute `name` of the field's msgspec.Meta; None if none of them sets it."""
        return next((v for m in self.metas if (v := getattr(m, name)) is not None), None)

    def marked(self, mark: str) -> bool:
        return mark in (self.fact("extra") or {})

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def repeats(self) -> bool:
        return typing.get_origin(self.kind) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        literal = typing.get_origin(self.kind) is Literal
        return tuple(map(str, typing.get_args(self.kind))) if literal else ()

    @property
    def default_text(self) -> str:
        if self.default in (None, ()):
            return ""
        if self.is_switch:
            return str(self.default).lower()
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return str(self.default)

    @property
    def allowed(self) -> str:
        """Describe the allowed values, for error messages."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.marked("form"):
            return str(self.fact("extra")["form"])
        words = {
            bool: "true or false",
            int: "a whole number",
            float: "a finite number",
            str: "a string; in YAML, quote numbers",
        }
        bounds = {"at least": "ge", "above": "gt", "at most": "le"}
        limits = [f"{w} {self.fact(b)}" for w, b in bounds.items() if self.fact(b) is not None]
        text = " ".join([words.get(self.kind, TEXTS), " and ".join(limits)]).rstrip()
        return text + " (32k, 32K and 2GiB are accepted)" * self.marked("size")


@cache
def settings() -> tuple[Setting, ...]:
    """Return every setting in the order of declaration, those of EngineConfig first."""
    return settings_of(EngineConfig) + settings_of(ServerConfig)


def settings_of(owner: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """Return the settings of one configuration."""
    found = []
    hints = typing.get_type_hints(owner, include_extras=True)
    for field in msgspec.structs.fields(owner):
        kind, metas = hints[field.name], []
        while typing.get_origin(kind) in (Annotated, Union, types.UnionType):
            kind, *rest = typing.get_args(kind)
            metas += [meta for meta in rest if isinstance(meta, msgspec.Meta)]
        facts = kind, tuple(metas), field.default
        found.append(Setting(owner, field.name, hints[field.name], *facts))
    return tuple(found)


def changed_settings(*configs: msgspec.Struct) -> list[dict[str, str]]:
    """Return the flag, value and default of each setting that differs from its default, as text."""
    found = []
    for config in configs:
        for setting in settings():
            if not isinstance(config, setting.owner):
                continue
            value = getattr(config, setting.name)
            if value != setting.default:
                shown = "***" if setting.marked("secret") else replace(setting, default=value)
                text = shown if isinstance(shown, str) else shown.default_text
                default = setting.default_text
                found.append({"flag": setting.flag, "value": text, "default": default})
    return found


def human_size(text: str) -> str:
    """Return a size such as `32k` as digits.

    k, m, g, kB, MB and GB are powers of 1000; K, M, G, Ki, Mi and Gi are powers of 1024. The
    one-letter suffixes are vLLM's. Other text is returned unchanged, and validation rejects it.
    """
    if not (match := HUMAN_SIZE.fullmatch(text.strip())):
        return text
    number, letter, rest = match.groups()
    binary = "i" in rest.lower() or (letter.isupper() and not rest)
    return str(
        int(float(number) * (1024 if binary else 1000) ** ("kmgt".index(letter.lower()) + 1))
    )


# (value, description of its source) by field name.
Layer = dict[str, tuple[Any, str]]


def load(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None
) -> tuple[ServerConfig, EngineConfig, list[str]]:
    """Return both configurations and warnings for the user, merged from all layers.

    `flags` maps field names to values; None or an empty list means that the flag was not given.
    `file` defaults to PENSTOCK_CONFIG. Raises ConfigError with every invalid value and its source.
    """
    known = {setting.name: setting for setting in settings()}
    if file is None and (named := environ.get(CONFIG_VARIABLE)):
        file = Path(named)
    from_file = _from_file(file, known) if file else {}
    from_environment = _from_environment(environ, known)
    warnings = []
    from_flags = {n: (v, known[n].flag) for n, v in flags.items() if v not in (None, [])}
    for secret in (known[name] for name in from_flags if known[name].marked("secret")):
        warnings.append(
            f"{secret.flag} stays in the shell's history, and all users can read it until it is "
            f"masked; use {secret.variable} or --api-key-file instead."
        )
    values: dict[type, dict[str, Any]] = {ServerConfig: {}, EngineConfig: {}}
    errors = []
    for name, (value, source) in (from_file | from_environment | from_flags).items():
        # An empty key is a mistake, such as a Secret made from an unset variable. Ignoring it
        # would open the server to everyone.
        if known[name].marked("secret") and not _all_there(value):
            errors.append(f"{source} is set but empty. Give a key, or do not set it.")
        shown = "***" if known[name].marked("secret") else value
        try:
            "".join(map(str, value if isinstance(value, list) else [value])).encode()
            values[known[name].owner][name] = convert(known[name], value)
        except UnicodeEncodeError:  # it could not be sent to the engine or to a client
            errors.append(f"{source}: {shown!r} is not valid UTF-8.")
        except msgspec.ValidationError:
            errors.append(f"{source}: {shown!r} is not {known[name].allowed}.")
    if errors:
        raise ConfigError(*errors)
    return ServerConfig(**values[ServerConfig]), EngineConfig(**values[EngineConfig]), warnings


def _all_there(value: Any) -> bool:
    """Whether a secret, or every secret of a list, contains more than whitespace."""
    given = value if isinstance(value, list) else [value]
    return bool(given) and all(str(each or "").strip() for each in given)


def convert(setting: Setting, value: Any) -> Any:
    """Return the value of a setting. Raises msgspec.ValidationError."""
    if isinstance(value, str) and setting.marked("size"):
        value = human_size(value)
    if isinstance(value, str) and setting.repeats:
        value = [value]
    converted = msgspec.convert(value, setting.annotation, strict=False)
    # inf and nan pass the bounds, but a timer cannot wait for them.
    if isinstance(converted, float) and not math.isfinite(converted):
        raise msgspec.ValidationError
    return converted


def _from_environment(environ: Mapping[str, str], known: Mapping[str, Setting]) -> Layer:
    """Return the settings in the environment. Raises ConfigError for unknown variables."""
    layer: Layer = {}
    errors = []
    settings_by_variable = {setting.variable: setting for setting in known.values()}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE:
            continue
        setting = settings_by_variable.get(variable)
        if not text and not (setting and setting.marked("secret")):
            continue  # compose files set an empty variable for a value that was not given
        if SERVICE_LINK.fullmatch(variable) or SERVICE_LINK_VALUE.match(text):
            continue
        if setting:
            parts = [part.strip() for part in text.split(",") if part.strip()]
            layer[setting.name] = (parts if setting.repeats else text, variable)
        else:
            hint = _hint(variable, settings_by_variable)
            errors.append(f"The environment variable {variable} is not a setting.{hint}")
    if errors:
        raise ConfigError(*errors)
    return layer


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ConfigError if the file contains anything else."""
    import yaml  # not at the top, so that `--help` does not import it

    class Loader(yaml.SafeLoader):
        """Rejects duplicate keys, which yaml.SafeLoader resolves to the last one silently."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node: yaml.MappingNode = super().compose_mapping_node(anchor)
            lines: dict[str, int] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                name, line = key.value, key.start_mark.line + 1
                if name in lines:
                    words = f"{name} appears twice, in lines {lines[name]} and {line}."
                    raise yaml.YAMLError(words)
                lines[name] = line
            return node

    try:
        document = yaml.load(file.read_text(encoding="utf-8"), Loader)  # noqa: S506 - a SafeLoader
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        if isinstance(error, yaml.MarkedYAMLError) and mark is not None:
            context = f" {error.context}" if error.context else ""
            where = f"line {mark.line + 1}, column {mark.column + 1}"
            text = f"{file}, {where}, is not valid YAML: {error.problem}{context}."
            raise ConfigError(text) from error
        raise ConfigError(f"Cannot read the YAML file {file}: {one_line(error)}") from error
    if not isinstance(document, dict | None):
        raise ConfigError(f"{file} must contain `key: value` lines, not {type(document).__name__}.")
    return document or {}


def _from_file(file: Path, known: Mapping[str, Setting]) -> Layer:
    layer: Layer = {}
    for key, value in read_yaml(file).items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{key} in {file} is not a setting.{_hint(name, known)}")
        if name in layer:
            raise ConfigError(f"{key} appears twice in {file}: with dashes and with underscores.")
        layer[name] = (value, f"{key} in {file}")
    return layer


def _hint(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def flags_page() -> str:
    """Return the text of `docs/flags.md`."""
    lines = [
        "# Flags of `penstock serve`",
        "",
        "This page is generated by `penstock flags`; do not edit it. Every setting has a flag, an",
        "environment variable and a key in the YAML file (`--config FILE` or `PENSTOCK_CONFIG`):",
        "the flag without `--`. The first one counts of flag, variable, file and default. Commas",
        "separate the values of a repeatable flag in its variable.",
        "",
        "Sizes may be written as `32k` (32000), `32K` or `32KiB` (32768), `2GiB` or `2GB`.",
    ]
    panel = ""
    for setting in settings():
        if setting.fact("title") != panel:
            panel = setting.fact("title")
            lines += ["", f"## {panel}", "", "| flag | variable | default | description |"]
            lines.append("|---|---|---|---|")
        flag = f"{setting.flag}, --no-{setting.flag[2:]}" if setting.is_switch else setting.flag
        what = setting.fact("description") + (" Repeatable." if setting.repeats else "")
        what += f" One of {', '.join(setting.choices)}." if setting.choices else ""
        lines.append(f"| `{flag}` | `{setting.variable}` | {setting.default_text} | {what} |")
    lines += ["", "## Exit statuses", "", "| status | meaning |", "|---|---|"]
    lines += [f"| {status} | {meaning} |" for status, meaning in MEANINGS.items()]
    return "\n".join(lines) + "\n"
