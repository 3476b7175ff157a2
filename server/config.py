"""ServerConfig: every choice of the HTTP side, declared once, like EngineConfig."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from engine.config import setting

HTTP = "HTTP"
LOGGING = "Logging"
METRICS = "Metrics and traces"
# As browsers write it (RFC 6454, section 6.2): in lower case, without the scheme's own port.
ORIGIN = r"^(\*|(?!http:.*:80\Z|https:.*:443\Z)[a-z][a-z0-9+.-]*://[^/\s*?#@A-Z]+)\Z"

MetricsCompat = Literal["none", "vllm"]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the service listens, whom it admits and what it logs; times in seconds."""

    host: Annotated[str, setting(HTTP, "Address to bind.")] = "127.0.0.1"
    port: Annotated[int, setting(HTTP, "Port to bind; 0 takes a free one.", ge=0, le=65535)] = 8000
    served_model_name: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1)], ...],
        setting(
            HTTP,
            "Names clients may use in `model`; default: the folder's name, or ORG/NAME as given.",
            extra={"form": "texts that are not empty; in YAML a number needs quotes to be one"},
        ),
    ] = ()
    api_key: Annotated[
        tuple[str, ...],
        setting(
            HTTP,
            "Keys of which one is required; prefer the environment.",
            extra={"secret": True},
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        setting(HTTP, "File with one key a line; # begins a comment line. SIGHUP rereads it."),
    ] = None
    allowed_origins: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=ORIGIN)], ...],
        setting(
            HTTP,
            "Web pages, by SCHEME://HOST[:PORT], whose scripts may call this server from a browser "
            "(CORS); * is all of them.",
            extra={
                "form": "origins as browsers write them, SCHEME://HOST[:PORT] in lower case, "
                "without a path or the scheme's own port, or *"
            },
        ),
    ] = ()
    chat_template: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        setting(
            HTTP,
            "Jinja file to use instead of the checkpoint's template.",
            extra={"form": "the path of a file"},
        ),
    ] = None
    max_body_bytes: Annotated[
        int,
        setting(
            HTTP,
            "Largest request body; a larger one is a 413. All open requests together may have sent "
            "32 times as much, or 256 MiB; beyond that it is a 503.",
            ge=1024,
            extra={"size": True},
        ),
    ] = 8 * 1024 * 1024
    send_timeout: Annotated[
        float,
        setting(
            HTTP, "A client that takes nothing, or next to nothing, for so long is cut off.", gt=0
        ),
    ] = 60.0
    ping_interval: Annotated[
        float, setting(HTTP, "Seconds between keep-alive comments on a silent stream.", gt=0)
    ] = 15.0
    drain_timeout: Annotated[
        float, setting(HTTP, "On SIGTERM, seconds for accepted requests to finish.", ge=0)
    ] = 30.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], setting(LOGGING, "Least level logged.")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "console"],
        setting(LOGGING, "auto is console on a terminal, else JSON lines."),
    ] = "auto"
    access_log: Annotated[bool, setting(LOGGING, "Log one line per request.")] = True
    access_log_sample: Annotated[
        float,
        setting(
            LOGGING,
            "Share of the requests that went well to log, 0 to 1; statuses from 400 on always are.",
            ge=0,
            le=1,
        ),
    ] = 1.0
    metrics_compat: Annotated[
        MetricsCompat,
        setting(METRICS, "vllm repeats the series of /metrics under vLLM's names."),
    ] = "none"
    tracing: Annotated[
        bool,
        setting(
            METRICS,
            "Send OpenTelemetry spans as the OTEL_* variables say; needs the extra [otel].",
        ),
    ] = False


def served_names(config: ServerConfig, model: str) -> tuple[str, ...]:
    """The names clients may use in `model`: those configured, else the last part of the path."""
    return config.served_model_name or (Path(model).name or Path(model).resolve().name,)
