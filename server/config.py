"""ServerConfig: every choice of the HTTP side, declared once, like EngineConfig."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.config import SIZE

HTTP: dict[str, Any] = {"panel": "HTTP"}
LOGGING: dict[str, Any] = {"panel": "Logging"}
SECRET: dict[str, Any] = {"secret": True}


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the service listens, whom it admits and what it logs; times in seconds."""

    host: Annotated[str, Meta(description="Address to bind.", extra=HTTP)] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port to bind; 0 takes a free one.", extra=HTTP)
    ] = 8000
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(
            description="Names clients may use in `model`; default: the folder's name.", extra=HTTP
        ),
    ] = ()
    api_key: Annotated[
        tuple[str, ...],
        Meta(
            description="Keys of which one is required; prefer the environment.",
            extra=HTTP | SECRET,
        ),
    ] = ()
    api_key_file: (
        Annotated[
            str, Meta(description="File with one key a line; # begins a comment.", extra=HTTP)
        ]
        | None
    ) = None
    chat_template: (
        Annotated[
            str,
            Meta(description="Jinja file to use instead of the checkpoint's template.", extra=HTTP),
        ]
        | None
    ) = None
    max_body_bytes: Annotated[
        int,
        Meta(
            ge=1024, description="Largest request body; a larger one is a 413.", extra=HTTP | SIZE
        ),
    ] = 8 * 1024 * 1024
    send_timeout: Annotated[
        float,
        Meta(gt=0, description="A client that takes no bytes for so long is cut off.", extra=HTTP),
    ] = 60.0
    ping_interval: Annotated[
        float,
        Meta(
            gt=0, description="Seconds between keep-alive comments on a silent stream.", extra=HTTP
        ),
    ] = 15.0
    stall_timeout: Annotated[
        float,
        Meta(
            gt=0, description="No engine step for so long while work waits: unhealthy.", extra=HTTP
        ),
    ] = 60.0
    drain_timeout: Annotated[
        float,
        Meta(ge=0, description="On SIGTERM, seconds for accepted requests to finish.", extra=HTTP),
    ] = 30.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least level logged.", extra=LOGGING),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "console"],
        Meta(description="auto is console on a terminal, else JSON lines.", extra=LOGGING),
    ] = "auto"
    access_log: Annotated[bool, Meta(description="Log one line per request.", extra=LOGGING)] = True


def served_names(config: ServerConfig, model: str) -> tuple[str, ...]:
    """The names clients may use in `model`: those configured, else the last part of the path."""
    return config.served_model_name or (Path(model).name or Path(model).resolve().name,)
