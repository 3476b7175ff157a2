"""ServerConfig: every setting of the HTTP side, declared once as in EngineConfig."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from engine.config import setting

HTTP = "HTTP"
BATCHES = "Files and batches"
LOGGING = "Logging"
METRICS = "Metrics and traces"
# An origin as browsers send it (RFC 6454, section 6.2): lower case, without the default port.
ROOT_PATH = r"^(/[A-Za-z0-9_][A-Za-z0-9._-]*)*\Z"
ORIGIN = r"^(\*|localhost|(?!http:.*:80\Z|https:.*:443\Z)[a-z][a-z0-9+.-]*://[^/\s*?#@A-Z]+)\Z"

# NAME, *.NAME, an IP address or a network, perhaps with :PORT. server/images reads them.
IMAGE_HOST = r"(\[[0-9A-Fa-f:./]+\]|(\*\.)?[A-Za-z0-9_][A-Za-z0-9_./-]*)(:[0-9]{1,5})?"
IMAGE_HOSTS = rf"^{IMAGE_HOST}(,{IMAGE_HOST})*\Z"

ToolCallParser = Literal[
    "auto",
    "apertus",
    "apriel",
    "cohere_command",
    "cohere_command_r",
    "deepseek_r1",
    "deepseek_v3_1",
    "deepseek_v3_2",
    "firefunction",
    "functionary_v3_1",
    "functiongemma",
    "gemma4",
    "gigachat",
    "glm",
    "granite",
    "harmony",
    "hermes",
    "kimi_k2",
    "lfm2",
    "llama3_json",
    "minimax_m2",
    "mistral",
    "mistral_list",
    "nemotron",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
    "solar_open",
]
ReasoningParser = Literal[
    "auto", "none", "think", "mistral", "cohere", "gemma4", "seed_oss", "apertus", "solar_open",
    "apriel", "granite", "gemma3n",
]  # fmt: skip
Reasoning = Literal["auto", "on", "off"]
MetricsCompat = Literal["none", "vllm", "llamacpp"]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of listening, access, logging and metrics. Times are in seconds."""

    host: Annotated[str, setting(HTTP, "Address to bind.")] = "127.0.0.1"
    port: Annotated[int, setting(HTTP, "Port; 0 picks a free one.", ge=0, le=65535)] = 8000
    root_path: Annotated[
        Annotated[str, msgspec.Meta(pattern=ROOT_PATH)],
        setting(
            HTTP,
            "Prefix that a proxy adds to paths, such as /llm; paths without it still work.",
            extra={"form": "empty, or segments of letters, digits, `-`, `_` and `.`, such as /llm"},
        ),
    ] = ""
    served_model_name: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1)], ...],
        setting(
            HTTP,
            "Names that clients may use in `model`; default: the folder's, or ORG/NAME.",
            extra={"form": "a list of strings that are not empty; in YAML, quote numbers"},
        ),
    ] = ()
    gguf_file: Annotated[
        str | None,
        setting(HTTP, "The GGUF file to serve, of a folder or ORG/NAME that has several."),
    ] = None
    api_key: Annotated[
        tuple[str, ...],
        setting(
            HTTP,
            "API keys; a request must send one. Prefer the variable or --api-key-file.",
            extra={"secret": True},
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        setting(HTTP, "File of API keys, one per line; # begins a comment. SIGHUP rereads it."),
    ] = None
    ui: Annotated[
        bool | None,
        setting(
            HTTP,
            "Serve /ui/api, which shows why requests took their time. Default: only if --host is a "
            "loopback address. On a network it needs an API key.",
        ),
    ] = None
    admin_key_file: Annotated[
        str | None,
        setting(
            HTTP,
            "File of admin keys, written as in --api-key-file and also API keys. Only their "
            "owners see all clients' requests at /ui/api; without any key, everyone does. SIGHUP "
            "rereads it.",
        ),
    ] = None
    allowed_origins: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=ORIGIN)], ...],
        setting(
            HTTP,
            "Origins of web pages (SCHEME://HOST[:PORT]) whose scripts may call this server from "
            "a browser (CORS); localhost allows pages of this machine, * all.",
            extra={
                "form": "a list of origins as browsers send them: SCHEME://HOST[:PORT] in lower "
                "case, without a path or the scheme's default port; or localhost or *"
            },
        ),
    ] = ()
    disabled_paths: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=r"^/[^{}?#]+\Z")], ...],
        setting(
            HTTP,
            "Paths of the API, such as /metrics, that answer 501.",
            extra={"form": "a list of paths, each with a / before it"},
        ),
    ] = ()
    seed: Annotated[
        Annotated[int, msgspec.Meta(ge=0, lt=2**53)] | None,
        setting(HTTP, "Seed of requests without one. Default: random."),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool,
        setting(
            HTTP,
            "In `logprobs`, name tokens by ids (`token_id:7`), unless a request says false.",
        ),
    ] = False
    chat_template: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        setting(
            HTTP,
            "Jinja file to use instead of the checkpoint's template.",
            extra={"form": "the path of a file"},
        ),
    ] = None
    tool_call_parser: Annotated[
        ToolCallParser,
        setting(HTTP, "Format of the model's tool calls; auto finds it from the checkpoint."),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        setting(
            HTTP,
            "Marks around the model's reasoning; auto finds them from the checkpoint, and none "
            "leaves reasoning in the content.",
        ),
    ] = "auto"
    reasoning: Annotated[
        Reasoning,
        setting(
            HTTP,
            "Whether the model thinks if the request does not say it; auto: as the chat template "
            "does.",
        ),
    ] = "auto"
    image_hosts: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=IMAGE_HOSTS)], ...],
        setting(
            HTTP,
            "Hosts whose images are fetched: NAME, *.NAME, IP addresses or networks, each perhaps "
            "with :PORT. Default: none.",
            extra={
                "form": "a list of host names, *.NAME, IP addresses or networks, each perhaps with "
                ":PORT; IPv6 needs brackets"
            },
        ),
    ] = ()
    max_body_bytes: Annotated[
        int,
        setting(
            HTTP,
            "Largest request body in bytes; larger ones get a 413. All open bodies may total 32 "
            "times as much, at least 256 MiB; beyond it, new ones get a 503.",
            ge=1024,
            extra={"size": True},
        ),
    ] = 8 * 1024 * 1024
    send_timeout: Annotated[
        float,
        setting(
            HTTP, "Seconds after which a client that reads (almost) nothing is disconnected.", gt=0
        ),
    ] = 60.0
    ping_interval: Annotated[
        float, setting(HTTP, "Seconds between keep-alive comments on an idle stream.", gt=0)
    ] = 15.0
    allow_dimensions: Annotated[
        bool,
        setting(HTTP, "Allow `dimensions` that a model was not trained for."),
    ] = False
    strict_max_tokens: Annotated[
        bool,
        setting(
            HTTP,
            "Refuse a max_tokens beyond the context with a 400; otherwise it is lowered and named "
            "in x-adjusted-params.",
        ),
    ] = False
    response_store_bytes: Annotated[
        int,
        setting(
            HTTP,
            "Memory for stored responses of /v1/responses; the least recently used leave. 0 stores "
            "none.",
            ge=0,
            extra={"size": True},
        ),
    ] = 64 * 1024 * 1024
    response_store_count: Annotated[int, setting(HTTP, "Most responses that are stored.", ge=0)] = (
        10_000
    )
    drain_timeout: Annotated[
        float, setting(HTTP, "Seconds that accepted requests get to finish after SIGTERM.", ge=0)
    ] = 30.0
    batch_dir: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        setting(
            BATCHES,
            "Folder of the files and batches of /v1/files and /v1/batches, which are off without "
            "it. One server at a time may use it; its next server resumes unfinished batches.",
            extra={"form": "the path of a folder"},
        ),
    ] = None
    max_upload_bytes: Annotated[
        int,
        setting(
            BATCHES,
            "Largest file that /v1/files accepts, in bytes; a larger one gets a 413.",
            ge=1024,
            extra={"size": True},
        ),
    ] = 200 * 1024 * 1024
    max_batch_dir_bytes: Annotated[
        int,
        setting(
            BATCHES,
            "Bytes of all files in --batch-dir. Beyond it, uploads get a 400, and batches fail.",
            ge=1024,
            extra={"size": True},
        ),
    ] = 4 * 1024**3
    max_batch_files: Annotated[
        int,
        setting(
            BATCHES,
            "Files at which uploads are refused. Also batches beyond which the oldest ended ones "
            "are forgotten.",
            ge=1,
        ),
    ] = 1000
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], setting(LOGGING, "Lowest level to log.")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "console"],
        setting(LOGGING, "auto: console on a terminal, otherwise JSON lines."),
    ] = "auto"
    access_log: Annotated[bool, setting(LOGGING, "Log one line per request.")] = True
    access_log_sample: Annotated[
        float,
        setting(
            LOGGING,
            "Share of successful requests to log, 0 to 1; errors are always logged.",
            ge=0,
            le=1,
        ),
    ] = 1.0
    record: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        setting(
            LOGGING,
            "File to which finished generations are appended, for `penstock verify`: tokens and "
            "sampling parameters.",
            extra={"form": "the path of a file"},
        ),
    ] = None
    metrics_compat: Annotated[
        MetricsCompat,
        setting(METRICS, "Also export the series of /metrics under the names of another server."),
    ] = "none"
    enable_per_request_metrics: Annotated[
        bool,
        setting(
            METRICS,
            "Return the times of each request in `metrics`, as vLLM does.",
        ),
    ] = False
    tracing: Annotated[
        bool,
        setting(
            METRICS,
            "Send OpenTelemetry spans, configured by OTEL_* variables; needs the extra [otel].",
        ),
    ] = False


def served_names(config: ServerConfig, model: str) -> tuple[str, ...]:
    """Return the names that clients may use in `model`; default: the last part of the path."""
    last = Path(model).name or Path(model).resolve().name
    return config.served_model_name or (last.removesuffix(".gguf"),)
