"""Render chat messages to the prompt text with the checkpoint's own Jinja template.

Templates are untrusted code. They run in Jinja's immutable sandbox on plain JSON data; their
output, loops and time are bounded. Their variables, filters and options follow transformers
(utils/chat_template_utils.py), so that the model gets the prompt format it was trained on.
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
from server.text.tokenizer import read_optional, special_tokens

RANGE_BUDGET = 200_000  # total items of all `range` calls in one rendering
RENDER_S = 1.0  # CPU time limit of one rendering; most published templates take milliseconds
# Context variable with the thread's CPU time at the start. No template can name it: it has spaces.
BEGAN = "processor time before"
MAX_BITS = 128  # limit of the factors of a product, and of a power
MAX_ITEMS = 2**20  # limit of a text or list that a template repeats with `*`
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateError(Exception):
    """The template refused the messages or failed on them. The client gets the text."""


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training. Here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a mutable class attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PlainNamespace(Namespace):
    """A Jinja namespace that refuses names with a leading underscore.

    Otherwise Jinja itself would call a `__call__` or `__html__` that a template stores here.
    """

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
    """Return `value` as JSON. Unlike Jinja's own filter this does not escape HTML: models were
    trained on plain JSON."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with limits on multiplication and on the time of loops and
    recursion. jinja2 limits neither."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size, times = (left, right) if hasattr(left, "__len__") else (right, left)
        if hasattr(size, "__len__"):
            if isinstance(times, int) and len(size) * times > MAX_ITEMS:
                raise TemplateError(
                    f"The chat template repeats a text or list to more than {MAX_ITEMS} items."
                )
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            if max(bits, right.bit_length()) > MAX_BITS:
                raise TemplateError(
                    f"The chat template computes with numbers of more than {MAX_BITS} bits."
                )
        return super().call_binop(context, operator, left, right)

    def timed(self, source: str) -> nodes.Template:
        """Return the parsed template with a time check in everything that can run repeatedly."""
        tree = self.parse(source)
        repeated: Any = tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))
        for node in repeated:
            node.body.insert(0, nodes.ExprStmt(_look()))
            if isinstance(node, nodes.For) and node.test is not None:  # may skip the body
                node.test = nodes.Or(_look(), node.test)
        tree.set_environment(self)
        return tree


def _look() -> nodes.Filter:
    """Return the AST node of a time check."""
    return nodes.Filter(nodes.Const(""), "in_time", [], [], None, None)


@jinja2.pass_context
def _in_time(context: Context, value: str) -> str:
    """Return `value`, which is false, or raise TemplateError if the rendering takes too long.

    The filter takes the context so that Jinja does not evaluate it at compile time.
    """
    if time.thread_time() - context.parent[BEGAN] > RENDER_S:
        raise TemplateError(f"The chat template took more than {RENDER_S:g} s for these messages.")
    return value


def _environment() -> Sandbox:
    """Return a sandboxed environment. No other function creates one, so none lacks the sandbox."""
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters |= {"tojson": _tojson, "in_time": _in_time}
    del environment.globals["lipsum"]
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        # A function, because the type `dict` has methods that change their argument.
        dict=lambda *args, **kwargs: dict(*args, **kwargs),
        namespace=PlainNamespace,
    )
    return environment


def _bounded_range() -> Callable[..., range]:
    """Return a `range` whose calls raise TemplateError after RANGE_BUDGET items in total."""
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
    """Return the message as transformers prepares it for a template.

    Null fields are dropped, because templates would print them as "None". The reasoning is stored
    under each name that templates read.
    """
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[f] for f in REASONING_FIELDS if f in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class ChatTemplate:
    """The compiled template of one checkpoint. Rendering is thread-safe.

    `variables` are the names that the template reads from its context. The template would silently
    ignore tools or template arguments that are not among them, so the caller can refuse those.
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
        """Return the checkpoint's template, or None if it has none.

        The first of these is used: `override`, chat_template.jinja, chat_template.json,
        tokenizer_config.json. Raises ConfigError naming the file if the template is broken.
        """
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
        """Return the prompt text.

        With `continue_final_message` the prompt ends where the last message's content ends.

        Raises TemplateError
        - with the template's own message, if the template refuses the messages;
        - if the template fails, takes too long, or writes more than 64 Ki characters plus four
          times its input;
        - with `continue_final_message`, if the template does not render the last message's content
          unchanged and exactly once.
        """
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
        except Exception as error:  # a template is a program: it may raise any exception
            raise TemplateError(f"The chat template failed: {error!r}") from error


def _marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the messages with a random mark appended to the last one's content, and the mark."""
    *others, last = messages
    if not isinstance(last.get("content"), str) or last.get("tool_calls"):
        raise TemplateError(
            "The last message cannot be continued: it must have text content and no tool_calls."
        )
    mark = f"END{secrets.token_hex(16)}"
    # A template that trims this space would also have trimmed the content.
    return [*others, {**last, "content": f"{last['content']}{mark} "}], mark


def _before(text: str, mark: str, content: str) -> str:
    """Return `text` up to `mark`, trimmed if the template trims the content."""
    shown, found, rest = text.rpartition(mark)
    if not found or mark in shown or not shown.rstrip().endswith(content.strip()):
        raise TemplateError(
            "The last message cannot be continued: the chat template does not render its content "
            "unchanged and exactly once."
        )
    return shown if rest.startswith(" ") else shown.rstrip()


def _collect(pieces: Iterable[str], limit: int) -> str:
    """Join the pieces. Raises TemplateError if they have more than `limit` characters."""
    text, size = [], 0
    for piece in pieces:
        text.append(piece)
        size += len(piece)
        if size > limit:
            raise TemplateError(f"The chat template wrote more than {limit} characters.")
    return "".join(text)


def _default_template(found: Any, path: Path) -> str:
    """Return the template, or the one named "default" if the file has several."""
    if isinstance(found, str):
        return found
    try:
        named = {entry["name"]: str(entry["template"]) for entry in found}
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"{path}: chat_template must be a string or a list of objects with name and template."
        ) from error
    if "default" not in named:
        raise ConfigError(
            f"{path} has the chat templates {sorted(named)}; one of them must be named default."
        )
    return named["default"]
