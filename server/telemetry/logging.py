"""Logs on standard error: one line per record, as JSON or for a console, with the request's id.

Prompts, answers and API keys are never logged.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from engine.errors import printable
from server.config import ServerConfig

HANDLER = "penstock"


def escape_control(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Escape control characters, so that a client cannot forge log lines or terminal colours."""
    return {key: _clean(value, lines=key == "exception") for key, value in event.items()}


def _clean(value: Any, *, lines: bool = False) -> Any:
    """Escape a text, or the texts in a list. With `lines`, a text keeps its line breaks."""
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if not isinstance(value, str):
        return value
    return "\n".join(map(printable, value.split("\n"))) if lines else printable(value)


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's warning about invalid HTTP.

    The access log has that refusal already, with the request id that the client received.
    """
    return record.msg != "Invalid HTTP request received."


def configure(config: ServerConfig) -> None:
    """Set up structlog and the standard library's loggers for this process."""
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
        escape_control,
    ]
    console = config.log_format == "console" or (
        config.log_format == "auto" and sys.stderr.isatty()
    )
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if console
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.name = HANDLER
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler, *(h for h in root.handlers if h.name != HANDLER)]
    root.setLevel(level)
    # At debug level it logs every chunk, which contains the answer's text.
    logging.getLogger("sse_starlette").setLevel(max(level, logging.INFO))
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    # It warns of every malformed upload, which the access log has already.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    # At info level it logs every URL of `penstock pull`, which may contain a signature.
    logging.getLogger("httpx2").setLevel(max(level, logging.WARNING))
