"""A discrete-event simulation of replicas, their API processes and their clients.

Every replica runs the engine's own Scheduler, with its blocks and steps. Only computing is
replaced: StepTime gives the work of a step, RequestTime that of the API process, and processes of
the same host share its cores. Answers have the given lengths.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from deploy.ray.policies import Policy, prefix_hashes
from engine.client.admission import AdmissionControl
from engine.config import EngineConfig
from engine.errors import EngineOverloadedError
from engine.protocol.generate import GenerateRequest, SamplingParams
from engine.protocol.outputs import TokenOutput
from engine.protocol.ready import KVGroup
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import SampledToken, Step
from loadtest.cores import Events, Host, Process
from loadtest.http_client import Completion
from loadtest.measure import Measured
from loadtest.schedule import Ask
from loadtest.step_time import RequestTime, StepTime

TOKEN = SampledToken(0)  # every token of every answer


class FittedReplica(msgspec.Struct, frozen=True):
    """The parameters of a simulated replica.

    These are the configuration of `penstock serve`, what the engine derives from it (see
    Scheduler), and the work of its two processes. `cores` are those of its host.
    """

    config: EngineConfig
    threads: int
    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    context_cost: float
    part_size: int
    groups: tuple[KVGroup, ...]
    cores: float
    step_time: StepTime
    api_time: RequestTime
    channel_time: float  # of each end, per message

    def scheduler(self) -> Scheduler:
        config = self.config
        return Scheduler(
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            context_cost=self.context_cost,
            groups=self.groups,
            prefix_caching=config.enable_prefix_caching,
            part_size=self.part_size,
        )


class Clients(msgspec.Struct, frozen=True):
    """Clients in one process that computes on the replicas' host, with `cores` in total."""

    cores: float
    time: RequestTime


@dataclass(frozen=True, slots=True)
class Work:
    """CPU seconds of all replicas and their clients."""

    engines: float
    apis: float
    client: float


@dataclass
class Request:
    """One request in the simulation; times are seconds since the start."""

    at: float
    ask: Ask
    ended: Callable[[], None] | None = None  # called when its answer is complete
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    cached_tokens: int = 0
    rejected: bool = False

    def measured(self) -> Measured:
        done = Completion(
            started=self.at,
            ended=self.arrivals[-1] if self.arrivals else self.at,
            arrivals=tuple(self.arrivals),
            tokens=self.tokens,
            prompt_tokens=len(self.ask.prompt),
            cached_tokens=self.cached_tokens,
            error="rejected" if self.rejected else "",
            status=503 if self.rejected else 200,
        )
        return Measured(done, self.at)


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a stream, or a rejection, on the way to the client."""

    request: Request
    is_last: bool


Received = Callable[[Event], None]


class Replica:
    """A Scheduler with the queue in front of it, computed by an engine and an API process.

    A process wakes the next one in the middle of its work: after it has written to a socket, it
    still has to return to its loop. The next one may run before that.
    """

    def __init__(self, fitted: FittedReplica, host: Host, received: Received) -> None:
        self._fitted = fitted
        self._events = host.events
        self.engine = Process(host, fitted.threads)
        api = fitted.api_time
        self.api = Process(host, wake=api.wake, cold=api.cold_wake)
        # The threads that write to and read from the socket between the two processes.
        self.engine_channel, self.api_channel = Process(host), Process(host)
        self._received = received
        self._queue = AdmissionControl(fitted.config, lambda: host.events.now)
        self._scheduler = fitted.scheduler()
        self._requests: dict[int, Request] = {}  # queued or running, by engine id
        self._unread: list[Sequence[TokenOutput]] = []  # messages: the outputs of a step each
        self._is_computing = False
        self.open = 0  # unanswered requests routed here, including those that have not arrived yet

    def submit(self, number: int, request: Request) -> None:
        """Let the API process parse the request and queue it."""
        seconds = self._fitted.api_time.sending(len(request.ask.prompt))
        add = functools.partial(self._add, number, request)
        channel = self.api_channel, self.engine_channel
        self.api.do(seconds, functools.partial(self._pass, *channel, add))

    def _pass(self, sender: Process, receiver: Process, then: Callable[[], None]) -> None:
        """Let the threads of the channel pass a message on."""
        half = self._fitted.channel_time / 2

        def sent() -> None:
            receiver.do(half, received)
            sender.do_next(half)

        def received() -> None:
            then()
            receiver.do_next(half)

        sender.do(half, sent)

    def _add(self, number: int, request: Request) -> None:
        """Queue the request, or reject it if the queue is full."""
        prompt, params = request.ask.prompt, SamplingParams(max_tokens=request.ask.output_tokens)
        try:
            self._queue.check(1, len(prompt), self._scheduler.stats())
        except EngineOverloadedError:
            request.rejected = True
            self._received(Event(request, is_last=True))
            self.open -= 1
            return
        self._queue.join(number, 1, len(prompt))
        self._scheduler.add(GenerateRequest(number, prompt, params, request.at))
        self._requests[number] = request
        self._launch()

    def _launch(self) -> None:
        """Start a step, if none is running and there is work."""
        if self._is_computing:
            return
        step = self._scheduler.schedule()
        if step is None:
            return
        self._is_computing = True
        seconds = step_seconds(self._fitted.step_time, step)
        self.engine.do(seconds, functools.partial(self._retire, step))

    def _retire(self, step: Step) -> None:
        """End a step: the API process sends its outputs while the engine runs the next one."""
        self._is_computing = False
        now = self._events.now
        admissions = self._scheduler.waiting.take_admissions(now)
        self._queue.admitted((admission.id for admission in admissions), now)
        for admission in admissions:
            self._requests[admission.id].cached_tokens = admission.cached_tokens
        sampled = [TOKEN for slice_ in step.slices if slice_.samples]
        outputs = self._scheduler.retire(step, sampled)
        arrive = functools.partial(self._arrive, outputs)
        self._pass(self.engine_channel, self.api_channel, arrive)
        self._launch()

    def _arrive(self, message: Sequence[TokenOutput]) -> None:
        """Wake the API process, unless it is already going to read messages."""
        self._unread.append(message)
        if len(self._unread) == 1:
            self.api.do(0.0, self._read)

    def _read(self) -> None:
        """Read all messages that have arrived, as the API process does (OutputStream).

        Each request then gets one event with its tokens of all messages.
        """
        messages, self._unread = self._unread, []
        outputs = [output for message in messages for output in message]
        for output in outputs:
            self._requests[output.id].tokens += 1
        finished = {output.id for output in outputs if output.finish}
        events = [
            Event(self._requests[number], number in finished)
            for number in dict.fromkeys(output.id for output in outputs)
        ]
        for number in finished:
            del self._requests[number]
        send = functools.partial(self._send, iter(events))
        self.api.do_next(self._fitted.api_time.message * len(messages), send)

    def _send(self, events: Iterator[Event]) -> None:
        """Send the events one by one: the client may read the first before the last is sent."""
        event = next(events, None)
        if event is None:
            return
        half = self._fitted.api_time.event / 2

        def sent() -> None:
            self.open -= event.is_last
            self._received(event)
            self.api.do_next(half, functools.partial(self._send, events))

        self.api.do_next(half, sent)


def step_seconds(step_time: StepTime, step: Step) -> float:
    """Return the seconds of a step, from its chunks of prompts and its decodes."""
    chunks = {chunk.id: chunk for chunk in step.prefills}
    decodes = [slice_.start for slice_ in step.slices if slice_.id not in chunks]
    prompts = sum(slice_.samples for slice_ in step.slices) - len(decodes)
    prefill = sum(chunk.count for chunk in chunks.values())
    attended = sum(chunk.count * (chunk.start + chunk.count / 2) for chunk in chunks.values())
    return step_time.seconds(prompts, prefill, len(decodes), sum(decodes), attended)


class Simulation:
    """`count` replicas behind a routing policy.

    With `clients`, the replicas and the clients share one host. Without, each replica has its own,
    and clients need no time.
    """

    def __init__(
        self,
        fitted: FittedReplica,
        count: int,
        policy: Policy[int],
        clients: Clients | None = None,
    ) -> None:
        self._events = Events()
        own = [Host(self._events, fitted.cores) for _ in range(count)]
        shared = Host(self._events, clients.cores if clients else 1.0)
        hosts = [shared] * count if clients else own
        self._client_time = client = clients.time if clients else RequestTime()
        self._client = Process(shared, wake=client.wake, cold=client.cold_wake)
        self._unread: list[Event] = []
        self._replicas = [Replica(fitted, host, self._receive) for host in hosts]
        self._policy = policy
        self._block_size = fitted.config.block_size
        self._numbers = itertools.count()

    @property
    def worked(self) -> Work:
        """The work done so far."""
        return Work(
            engines=sum(each.engine.worked + each.engine_channel.worked for each in self._replicas),
            apis=sum(each.api.worked + each.api_channel.worked for each in self._replicas),
            client=self._client.worked,
        )

    def open_loop(self, asks: Iterable[Ask]) -> list[Measured]:
        """Simulate requests that arrive at their scheduled times."""
        requests = [Request(ask.at, ask) for ask in asks]
        for request in requests:
            self._events.after(request.at, functools.partial(self._send, request))
        self._events.run()
        return [request.measured() for request in requests]

    def closed_loop(self, endless: Iterator[Ask], clients: int, seconds: float) -> list[Measured]:
        """Simulate clients that each send the next request when the last answer is complete."""
        requests: list[Request] = []

        def ask() -> None:
            if self._events.now < seconds:
                requests.append(request := Request(self._events.now, next(endless), ended=ask))
                self._send(request)

        for _ in range(clients):
            ask()
        self._events.run()
        return [request.measured() for request in requests]

    def _send(self, request: Request) -> None:
        """Route the request; the replica gets it when the client has sent it."""
        loads = {index: replica.open for index, replica in enumerate(self._replicas)}
        prefix = prefix_hashes(request.ask.prompt, self._block_size)
        chosen = self._policy.rank(prefix, loads)[0]
        self._policy.record(prefix, chosen)
        replica = self._replicas[chosen]
        replica.open += 1
        self._client.do(
            self._client_time.sending(len(request.ask.prompt)),
            functools.partial(replica.submit, next(self._numbers), request),
        )

    def _receive(self, event: Event) -> None:
        """Wake the client, unless it is already going to read events."""
        self._unread.append(event)
        if len(self._unread) == 1:
            self._client.do(0.0, self._read)

    def _read(self) -> None:
        """Let the client read all events that have arrived, and end the requests that they end."""
        events, self._unread = self._unread, []

        def read() -> None:
            for event in events:
                request = event.request
                if not request.rejected:
                    request.arrivals.append(self._events.now)
                if event.is_last and request.ended is not None:
                    request.ended()

        self._client.do_next(self._client_time.event * len(events), read)
