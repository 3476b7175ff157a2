"""ServerConfig: every choice of the HTTP side, declared once, like EngineConfig."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the service listens, whom it admits and what it logs; times in seconds."""

    host: Annotated[str, Meta(description="Address to bind.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to bind; 0 takes a free one.")] = (
        8000
    )
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(description="Names clients may use in `model`; default: the folder's name."),
    ] = ()
    api_key: Annotated[
        tuple[str, ...], Meta(description="Keys of which one is required; prefer the environment.")
    ] = ()
    api_key_file: Annotated[
        str | None, Meta(description="File with one key a line; # begins a comment.")
    ] = None
    chat_template: Annotated[
        str | None, Meta(description="Jinja file to use instead of the checkpoint's template.")
    ] = None
    max_body_bytes: Annotated[
        int, Meta(ge=1024, description="Largest request body; a larger one is a 413.")
    ] = 8 * 1024 * 1024
    send_timeout: Annotated[
        float, Meta(gt=0, description="A client that takes no bytes for so long is cut off.")
    ] = 60.0
    ping_interval: Annotated[
        float, Meta(gt=0, description="Seconds between keep-alive comments on a silent stream.")
    ] = 15.0
    stall_timeout: Annotated[
        float, Meta(gt=0, description="No engine step for so long while work waits: unhealthy.")
    ] = 60.0
    drain_timeout: Annotated[
        float, Meta(ge=0, description="On SIGTERM, seconds for accepted requests to finish.")
    ] = 30.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least level logged.")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "console"],
        Meta(description="auto is console on a terminal, else JSON lines."),
    ] = "auto"
    access_log: Annotated[bool, Meta(description="Log one line per request.")] = True
