"""Chat messages to the prompt text, by the checkpoint's own Jinja template.

Templates are code from a stranger: they run in Jinja's immutable sandbox, on plain JSON data, with
bounded output, loops and time. What they see and how they render follows transformers
(utils/chat_template_utils.py), so that the prompt is the one the model was trained on.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from engine.errors import ConfigError
from server.tokenizer import read_optional, special_tokens

RANGE_BUDGET = 200_000  # items all `range` calls of one rendering may give together
RENDER_S = 1.0  # processor time of one rendering: published templates take milliseconds, mostly
BEGAN = "processor time before"  # of its thread; as no name has spaces, no template reaches it
MOST_BITS = 128  # of a number a template multiplies
MOST_ITEMS = 2**20  # of a text or list it repeats
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateError(Exception):
    """The template refused the messages, or failed on them; the text is for the client."""


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PlainNamespace(Namespace):
    """Without underscore names: `__call__` or `__html__` stored here would reach Jinja itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace attribute {name!r} is not allowed")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it escapes no HTML: models were trained on plain JSON."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class Sandbox(ImmutableSandboxedEnvironment):
    """In which nothing grows without bound by one multiplication, and no loop or recursion goes on
    for ever: jinja2 bounds neither."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size, times = (left, right) if hasattr(left, "__len__") else (right, left)
        if hasattr(size, "__len__"):
            if isinstance(times, int) and len(size) * times > MOST_ITEMS:
                raise TemplateError(f"The chat template repeats to more than {MOST_ITEMS} items.")
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            if max(bits, right.bit_length()) > MOST_BITS:
                raise TemplateError(f"The chat template computes beyond {MOST_BITS} bits.")
        return super().call_binop(context, operator, left, right)

    def timed(self, source: str) -> nodes.Template:
        """A template that looks at the time wherever it can come by more than once."""
        tree = self.parse(source)
        repeated: Any = tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))
        for node in repeated:
            node.body.insert(0, nodes.ExprStmt(_look()))
            if isinstance(node, nodes.For) and node.test is not None:  # may pass the body over
                node.test = nodes.Or(_look(), node.test)
        tree.set_environment(self)
        return tree


def _look() -> nodes.Filter:
    return nodes.Filter(nodes.Const(""), "in_time", [], [], None, None)


@jinja2.pass_context
def _in_time(context: Context, value: str) -> str:
    """The value, which is false. Not computed while compiling, as it has the context."""
    if time.thread_time() - context.parent[BEGAN] > RENDER_S:
        raise TemplateError(f"The chat template took more than {RENDER_S:g} s for these messages.")
    return value


def _environment() -> Sandbox:
    """The only place that makes an environment, so that none is ever without the sandbox."""
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters |= {"tojson": _tojson, "in_time": _in_time}
    del environment.globals["lipsum"]
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=lambda *args, **kwargs: dict(*args, **kwargs),  # the type's own methods mutate
        namespace=PlainNamespace,
    )
    return environment


def _bounded_range() -> Callable[..., range]:
    left = RANGE_BUDGET

    def bounded(*args: int) -> range:
        nonlocal left
        items = range(*args)
        left -= len(items) + 1
        if left < 0:
            raise TemplateError(f"The chat template loops over more than {RANGE_BUDGET} numbers.")
        return items

    return bounded


def _prepare(message: dict[str, Any]) -> dict[str, Any]:
    """As transformers prepares a message: no null fields, which templates would print as "None",
    and the reasoning under each of the names templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[f] for f in REASONING_FIELDS if f in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class ChatTemplate:
    """The compiled template of one checkpoint; rendering is thread-safe.

    `variables` are the names it reads from outside: a request for tools or with template arguments
    that are not among them would be ignored silently, so the caller can refuse it.
    """

    def __init__(self, source: str, special: dict[str, str], path: Path) -> None:
        self._special_tokens = special
        environment = _environment()
        try:
            tree = environment.timed(source)
            names = jinja2.meta.find_undeclared_variables(tree)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"The chat template in {path} is broken at line {error.lineno}: {error.message}"
            ) from error
        self.variables = frozenset(names)

    @classmethod
    def from_folder(cls, folder: Path, override: Path | None) -> ChatTemplate | None:
        """The template in `override`, chat_template.jinja, chat_template.json or
        tokenizer_config.json, the first there is. Raises ConfigError naming the file."""
        path = override or folder / "chat_template.jinja"
        if override or path.is_file():
            try:
                source = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ConfigError(f"Cannot read the chat template {path}: {error}") from error
            return cls(source, special_tokens(folder), path)
        for name in ("chat_template.json", "tokenizer_config.json"):
            path = folder / name
            if found := read_optional(path).get("chat_template"):
                return cls(_default_template(found, path), special_tokens(folder), path)
        return None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text; with `continue_final_message` it ends where the last message's content
        does. Raises TemplateError with the template's own words where it refuses, where it fails,
        takes too long or writes more than 64 Ki characters and four times its input, and where it
        does not show that content whole and once."""
        if continue_final_message:
            marked, mark = _marked(messages)
            text = self.render(marked, add_generation_prompt=False, **kwargs)
            return _before(text, mark, messages[-1]["content"])
        context = {
            "documents": None,
            "tools": None,
            **self._special_tokens,
            **kwargs,
            "messages": [_prepare(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "range": _bounded_range(),
            BEGAN: time.thread_time(),
        }
        try:
            limit = 65536 + 4 * len(json.dumps([messages, kwargs]))
            return _collect(self._template.generate(context), limit)
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateError(f"The chat template failed: {error.message}") from error
        except Exception as error:  # a template is a program: it may raise anything
            raise TemplateError(f"The chat template failed: {error!r}") from error


def _marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages with a word behind the last one's content that no text has, and that word."""
    *others, last = messages
    if not isinstance(last.get("content"), str) or last.get("tool_calls"):
        raise TemplateError("The last message does not end with a text that could go on.")
    mark = f"END{secrets.token_hex(16)}"
    # The space tells whether the template trims: then it would have trimmed the content, too.
    return [*others, {**last, "content": f"{last['content']}{mark} "}], mark


def _before(text: str, mark: str, content: str) -> str:
    shown, found, rest = text.rpartition(mark)
    if not found or mark in shown or not shown.rstrip().endswith(content.strip()):
        raise TemplateError("The chat template does not show the last message as it is, and once.")
    return shown if rest.startswith(" ") else shown.rstrip()


def _collect(pieces: Iterable[str], limit: int) -> str:
    text, size = [], 0
    for piece in pieces:
        text.append(piece)
        size += len(piece)
        if size > limit:
            raise TemplateError(f"The chat template wrote more than {limit} characters.")
    return "".join(text)


def _default_template(found: Any, path: Path) -> str:
    """The one named "default", where there are several."""
    if isinstance(found, str):
        return found
    try:
        named = {entry["name"]: str(entry["template"]) for entry in found}
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"{path}: chat_template must be text or a list of name and template."
        ) from error
    if "default" not in named:
        raise ConfigError(f"{path}: of the chat templates {sorted(named)} none is named default.")
    return named["default"]
