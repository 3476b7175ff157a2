"""The access log: one record for each request, without its text."""

from __future__ import annotations

from dataclasses import dataclass, fields

import structlog
from starlette.datastructures import Headers

log = structlog.get_logger("server.access")
LONGEST = 128  # characters of a header in a record


@dataclass
class AccessRecord:
    """Fields that become known while a request is served. None: it does not apply."""

    client: str | None = None  # address of the peer, which may be a proxy
    forwarded_for: str | None = None  # as the proxy or the client claims
    key: str | None = None  # label of the API key
    model: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_ms: int | None = None  # from arrival to the first sampled token
    finish_reason: str | None = None  # of all choices, or why they were aborted

    def log(self, *, is_probe: bool, method: str, path: str, status: int, ms: int) -> None:
        """Write the record. Those of probes and pages are written at debug level."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        known = {name: value for name, value in known.items() if value is not None}
        write = log.debug if is_probe else log.info
        write("request", method=method, path=path, status=status, ms=ms, **known)


# Headers of proxies, the most telling first. Via names only the proxy.
NAMING = ("x-forwarded-for", "forwarded", "x-real-ip", "cf-connecting-ip", "true-client-ip", "via")


def forwarded_for(headers: Headers) -> str | None:
    """Return the client that a proxy names, or the proxy; see `server.http.auth.is_forwarded`."""
    named = next((headers[name] for name in NAMING if headers.get(name)), None)
    return named[:LONGEST] if named else None
