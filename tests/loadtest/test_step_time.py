"""The fits of the simulator recover known times from intervals with noise."""

from __future__ import annotations

import random
import sys
import time

import msgspec
import psutil
import pytest

from loadtest.calibration import Cpu, Scrape, cpu_seconds, interval, pauses, total, wakes
from loadtest.step_time import (
    Interval,
    RequestTime,
    StepTime,
    fit_channel,
    fit_requests,
    fit_steps,
)

MODEL = StepTime(((1, 0.001), (8, 0.002), (9, 0.004), (32, 0.006)), 3e-7, 0.003, 2e-4, 4e-5, 1e-7)
API = RequestTime(0.002, 1e-6, message=3e-5, wake=1e-4, cold_wake=4e-4, event=3e-5)
CHANNEL = 3e-5


def intervals(model: StepTime, api: RequestTime, threads: int, noise: float) -> list[Interval]:
    """Return what servers with these times would do under loads like those of a calibration."""
    rng = random.Random(0)
    found = []

    def add(
        decodes: int,
        prompt: int,
        prompts: int,
        context: float,
        at_once: int = 1,
        paced: bool = False,
    ) -> None:
        steps = rng.randint(8, 15) * 4
        woken = steps // at_once + prompts * steps  # for messages, and for requests
        requests = prompts * steps
        prefill = prompt * requests
        tokens = steps * (decodes + prompts)
        attended = prefill * prompt / 2
        step = model.seconds(prompts, prefill // steps, decodes, round(context), attended / steps)
        sending = api.request * requests + api.prompt_token * prefill
        events = tokens // at_once
        waking = (api.wake + api.cold_wake * paced) * woken
        receiving = api.message * steps + api.event * events
        factors = [1 + noise * rng.uniform(-1, 1) for _ in range(2)]
        found.append(
            Interval(
                decodes=decodes,
                steps=steps,
                wakes=woken,
                paced=paced,
                prefill=prefill,
                context=context,
                attended=attended,
                requests=requests,
                tokens=tokens,
                events=events,
                engine_cpu=steps * step * threads * factors[0],
                api_cpu=(sending + waking + receiving) * factors[1],
                channel_cpu=2 * CHANNEL * (steps + requests),
            )
        )

    for _ in range(8):
        for prompt, prompts in ((16, 1), (16, 4), (64, 1), (64, 3), (250, 1)):
            add(0, prompt, prompts, 0.0)
            add(0, prompt, prompts, 0.0, paced=True)
        for decodes, _ in MODEL.decodes:
            for context in (16, 400):
                add(decodes, 0, 0, float(decodes * context))
            add(decodes, 0, 0, float(decodes * 16), at_once=4)
    return found


def test_fit_steps_recovers_the_times_of_a_thread() -> None:
    found = fit_steps(intervals(MODEL, API, threads=2, noise=0.02), threads=2)
    assert [count for count, _ in found.decodes] == [1, 8, 9, 32]
    for (_, seconds), (_, true) in zip(found.decodes, MODEL.decodes, strict=True):
        assert seconds == pytest.approx(true, rel=0.05)
    for name in ("context_token", "prefill_step", "prompt", "prefill_token"):
        assert getattr(found, name) == pytest.approx(getattr(MODEL, name), rel=0.1)
    assert found.attention == pytest.approx(MODEL.attention, rel=0.3)


def test_fit_requests_recovers_the_times() -> None:
    measured = intervals(MODEL, API, threads=1, noise=0.01)
    found = fit_requests(measured, [each.api_cpu for each in measured])
    assert found.request == pytest.approx(API.request, rel=0.1)
    assert found.message == pytest.approx(API.message, rel=0.2)
    assert found.wake == pytest.approx(API.wake, rel=0.2)
    assert found.cold_wake == pytest.approx(API.cold_wake, rel=0.1)
    assert found.event == pytest.approx(API.event, rel=0.1)
    assert fit_channel(measured) == pytest.approx(CHANNEL)


def test_fit_has_no_negative_term_and_needs_both_kinds_of_steps() -> None:
    free = StepTime(MODEL.decodes, 0.0, 0.003, 0.0, 0.0, 0.0)
    measured = intervals(free, RequestTime(), threads=1, noise=0.3)
    found = fit_steps(measured, threads=1)
    assert min(found.context_token, found.prefill_token, found.attention) >= 0.0
    for kept in (
        [each for each in measured if each.decodes],
        [each for each in measured if each.decodes < 2],
    ):
        with pytest.raises(ValueError, match="at least two numbers of decodes"):
            fit_steps(kept, threads=1)


def test_step_time_of_decodes_is_interpolated_and_extrapolated() -> None:
    def seconds(decodes: int) -> float:
        return MODEL.seconds(0, 0, decodes, 0, 0.0)

    assert seconds(1) == pytest.approx(0.001)
    assert seconds(4) == pytest.approx(0.001 + 3 / 7 * 0.001)
    assert seconds(9) == pytest.approx(0.004)
    assert seconds(55) == pytest.approx(0.006 + 0.002)
    with_prompt = MODEL.seconds(1, 100, 23, 1000, 0.0) - MODEL.seconds(1, 100, 0, 0, 0.0)
    assert with_prompt == pytest.approx(0.002 + 3e-4)


def test_interval_counts_what_happens_between_the_cpu_readings() -> None:
    """Scrapes at 0 and 10 s enclose the readings of the CPU times at 1 and 9 s."""
    scrapes = Scrape(0.0, 0, 0, 64.0, 0, 0, 4), Scrape(10.0, 100, 1000, 128.0, 20, 40, 4)
    idle = 0.0, 0.0
    begin = Cpu(1.0, [0.0, 2.0], [0.0, 1.0], [idle, (0.5, 0.25)], 0.0, [0, 10], 0)
    end = Cpu(9.0, [9.0, 6.0], [9.0, 2.0], [idle, (1.0, 0.5)], 3.0, [0, 60], 7)
    arguments = 1, scrapes, (begin, end), ([0, 5], [9, 35]), 0, 50
    found = interval(*arguments)
    assert found == Interval(0, 80, 50, False, 800, 96.0, 20_000, 16, 32, 30, 3.5, 0.75, 0.75)
    assert interval(*arguments, paced=True) == msgspec.structs.replace(found, paced=True)


def test_wakes_count_how_often_a_process_has_slept() -> None:
    before = wakes(this := psutil.Process())
    for _ in range(20):
        time.sleep(0.001)
    assert 20 <= wakes(this) - before < 60


async def test_paused_process_works_half_of_the_time() -> None:
    busy = psutil.Popen([sys.executable, "-c", "while True: pass"])
    try:
        began = time.monotonic()
        await pauses([busy], 1.0)
        assert busy.status() != psutil.STATUS_STOPPED
        assert cpu_seconds(busy) < 0.8 * (time.monotonic() - began)
    finally:
        busy.kill()
        busy.wait()


def test_total_of_two_servers_has_no_messages_and_the_wakes_of_the_client() -> None:
    prompts = Interval(0, 40, 30, True, 9000, 0.0, 0.0, 10, 10, 9, 0.3, 0.02, 0.0)
    decodes = msgspec.structs.replace(
        prompts, decodes=4, steps=60, paced=False, requests=0, tokens=200, events=190
    )
    both = total([decodes, decodes], 25)
    assert (both.steps, both.wakes, both.paced, both.events) == (0, 25, False, 380)
    both = total([prompts, prompts], 25)
    assert (both.wakes, both.paced, both.requests, both.tokens) == (25, True, 20, 20)
