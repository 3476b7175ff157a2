"""The process that renders chat templates: `python -m server.text.template_sandbox`.

Templates are untrusted code. They run in Jinja's immutable sandbox on plain JSON data. Their memory
and time are limited by this process (`server.confined.process`). Their variables, filters and
options follow transformers (utils/chat_template_utils.py), so that the model gets the prompt format
it was trained on.

The first message is the template, every other one is the context of a rendering. Only this process
imports jinja2, and little else, so that it starts fast.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from server.confined.process import serve
from server.text import exact_json

# A rendering has at most this many characters, plus some for each byte of its context.
MIN_OUTPUT = 65_536
OUTPUT_PER_BYTE = 4


class RefusalError(Exception):
    """The template refused the messages, or wrote too much. The client gets the text."""


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

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name in `kwargs`
        self, *given = args
        Namespace.__init__(self)
        for name, value in dict(*given, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace attribute {name!r} is not allowed")
        super().__setitem__(name, value)


class TemplateDict:
    """`dict` in a template. The type itself has methods that change their argument."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _raise_exception(message: str) -> None:
    raise RefusalError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON. Unlike Jinja's own filter this does not escape HTML: models were
    trained on plain JSON."""
    return exact_json.text(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class LazyCodeGenerator(CodeGenerator):
    """Computes nothing at compile time, also not the constants of an output."""

    def _output_child_to_const(self, node: nodes.Expr, *rest: Any) -> str:
        if isinstance(node, nodes.TemplateData):
            return super()._output_child_to_const(node, *rest)
        raise nodes.Impossible


class VariableFinder(LazyCodeGenerator, TrackingCodeGenerator):
    """Collects `undeclared_identifiers`, as `jinja2.meta` does."""


def environment() -> ImmutableSandboxedEnvironment:
    """Return a sandboxed environment. No other function creates one, so none lacks the sandbox."""
    created = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, loopcontrols],
        optimized=False,
    )
    created.code_generator_class = LazyCodeGenerator
    created.filters["tojson"] = _tojson
    del created.globals["lipsum"]
    created.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=TemplateDict(),
        namespace=PlainNamespace,
    )
    return created


class Renderer:
    """Answers the messages of the parent, which are JSON."""

    def __init__(self) -> None:
        self._environment = environment()
        self._template: jinja2.Template | None = None

    def handle(self, message: bytes) -> bytes:
        """Compile the first message; render the others. Raises MemoryError."""
        answer = self._compile(message) if self._template is None else self._render(message)
        return json.dumps(answer).encode()

    def _compile(self, source: bytes) -> dict[str, Any]:
        """Return the variables that the template reads, or what is broken and in which line."""
        try:
            tree = self._environment.parse(source.decode())
            finder = VariableFinder(self._environment)
            finder.optimizer = None  # it would compute constants
            finder.visit(tree)
            self._template = self._environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            return {"broken": error.message, "line": error.lineno}
        except MemoryError:
            raise
        except Exception as error:  # such as RecursionError, and Python's own SyntaxError
            return {"broken": f"it cannot be compiled ({type(error).__name__})"}
        return {"variables": sorted(finder.undeclared_identifiers)}

    def _render(self, message: bytes) -> dict[str, Any]:
        """Return the text, or the error that the client gets."""
        assert self._template is not None
        limit = MIN_OUTPUT + OUTPUT_PER_BYTE * len(message)
        try:
            # A client's argument must not replace a builtin.
            context = {**exact_json.parsed(message), **self._environment.globals}
            text = _joined(self._template.generate(context), limit)
            text.encode()
        except RefusalError as error:
            return {"error": str(error)}
        except jinja2.TemplateError as error:
            return {"error": f"The chat template failed: {error.message}"}
        except UnicodeEncodeError:
            return {"error": "The chat template wrote a lone surrogate, which is not a character."}
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it may raise any exception
            return {"error": f"The chat template failed: {error!r}"[:MIN_OUTPUT]}
        return {"text": text}


def _joined(pieces: Iterable[str], limit: int) -> str:
    """Join the pieces. Raises RefusalError if they have more than `limit` characters."""
    text = []
    size = 0
    for piece in pieces:
        text.append(piece)
        size += len(piece)
        if size > limit:
            raise RefusalError(f"The chat template wrote more than {limit} characters.")
    return "".join(text)


if __name__ == "__main__":
    serve(Renderer().handle)
