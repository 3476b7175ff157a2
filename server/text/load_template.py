"""Load the chat templates in a checkpoint's files, in the order that transformers reads them.

Most checkpoints have one, named "default". One named "tool_use" is for chats with tools.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from engine.checkpoint.bounded_json import read_bounded, read_optional
from engine.errors import ConfigError
from server.confined.process import ConfinedError
from server.text.chat_template import ChatTemplate
from server.text.render_pool import RenderPool
from server.text.special_tokens import special_tokens

DEFAULT, TOOL_USE = "default", "tool_use"
MORE = "additional_chat_templates"  # a folder of NAME.jinja
# In place of a default template that a checkpoint lacks. transformers raises an error too.
NO_DEFAULT = (
    "{{ raise_exception('The chat template of this model is for chats with tools only.') }}"
)
MAX_BYTES = 1_000_000  # of a template; published ones have up to 30,000
MAX_TEMPLATES = 64


class TemplateFile(NamedTuple):
    """A template, and the file that it is in."""

    source: str
    path: Path


def load_template(folder: Path, override: Path | None) -> ChatTemplate | None:
    """Return the checkpoint's template, or None if it has none.

    `override` is used in place of all templates of the checkpoint (`read_templates`). Raises
    ConfigError naming the file if a template is broken, or if all have names for other uses.
    """
    files = {DEFAULT: read_template(override)} if override else read_templates(folder)
    if not files:
        return None
    default, tool_use = files.get(DEFAULT), files.get(TOOL_USE)
    if default is None:
        default = TemplateFile(NO_DEFAULT, next(iter(files.values())).path)
        if tool_use is None:
            raise ConfigError(
                f"{default.path} has the chat templates {sorted(files)}; one of them must be "
                f"named {DEFAULT}."
            )
    special = special_tokens(folder)
    for_tools = None
    if tool_use is not None:
        for_tools = open_template(tool_use, special)
    return open_template(default, special, for_tools)


def open_template(
    file: TemplateFile, special: dict[str, str], tool_use: ChatTemplate | None = None
) -> ChatTemplate:
    """Compile a template, in the processes that will render it.

    `special` are the special tokens by name. Raises ConfigError if the template is broken.
    """
    pool = RenderPool(file.source.encode("utf-8", "surrogatepass"))
    try:
        found = pool.compiled()
    except ConfinedError as error:
        pool.close()
        raise ConfigError(f"The chat template in {file.path} {error} to compile.") from error
    if "broken" in found:
        pool.close()
        where = f" at line {found['line']}" if "line" in found else ""
        raise ConfigError(f"The chat template in {file.path} is broken{where}: {found['broken']}")
    return ChatTemplate(file.source, special, frozenset(found["variables"]), pool, tool_use)


def read_templates(folder: Path) -> dict[str, TemplateFile]:
    """Return the templates by name; {} if there is none.

    Files of their own come first: chat_template.jinja, which is the default, and those in the
    folder MORE. chat_template.json and then tokenizer_config.json are read if they have no default.
    Raises ConfigError naming a file that cannot be used.
    """
    file = folder / "chat_template.jinja"
    own = {DEFAULT: read_template(file)} if file.is_file() else {}
    paths = sorted((folder / MORE).glob("*.jinja"))
    _check_number(len(paths), folder / MORE)
    for path in paths:
        if not path.is_file():  # opening a FIFO would block
            raise ConfigError(f"{path} is not a file.")
        own[path.stem] = read_template(path)
    if DEFAULT in own:
        return own
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        if found := read_optional(path).get("chat_template"):
            return {**_named(found, path), **own}
    return own


def read_template(path: Path) -> TemplateFile:
    """Return the template in a file. Raises ConfigError if it cannot be read or is too large."""
    try:
        return TemplateFile(_text(read_bounded(path, MAX_BYTES)), path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the chat template {path}: {error}") from error


def _named(found: Any, path: Path) -> dict[str, TemplateFile]:
    """Return the templates of a JSON file: a text, an object, or a list of names and templates."""
    if isinstance(found, str):
        found = {DEFAULT: found}
    try:
        pairs = (
            found.items()
            if isinstance(found, dict)
            else [(entry["name"], entry["template"]) for entry in found]
        )
        named = {str(name): str(source) for name, source in pairs}
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"{path}: chat_template must be a string or a list of objects with name and template."
        ) from error
    _check_number(len(named), path)
    longest = max(map(len, named.values()))
    if longest > MAX_BYTES:
        raise ConfigError(
            f"{path} has a chat template of {longest} characters; at most {MAX_BYTES} are read."
        )
    return {name: TemplateFile(source, path) for name, source in named.items()}


def _check_number(number: int, source: Path) -> None:
    if number > MAX_TEMPLATES:
        raise ConfigError(
            f"{source} has {number} chat templates; at most {MAX_TEMPLATES} are read."
        )


def _text(data: bytes) -> str:
    """Return UTF-8 as text with the line ends that a text file has in Python."""
    return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
