"""A case of the small measurements, and the table of what it has measured."""

from __future__ import annotations

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from loadtest.measure import spread

Samples = Mapping[str, Sequence[float]]  # the figures of each way of doing something


@dataclass(frozen=True)
class Case:
    """A measurement. `measure` sets up what it needs, leaves it to the stack, and runs the ways."""

    about: str
    add_options: Callable[[ArgumentParser], None]
    measure: Callable[[Namespace, ExitStack], Iterable[Table]]


@dataclass(frozen=True)
class Bound:
    """The ratio of two ways must be at least `ratio`, or at most that."""

    way: str
    base: str
    ratio: float
    at_most: bool = False


@dataclass(frozen=True)
class Table:
    """Figures in `unit`. The ways are compared with each of the `bases`, sample by sample."""

    samples: Samples
    unit: str
    bases: Sequence[str] = ()
    bounds: Sequence[Bound] = ()
    notes: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The table in Markdown: p50, p99 and ratios (median, lowest, highest)."""
        titles = [self.unit, "n", "p50", "p99", *(f"of {base}" for base in self.bases), ""]
        lines = [row(titles), row(["---"] * len(titles))]
        for way, values in self.samples.items():
            found = spread(values)
            assert found is not None, f"{way} has no figures"
            cells = [way, str(found.count), f"{found.p50:.4g}", f"{found.p99:.4g}"]
            cells += [shown(self.ratios(way, base)) for base in self.bases]
            lines.append(row([*cells, self.notes.get(way, "")]))
        lines += [f"MISSED: {bound}" for bound in self.missed()]
        return "\n".join(lines) + "\n"

    def ratios(self, way: str, base: str) -> list[float]:
        pairs = zip(self.samples[way], self.samples[base], strict=True)
        return [figure / other for figure, other in pairs]

    def missed(self) -> list[Bound]:
        """Return the bounds that the median ratio does not keep."""
        missed = []
        for bound in self.bounds:
            ratio = statistics.median(self.ratios(bound.way, bound.base))
            is_kept = ratio <= bound.ratio if bound.at_most else ratio >= bound.ratio
            if not is_kept:
                missed.append(bound)
        return missed


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shown(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def in_turn(ways: Mapping[str, Callable[[int], float]], rounds: int) -> dict[str, list[float]]:
    """Measure all ways in each round, so that changes in the machine's speed affect all of them.

    A way gets the number of the round. Another way is the first one in each round.
    """
    samples: dict[str, list[float]] = {way: [] for way in ways}
    names = list(ways)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(ways[name](number))
        line = ", ".join(f"{name} {figures[-1]:.4g}" for name, figures in samples.items())
        print(f"round {number + 1}: {line}", flush=True)
    return samples
