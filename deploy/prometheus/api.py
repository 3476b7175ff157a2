"""Client for the HTTP API of a running Prometheus."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2


@dataclass(frozen=True)
class Series:
    """One series of a response: its labels and its (Unix seconds, finite value) pairs."""

    labels: Mapping[str, str]
    points: list[tuple[float, float]]


class Prometheus:
    """The HTTP API at `url`. Raises httpx2.HTTPError, or ValueError with Prometheus' message."""

    def __init__(self, url: str) -> None:
        self._http = httpx2.Client(base_url=f"{url}/api/v1", timeout=30)

    def _get(self, path: str, parameters: dict[str, Any]) -> Any:
        answer = self._http.get(path, params=parameters).json()
        if answer["status"] != "success":
            raise ValueError(f"{parameters}: {answer['error']}")
        return answer["data"]

    def range(self, query: str, start: float, end: float, step: float) -> list[Series]:
        """Return a query's values from `start` to `end` (Unix seconds), every `step` seconds."""
        parameters = {"query": query, "start": start, "end": end, "step": step}
        result = self._get("/query_range", parameters)["result"]
        return [Series(found["metric"], _finite(found["values"])) for found in result]

    def now(self, query: str) -> list[Series]:
        """Return a query's current values."""
        result = self._get("/query", {"query": query})["result"]
        return [Series(found["metric"], _finite([found["value"]])) for found in result]

    def has(self, name: str) -> bool:
        """Return whether any series has this name."""
        return bool(self._get("/series", {"match[]": name}))


def _finite(values: list[tuple[float, str]]) -> list[tuple[float, float]]:
    return [(at, float(text)) for at, text in values if math.isfinite(float(text))]
