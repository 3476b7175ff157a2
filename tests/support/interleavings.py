"""Explore every interleaving of a few programs that share memory with acquire and release.

A program is a generator that yields operations and gets their results:

    def program():
        yield Store("data", 7)
        yield Store("flag", 1, release=True)

The memory is weaker than a CPU's, like a GPU's. Each place keeps its former values. A load may
return any of them that is not older than what its program has seen of that place. A release joins
to a value what its program has seen; an acquire of that value makes that seen, too. So data written
before a flag may be missing after it, unless the flag is released and acquired. Stores to one place
become visible in the order of their execution, which is the only simplification: a real relaxed
store may also be ordered before one that was executed earlier.

A loop that polls is one operation, `Await`, which waits for a value that can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple


class Load(NamedTuple):
    """Return a value of `place`."""

    place: str
    acquire: bool = False


class Store(NamedTuple):
    """Write a value."""

    place: str
    value: int
    release: bool = False


class Add(NamedTuple):
    """Add one to the newest value. Acquires and releases, or neither.

    Returns the value before, if the program `wants` it. Results that no program uses would only
    multiply the states.
    """

    place: str
    synchronizes: bool = True
    wants: bool = True


class Await(NamedTuple):
    """Wait until a value of `place` that is `ready` is seen."""

    place: str
    ready: Callable[[int], bool]
    acquire: bool = True


class Boundary(NamedTuple):
    """Wait until all programs are here: the end of one kernel and the start of the next."""


Operation = Load | Store | Add | Await | Boundary
Program = Generator[Operation, int, None]
View = tuple[int, ...]  # the oldest time of each place that may still be seen


class Value(NamedTuple):
    """A place holds this from `time` on. A program that acquires it has seen `view`."""

    time: int
    value: int
    view: View


class State(NamedTuple):
    """Results that each program has got, what it has seen, and the values of each place."""

    results: tuple[tuple[int, ...], ...]
    views: tuple[View, ...]
    memory: tuple[tuple[Value, ...], ...]


class Exploration(NamedTuple):
    """The number of states that were reached, and what went wrong in one of them, if anything."""

    states: int
    fault: str | None


class _Done(NamedTuple):
    fault: str | None  # the failed assertion of a program that ended with one


class Explorer:
    """The interleavings of `programs` over places with the given first values."""

    def __init__(
        self, programs: Sequence[Callable[[], Program]], places: Mapping[str, int]
    ) -> None:
        self._programs = programs
        self._index = {place: index for index, place in enumerate(places)}
        self._next: dict[tuple[int, tuple[int, ...]], Operation | _Done] = {}
        nothing = (0,) * len(places)
        memory = tuple((Value(0, value, nothing),) for value in places.values())
        count = len(programs)
        self._first = State(((),) * count, (nothing,) * count, memory)

    def explore(self, check: Callable[[dict[str, int]], str | None]) -> Exploration:
        """Visit all states. `check` gets the newest values when all programs have ended, and
        returns what is wrong with them."""
        seen = {self._first}
        waiting = [self._first]
        while waiting:
            state = waiting.pop()
            steps = [self._operation(number, state) for number in range(len(self._programs))]
            faults = [step.fault for step in steps if isinstance(step, _Done) and step.fault]
            if faults:
                return Exploration(len(seen), faults[0])
            if all(isinstance(step, _Done) for step in steps):
                fault = check(self._newest(state))
                if fault:
                    return Exploration(len(seen), fault)
                continue
            following = self._following(state, steps)
            if not following:
                return Exploration(len(seen), "all programs wait")
            for each in following:
                if each not in seen:
                    seen.add(each)
                    waiting.append(each)
        return Exploration(len(seen), None)

    def _newest(self, state: State) -> dict[str, int]:
        return {place: state.memory[index][-1].value for place, index in self._index.items()}

    def _operation(self, number: int, state: State) -> Operation | _Done:
        """Return what a program does next: its results so far determine it."""
        results = state.results[number]
        key = number, results
        if key not in self._next:
            program = self._programs[number]()
            try:
                operation = next(program)
                for result in results:
                    operation = program.send(result)
                self._next[key] = operation
            except StopIteration:
                self._next[key] = _Done(None)
            except AssertionError as error:
                self._next[key] = _Done(str(error))
        return self._next[key]

    def _following(self, state: State, steps: Sequence[Operation | _Done]) -> list[State]:
        running = [step for step in steps if not isinstance(step, _Done)]
        if all(isinstance(step, Boundary) for step in running):
            return [self._past_boundary(state, steps)]
        following: list[State] = []
        for number, step in enumerate(steps):
            if isinstance(step, Load | Await):
                following += self._reads(state, number, step)
            elif isinstance(step, Store | Add):
                following.append(self._write(state, number, step))
        return following

    def _past_boundary(self, state: State, steps: Sequence[Operation | _Done]) -> State:
        view = state.views[0]
        for other in state.views[1:]:
            view = _join(view, other)
        results = tuple(
            own if isinstance(step, _Done) else (*own, 0)
            for own, step in zip(state.results, steps, strict=True)
        )
        return _without_past(State(results, (view,) * len(steps), state.memory))

    def _reads(self, state: State, number: int, step: Load | Await) -> list[State]:
        place = self._index[step.place]
        view = state.views[number]
        following = []
        for value in state.memory[place]:
            if value.time < view[place]:
                continue
            if isinstance(step, Await) and not step.ready(value.value):
                continue
            seen = _at(view, place, value.time)
            if step.acquire:
                seen = _join(seen, value.view)
            result = value.value if isinstance(step, Load) else 0
            following.append(_moved(state, number, result, seen, state.memory))
        return following

    def _write(self, state: State, number: int, step: Store | Add) -> State:
        place = self._index[step.place]
        values = state.memory[place]
        newest = values[-1]
        view = _at(state.views[number], place, newest.time + 1)
        # Without a release, a value says only that it is there itself.
        sent = _at((0,) * len(view), place, newest.time + 1)
        result = 0
        if isinstance(step, Add):
            result = newest.value if step.wants else 0
            written = newest.value + 1
            if step.synchronizes:
                view = _join(view, newest.view)
                sent = view
            else:
                sent = _join(sent, newest.view)
        else:
            written = step.value
            if step.release:
                sent = view
        added = (*values, Value(newest.time + 1, written, sent))
        memory = (*state.memory[:place], added, *state.memory[place + 1 :])
        return _moved(state, number, result, view, memory)


def _at(view: View, place: int, time: int) -> View:
    return (*view[:place], max(view[place], time), *view[place + 1 :])


def _join(one: View, other: View) -> View:
    return tuple(map(max, one, other))


def _moved(
    state: State, number: int, result: int, view: View, memory: tuple[tuple[Value, ...], ...]
) -> State:
    results, views = list(state.results), list(state.views)
    results[number] = (*results[number], result)
    views[number] = view
    return _without_past(State(tuple(results), tuple(views), memory))


def _without_past(state: State) -> State:
    """Drop values that no program can see any more."""
    memory = []
    for place, values in enumerate(state.memory):
        oldest = min(view[place] for view in state.views)
        memory.append(tuple(value for value in values if value.time >= oldest))
    return state._replace(memory=tuple(memory))
