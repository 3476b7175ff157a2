"""The metrics of the parent: loads, ends, requests; and the series of all models in one text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary
from prometheus_client.exposition import generate_latest

from server.telemetry.exposition import WithoutCreated

Reason = Literal["age", "memory", "request"]  # why a model was unloaded
FAMILY = re.compile(r"# (?:HELP|TYPE) (\S+)")


class Watched(Protocol):
    """A pool of models."""

    @property
    def used(self) -> int: ...

    @property
    def num_open(self) -> int: ...

    def loaded(self) -> Sequence[object]: ...


class PoolCounts:
    """Counts of what happened to the models. Label values are names of the catalog, or literals."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("http_requests", "Answers of this address.", "status")
        self._rejects = self._counter("rejected_requests", "Requests refused here.", "code")
        self._loads = Summary(
            "penstock:model_load_seconds",
            "Loads of a model, and their seconds.",
            ["model"],
            registry=self.registry,
        )
        self._unloads = self._counter("model_unloads", "Models unloaded.", "model", "reason")
        self._failures = self._counter("model_load_failures", "Loads that failed.", "model")
        self._crashes = self._counter("model_crashes", "Models that ended by themselves.", "model")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"penstock:parent_{name}", text, labels, registry=self.registry)

    def watch(self, pool: Watched) -> None:
        """Add gauges of a pool, whose values are read at each scrape."""
        for name, text, read in (
            ("models_loaded", "Models that are loaded.", lambda: len(pool.loaded())),
            ("models_planned_bytes", "Memory reserved by --plan's numbers.", lambda: pool.used),
            ("parent_open_requests", "Requests that are open or wait.", lambda: pool.num_open),
        ):
            Gauge(f"penstock:{name}", text, registry=self.registry).set_function(read)

    def request(self, status: int) -> None:
        self._requests.labels(status=str(status)).inc()

    def reject(self, code: str) -> None:
        self._rejects.labels(code=code).inc()

    def loaded(self, model: str, seconds: float) -> None:
        self._loads.labels(model=model).observe(seconds)

    def unloaded(self, model: str, reason: Reason) -> None:
        self._unloads.labels(model=model, reason=reason).inc()

    def failed(self, model: str) -> None:
        self._failures.labels(model=model).inc()

    def crashed(self, model: str) -> None:
        self._crashes.labels(model=model).inc()

    def render(self) -> str:
        return generate_latest(WithoutCreated(self.registry)).decode()


def merged(parent: str, models: Iterable[tuple[str, str]]) -> str:
    """Return one exposition of the parent's text and of (model, its text).

    Each series of a model gets the label `model`. All series of a family stand together, as the
    format requires.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    _collect(parent, "", heads, samples)
    for model, text in models:
        escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        _collect(text, f'model="{escaped}"', heads, samples)
    lines = []
    for family, head in heads.items():
        lines += [*head, *samples.get(family, ())]
    return "\n".join([*lines, ""])


def _collect(
    text: str, label: str, heads: dict[str, list[str]], samples: dict[str, list[str]]
) -> None:
    """Sort the lines of a text by family; `label` is added to its samples."""
    family = ""
    seen: set[str] = set()  # families whose head another text has given
    for line in text.splitlines():
        if match := FAMILY.match(line):
            if match[1] != family:
                family = match[1]
                if family in heads:
                    seen.add(family)
                heads.setdefault(family, [])
            if family not in seen:
                heads[family].append(line)
        elif line and not line.startswith("#"):
            samples.setdefault(family, []).append(_labelled(line, label))


def _labelled(line: str, label: str) -> str:
    if not label:
        return line
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"
