"""Predict how many replicas a trace needs, their cost, and how many requests keep an objective.

This is a discrete-event simulation. Requests arrive by a timetable, a routing policy sends each to
a replica, and every replica runs the engine's own Scheduler, with its blocks and steps. Only the
device is replaced: StepTime gives the duration of a step, and answers have the given lengths.

    python -m loadtest.simulate TRACE --model MODEL.json --rate 20 --slo ttft=500ms --price 1.5

`python -m loadtest.simulator_check` writes MODEL.json and measures how accurate the simulation is.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from deploy.ray.policies import POLICIES, Policy, prefix_hashes
from engine.client.admission import AdmissionControl
from engine.config import EngineConfig
from engine.errors import EngineOverloadedError
from engine.protocol import GenerateRequest, SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import SampledToken, Step
from loadtest.errors import BenchError
from loadtest.http_client import Completion
from loadtest.measure import Load, Measured, Point, Slo, point
from loadtest.schedule import Ask, timetable
from loadtest.step_time import StepTime
from loadtest.workload import Scale, workload

TOKEN = SampledToken(0)  # every token of every answer
MAX_REPLICAS = 64
VOCABULARY = range(1, 1000)  # token ids of the prompts, which no model reads


class FittedReplica(msgspec.Struct, frozen=True):
    """The parameters of a simulated replica.

    These are the configuration of `penstock serve`, the sizes derived from it, and the duration of
    its steps. The KV cache is that of full attention.
    """

    config: EngineConfig
    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    step_time: StepTime


@dataclass
class Request:
    """One request in the simulation; times are seconds since the start."""

    at: float
    ask: Ask
    ended: Callable[[], None] | None = None  # called when its answer is complete
    arrivals: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    rejected: bool = False

    def measured(self) -> Measured:
        done = Completion(
            started=self.at,
            ended=self.arrivals[-1] if self.arrivals else self.at,
            arrivals=tuple(self.arrivals),
            tokens=len(self.arrivals),
            prompt_tokens=len(self.ask.prompt),
            cached_tokens=self.cached_tokens,
            error="rejected" if self.rejected else "",
            status=503 if self.rejected else 200,
        )
        return Measured(done, self.at)


class Replica:
    """A Scheduler with the queue in front of it and the timing of its steps."""

    def __init__(self, fitted: FittedReplica, clock: Callable[[], float]) -> None:
        config = fitted.config
        self._step_time = fitted.step_time
        self._queue = AdmissionControl(config, clock)
        self._clock = clock
        self._scheduler = Scheduler(
            num_blocks=fitted.num_blocks,
            block_size=config.block_size,
            max_model_len=fitted.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=fitted.max_num_batched_tokens,
            prefix_caching=config.enable_prefix_caching,
        )
        self._requests: dict[int, Request] = {}  # queued or running, by engine id
        self._step: Step | None = None
        self.open = 0  # unanswered requests routed here, including those that have not arrived yet

    def add(self, number: int, request: Request) -> None:
        """Queue the request, or reject it if the queue is full."""
        prompt, params = request.ask.prompt, SamplingParams(max_tokens=request.ask.output_tokens)
        try:
            self._queue.check(1, len(prompt), self._scheduler.stats())
        except EngineOverloadedError:
            request.rejected = True
            self.open -= 1
            return
        self._queue.join(number, 1, len(prompt))
        self._scheduler.add(GenerateRequest(number, prompt, params, request.at))
        self._requests[number] = request

    def launch(self) -> float | None:
        """Start a step and return its seconds, or None if one is running or there is no work."""
        if self._step is not None or (step := self._scheduler.schedule()) is None:
            return None
        self._step = step
        decode = step.num_decode_tokens
        context = self._scheduler.pool.num_held * self._scheduler.block_size
        return self._step_time.seconds(step.num_tokens - decode, decode, context)

    def retire(self) -> list[Request]:
        """End the running step and return the requests it has finished."""
        assert self._step is not None
        step, self._step = self._step, None
        now = self._clock()
        admissions = self._scheduler.take_admissions(now)
        self._queue.admitted((admission.id for admission in admissions), now)
        for admission in admissions:
            self._requests[admission.id].cached_tokens = admission.cached_tokens
        sampled = [TOKEN for slice_ in step.slices if slice_.samples]
        finished = []
        for output in self._scheduler.retire(step, sampled):
            self._requests[output.id].arrivals.append(now)
            if output.finish:
                finished.append(self._requests.pop(output.id))
        self.open -= len(finished)
        return finished


class Simulation:
    """Processes events in order of time; events at the same time in order of creation."""

    def __init__(self, fitted: FittedReplica, count: int, policy: Policy[int]) -> None:
        self._now = 0.0
        self._replicas = [Replica(fitted, lambda: self._now) for _ in range(count)]
        self._policy = policy
        self._frontend = fitted.step_time.frontend
        self._block_size = fitted.config.block_size
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def open_loop(self, asks: Iterable[Ask]) -> list[Measured]:
        """Simulate requests that arrive at their scheduled times."""
        requests = [Request(ask.at, ask) for ask in asks]
        for request in requests:
            self._in(request.at, functools.partial(self._arrive, request))
        self._run()
        return [request.measured() for request in requests]

    def closed_loop(self, endless: Iterator[Ask], clients: int, seconds: float) -> list[Measured]:
        """Simulate clients that each send the next request when the last answer is complete."""
        requests: list[Request] = []

        def ask() -> None:
            if self._now < seconds:
                requests.append(request := Request(self._now, next(endless), ended=ask))
                self._arrive(request)

        for _ in range(clients):
            ask()
        self._run()
        return [request.measured() for request in requests]

    def _run(self) -> None:
        while self._events:
            self._now, _, happens = heapq.heappop(self._events)
            happens()

    def _in(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), happens))

    def _arrive(self, request: Request) -> None:
        """Route the request; the engine gets it after the frontend's delay."""
        loads = {index: replica.open for index, replica in enumerate(self._replicas)}
        prefix = prefix_hashes(request.ask.prompt, self._block_size)
        chosen = self._policy.rank(prefix, loads)[0]
        self._policy.record(prefix, chosen)
        replica = self._replicas[chosen]
        replica.open += 1
        self._in(self._frontend, functools.partial(self._deliver, replica, request))

    def _deliver(self, replica: Replica, request: Request) -> None:
        replica.add(next(self._numbers), request)
        self._launch(replica)

    def _launch(self, replica: Replica) -> None:
        if (seconds := replica.launch()) is not None:
            self._in(seconds, functools.partial(self._retire, replica))

    def _retire(self, replica: Replica) -> None:
        for request in replica.retire():
            if request.ended is not None:
                request.ended()
        self._launch(replica)


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
    main()
