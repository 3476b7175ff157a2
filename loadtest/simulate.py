"""Predict how many replicas a trace needs, their cost, and how many requests keep an objective.

Requests arrive by a timetable, and a routing policy sends each to a simulated replica
(`loadtest/simulation.py`). Every replica has cores of its own.

    python -m loadtest.simulate TRACE --model MODEL.json --rate 20 --slo ttft=500ms --price 1.5

`python -m loadtest.simulator_check` writes MODEL.json and measures how accurate the simulation is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deploy.ray.policies import POLICIES, Policy
from loadtest.errors import BenchError
from loadtest.measure import Load, Point, Slo, point
from loadtest.program import run_program
from loadtest.schedule import Ask, timetable
from loadtest.simulation import FittedReplica, Simulation
from loadtest.workload import Scale, workload

MAX_REPLICAS = 64
VOCABULARY = range(1, 1000)  # token ids of the prompts, which no model reads


@dataclass(frozen=True, slots=True)
class Prediction:
    """The figures of `replicas` for a timetable. `price` is that of one replica per hour."""

    replicas: int
    point: Point
    attainment: float | None  # share of the requests that keep the objective
    price: float

    @property
    def cost(self) -> float:
        """The cost per million output tokens under this load."""
        tokens_per_hour = self.point.tokens_per_s * 3600
        return self.replicas * self.price / tokens_per_hour * 1e6 if tokens_per_hour else 0.0

    def __str__(self) -> str:
        p, parts = self.point, []
        if p.ttft:
            parts.append(f"ttft p50 {p.ttft.p50 * 1e3:.0f} ms, p99 {p.ttft.p99 * 1e3:.0f} ms")
        hits = p.cached_tokens / max(p.prompt_tokens, 1)
        parts += [f"{hits:.0%} of prompt tokens cached", f"{p.rejected} rejected"]
        if self.attainment is not None:
            parts.append(f"{self.attainment:.1%} keep the objective")
        if self.price:
            parts.append(f"{self.cost:.2f} per million output tokens")
        count = f"{self.replicas} replica{'s' * (self.replicas != 1)}"
        return f"{count}: {p.tokens_per_s:.0f} tokens/s, {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Question:
    """The requests that arrive, and the objective and price of the replicas that serve them."""

    fitted: FittedReplica
    asks: Sequence[Ask]
    rate: float
    seconds: float
    policy: str
    slo: Slo | None = None
    price: float = 0.0

    def predict(self, replicas: int) -> Prediction:
        policy: Policy[int] = POLICIES[self.policy]()
        measured = Simulation(self.fitted, replicas, policy).open_loop(self.asks)
        figures = point(
            Load("open", self.rate), 1, (0.0, self.seconds), measured, self.slo, client_cpu=0.0
        )
        kept = None
        if self.slo is not None:
            good = sum(self.slo.met(m) for m in measured if not m.completion.error)
            kept = good / max(len(measured), 1)
        return Prediction(replicas, figures, kept, self.price)

    def fewest(self, attainment: float) -> Iterator[Prediction]:
        """Yield predictions for one replica, two and so on, until they keep the objective.

        If not even MOST_REPLICAS keep it, yield only the prediction for these.
        """
        most = self.predict(MAX_REPLICAS)
        if (most.attainment or 0.0) < attainment:
            yield most
            return
        for replicas in range(1, MAX_REPLICAS + 1):
            yield (prediction := self.predict(replicas))
            if (prediction.attainment or 0.0) >= attainment:
                return


def main() -> None:
    options = _options()
    try:
        fitted = msgspec.json.decode(options.model.read_bytes(), type=FittedReplica)
        slo = Slo.parse(options.slo) if options.slo else None
        scale = Scale.parse(options.length_scale)
        chosen = workload(options.workload, scale, fitted.max_model_len)
    except (OSError, msgspec.DecodeError, BenchError) as error:
        sys.exit(f"simulate: {error}")
    if slo is None and options.replicas is None:
        sys.exit("simulate: give an objective, as --slo ttft=500ms, or a number of --replicas.")
    asks = timetable(chosen, options.rate, options.seconds, VOCABULARY, options.seed)
    question = Question(
        fitted, asks, options.rate, options.seconds, options.policy, slo, options.price
    )
    left_out = (
        f"; {chosen.left_out} of its requests are too long: left out" if chosen.left_out else ""
    )
    print(f"{len(asks)} requests of {chosen.name}{left_out}")
    if options.replicas is not None:
        print(question.predict(options.replicas))
        return
    for prediction in question.fewest(options.attainment):
        print(prediction, flush=True)
    if (prediction.attainment or 0.0) < options.attainment:
        sys.exit(f"simulate: no number of replicas up to {MAX_REPLICAS} keeps the objective.")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("workload", help="a trace, or any --workload of `penstock bench run`")
    add("--model", type=Path, required=True, help="MODEL.json with the fitted replica")
    add("--length-scale", default="1", help="factors for a trace, as for `penstock bench run`")
    add("--rate", type=float, required=True, help="mean arrival rate in requests/s")
    add("--seconds", type=float, default=120.0, help="duration of the arrivals")
    add("--policy", choices=POLICIES, default="prefix")
    add("--replicas", type=int, help="default: the fewest that keep the objective")
    add("--slo", help="the objective: ttft=500ms,itl=50ms,e2e=10s")
    add("--attainment", type=float, default=0.99, help="share of requests that must keep it")
    add("--price", type=float, default=0.0, help="price of one replica per hour")
    add("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    run_program(main)
