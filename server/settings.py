"""The layers of a setting: flag, environment, YAML file, default, in this order of precedence.

Everything here is read off the fields of ServerConfig and EngineConfig: flag and variable names,
what is allowed, the panels of `--help`, the page `docs/flags.md`. A wrong value is reported with
the place it came from.
"""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

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
TEXTS = "a text or a list of texts; in YAML a number needs quotes to be one"
HUMAN_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?) ?([kmgt])(i?b?)", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    """One field of a configuration, as the command line, the environment and the docs see it."""

    owner: type[msgspec.Struct]
    name: str
    annotation: Any
    kind: Any  # the annotation without its Meta and without None
    metas: tuple[msgspec.Meta, ...]
    default: Any

    def fact(self, name: str) -> Any:
        """What the field's Meta say under `name`, None where they say nothing."""
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
        if self.is_switch:
            return str(self.default).lower()
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return "" if self.default in (None, ()) else str(self.default)

    @property
    def allowed(self) -> str:
        """What a value may be, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.marked("form"):
            return str(self.fact("extra")["form"])
        words = {
            bool: "true or false",
            int: "a whole number",
            float: "a finite number",
            str: "a text; in YAML a number needs quotes to be one",
        }
        bounds = {"at least": "ge", "above": "gt", "at most": "le"}
        limits = [f"{w} {self.fact(b)}" for w, b in bounds.items() if self.fact(b) is not None]
        text = " ".join([words.get(self.kind, TEXTS), " and ".join(limits)]).rstrip()
        return text + " (32k, 32K and 2GiB are understood)" * self.marked("size")


def settings() -> Iterator[Setting]:
    """Every field of both configurations, in the order of declaration, the engine's first."""
    for owner in (EngineConfig, ServerConfig):
        hints = typing.get_type_hints(owner, include_extras=True)
        for field in msgspec.structs.fields(owner):
            kind, metas = hints[field.name], []
            while typing.get_origin(kind) in (Annotated, Union, types.UnionType):
                kind, *rest = typing.get_args(kind)
                metas += [meta for meta in rest if isinstance(meta, msgspec.Meta)]
            annotation = hints[field.name]
            yield Setting(owner, field.name, annotation, kind, tuple(metas), field.default)


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


# Values by field name, each with the words that name its source.
Layer = dict[str, tuple[Any, str]]


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
    from_file = _from_file(file, known) if file else {}
    from_environment, warnings = _from_environment(environ, known)
    from_flags = {n: (v, known[n].flag) for n, v in flags.items() if v not in (None, [])}
    for secret in (known[name] for name in from_flags if known[name].marked("secret")):
        warnings.append(
            f"{secret.flag} shows the secret to everyone who can list processes; "
            f"{secret.variable} or --api-key-file does not."
        )
    values: dict[type, dict[str, Any]] = {ServerConfig: {}, EngineConfig: {}}
    errors = []
    for name, (value, source) in (from_file | from_environment | from_flags).items():
        # Meant and forgotten, as from a Secret made of a variable that was not set: passed over, it
        # would open the server to everyone.
        if known[name].marked("secret") and not _all_there(value):
            errors.append(f"{source} is set, but to nothing. Give a key, or do not set it.")
        shown = "***" if known[name].marked("secret") else value
        try:
            "".join(map(str, value if isinstance(value, list) else [value])).encode()
            values[known[name].owner][name] = _convert(known[name], value)
        except UnicodeEncodeError:  # neither the engine nor a client could be told
            errors.append(f"{source}: {shown!r} is no UTF-8.")
        except msgspec.ValidationError:
            errors.append(f"{source}: {shown!r} is not {known[name].allowed}.")
    if errors:
        raise ConfigError("\n".join(errors))
    return ServerConfig(**values[ServerConfig]), EngineConfig(**values[EngineConfig]), warnings


def _all_there(value: Any) -> bool:
    """Whether a secret, or each of several, has a character that is no space."""
    given = value if isinstance(value, list) else [value]
    return bool(given) and all(str(each or "").strip() for each in given)


def _convert(setting: Setting, value: Any) -> Any:
    if isinstance(value, str) and setting.marked("size"):
        value = human_size(value)
    if isinstance(value, str) and setting.repeats:
        value = [value]
    converted = msgspec.convert(value, setting.annotation, strict=False)
    # Both pass every lower bound, and no clock can wait for them.
    if isinstance(converted, float) and not math.isfinite(converted):
        raise msgspec.ValidationError
    return converted


def _from_environment(
    environ: Mapping[str, str], known: Mapping[str, Setting]
) -> tuple[Layer, list[str]]:
    layer: Layer = {}
    warnings = []
    settings_by_variable = {setting.variable: setting for setting in known.values()}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE:
            continue
        setting = settings_by_variable.get(variable)
        if not text and not (setting and setting.marked("secret")):
            continue  # an empty variable is how compose files say "not given"
        if SERVICE_LINK.fullmatch(variable) or SERVICE_LINK_VALUE.match(text):
            continue
        if setting:
            parts = [part.strip() for part in text.split(",") if part.strip()]
            layer[setting.name] = (parts if setting.repeats else text, variable)
        else:
            hint = _hint(variable, settings_by_variable)
            warnings.append(f"The environment variable {variable} is not a setting.{hint}")
    return layer, warnings


def read_yaml(file: Path) -> dict[str, Any]:
    """A YAML file's mapping; raises ConfigError naming the file where it holds something else."""
    import yaml  # here, so that `--help` need not pay for it

    class Loader(yaml.SafeLoader):
        """Refuses a key that stands twice, of which YAML's own takes the last without a word."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node: yaml.MappingNode = super().compose_mapping_node(anchor)
            lines: dict[str, int] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                name, line = key.value, key.start_mark.line + 1
                if name in lines:
                    words = f"{name} stands twice, in lines {lines[name]} and {line}."
                    raise yaml.YAMLError(words)
                lines[name] = line
            return node

    try:
        document = yaml.load(file.read_text(encoding="utf-8"), Loader)  # noqa: S506 - a safe one
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"Cannot read the YAML file {file}: {error}") from error
    if not isinstance(document, dict | None):
        raise ConfigError(f"{file} must hold `key: value` lines, not {type(document).__name__}.")
    return document or {}


def _from_file(file: Path, known: Mapping[str, Setting]) -> Layer:
    layer: Layer = {}
    for key, value in read_yaml(file).items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{key} in {file} is not a setting.{_hint(name, known)}")
        if name in layer:
            raise ConfigError(f"{key} stands twice in {file}, with a dash and an underscore.")
        layer[name] = (value, f"{key} in {file}")
    return layer


def _hint(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
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
    for setting in settings():
        if setting.fact("title") != panel:
            panel = setting.fact("title")
            lines += ["", f"## {panel}", "", "| flag | variable | default | what |"]
            lines.append("|---|---|---|---|")
        flag = f"{setting.flag}, --no-{setting.flag[2:]}" if setting.is_switch else setting.flag
        what = setting.fact("description") + (" Repeatable." if setting.repeats else "")
        what += f" One of {', '.join(setting.choices)}." if setting.choices else ""
        lines.append(f"| `{flag}` | `{setting.variable}` | {setting.default_text} | {what} |")
    lines += ["", "## Exit statuses", "", "| status | meaning |", "|---|---|"]
    lines += [f"| {status} | {meaning} |" for status, meaning in MEANINGS.items()]
    return "\n".join(lines) + "\n"
