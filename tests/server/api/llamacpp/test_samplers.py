"""`samplers` of /completion: lists that the engine's order equals, and refusals of others."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import httpx2
import numpy as np
import pytest

from engine.protocol.generate import SamplingParams
from engine.protocol.sampling_parameters import CUT_NAMES, PARAMETERS
from server.api.llamacpp.samplers import FIELDS, SERVED, sampler_names, with_samplers
from server.generation.options import GenerationOptions
from server.http.errors import ApiError
from tests.engine.sampling.test_plain_cuts import REFERENCES, VALUES
from tests.support.rig import Served

ALL = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.04, "repeat_penalty": 1.5}
# The order of llama.cpp, which front ends send with each request.
FRONT_END = [
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
    *("temperature", "adaptive_p"),
]


async def complete(served: Served, **fields: Any) -> httpx2.Response:
    return await served.http.post("/completion", json={"prompt": "ab", **fields})


async def params(served: Served, **fields: Any) -> SamplingParams:
    response = await complete(served, **fields)
    assert response.status_code == 200, response.text
    return served.engine.requests[-1].params


def applied(found: SamplingParams) -> tuple[float, ...]:
    return found.temperature, found.top_k, found.top_p, found.min_p, found.repetition_penalty


@pytest.mark.parametrize("name", CUT_NAMES)
def test_each_cut_can_be_listed_by_the_name_of_its_parameter(name: str) -> None:
    (sampler,) = sampler_names([name]) or ()
    assert FIELDS.get(sampler, sampler) == name
    assert sampler in SERVED


@pytest.mark.parametrize("name", REFERENCES)
def test_declaration_says_which_cuts_never_drop_the_likeliest_token(name: str) -> None:
    trials = np.random.default_rng(3).normal(size=(200, 12))
    keeps = all(
        REFERENCES[name](scores, value)[scores.argmax()]
        for scores in trials
        for value in VALUES[name]
    )
    assert keeps == PARAMETERS[name].keeps_likeliest


@pytest.mark.parametrize(
    ("samplers", "wanted"),
    [
        (["penalties", "temperature", "top_k", "top_p", "min_p"], (0.5, 7, 0.9, 0.04, 1.5)),
        ("etkpm", (0.5, 7, 0.9, 0.04, 1.5)),
        (["penalties", "dry", "top-k", "temp", "nucleus", "minp"], (0.5, 7, 0.9, 0.04, 1.5)),
        (["top_k", "min_p"], (1, 7, 1, 0.04, 1)),
        (["min_p", "top_k"], (1, 7, 1, 0.04, 1)),
        (["top_p"], (1, 0, 0.9, 0, 1)),
        (["TOP_P", "xtc", "typical_p"], (1, 0, 0.9, 0, 1)),
        (["temperature"], (0.5, 0, 1, 0, 1)),
        (["penalties"], (1, 0, 1, 0, 1.5)),
        ([], (1, 0, 1, 0, 1)),
        ("", (1, 0, 1, 0, 1)),
    ],
)
async def test_samplers_that_are_not_listed_are_off(
    served: Served, samplers: Any, wanted: tuple[float, ...]
) -> None:
    assert applied(await params(served, samplers=samplers, **ALL)) == wanted


async def test_samplers_without_fields_have_the_checkpoints_values(served: Served) -> None:
    found = await params(served, samplers=["top_k"])
    assert (found.temperature, found.top_k, found.min_p) == (1, 20, 0)
    found = await params(served, samplers=["temperature", "min_p"])
    assert (found.temperature, found.top_k, found.min_p) == (0.6, 0, 0.1)
    found = await params(served)
    assert (found.temperature, found.top_k, found.min_p) == (0.6, 20, 0.1)


async def test_samplers_min_p_before_temperature_is_converted(served: Served) -> None:
    found = await params(served, samplers=["top_k", "min_p", "temperature"], **ALL)
    assert (found.temperature, found.top_k) == (0.5, 7)
    assert found.min_p == pytest.approx(0.04**2)
    # The same tokens stay: their probability is at least min_p times the largest, in logarithms.
    found = await params(served, samplers=["min_p", "temperature"], **ALL | {"temperature": 2})
    assert found.min_p == pytest.approx(0.2)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.7, "top_p": 1, "top_k": 40, "min_p": 0.1},
        {"temperature": 0, "top_p": 0.9, "top_k": 40, "min_p": 0.1},
    ],
)
async def test_samplers_in_llama_cpps_order_are_taken_if_the_engines_equals_it(
    served: Served, fields: dict[str, Any]
) -> None:
    found = await params(served, samplers=FRONT_END, repeat_last_n=64, repeat_penalty=1, **fields)
    assert (found.temperature, found.top_p) == (fields["temperature"], fields["top_p"])


async def test_samplers_without_penalties_need_no_window(served: Served) -> None:
    fields = {"repeat_last_n": 64, "repeat_penalty": 1.1}
    assert (await params(served, samplers=["top_k"], **fields)).repetition_penalty == 1
    assert (await complete(served, samplers=["penalties"], **fields)).status_code == 400


@pytest.mark.parametrize(
    ("samplers", "part"),
    [
        (FRONT_END, "top_p before temperature"),
        (["top_p", "top_k"], "top_p before top_k"),
        (["min_p", "top_p"], "min_p before top_p"),
        (["top_p", "temperature", "penalties"], "top_p before penalties"),
        (["top_k", "penalties"], "top_k before penalties"),
        ("me", "min_p before penalties"),
        (["top_k", "infill"], "'infill'"),
        (["tfs_z"], "'tfs_z'"),
        ("kz", "'z'"),
        (["top_k", "top-k"], "top_k twice"),
        ([1], "list of names"),
        ({"top_k": 1}, "list of names"),
        (7, "list of names"),
        (["dry"] * 40, ""),
    ],
)
async def test_samplers_of_another_distribution_are_refused(
    served: Served, samplers: Any, part: str
) -> None:
    response = await complete(served, samplers=samplers, **ALL)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "samplers"
    assert part in error["message"]
    if "before" in part:
        assert ", ".join(SERVED) in error["message"]
    assert not served.engine.requests


async def test_samplers_with_temperature_zero_keep_penalties_first(served: Served) -> None:
    fields = ALL | {"temperature": 0}
    for samplers in (["top_p", "penalties"], ["temperature", "penalties"]):
        assert (await complete(served, samplers=samplers, **fields)).status_code == 400
    found = await params(served, samplers=["penalties", "min_p", "top_p", "temperature"], **fields)
    assert (found.temperature, found.repetition_penalty) == (0, 1.5)


async def test_samplers_are_listed_in_the_settings(served: Served) -> None:
    body = (await complete(served, samplers="tk")).json()
    assert body["generation_settings"]["samplers"] == ["temperature", "top_k"]
    body = (await complete(served)).json()
    assert body["generation_settings"]["samplers"] == list(SERVED)
    kept = ("penalties", "temperature", "top_k", "top_p", "min_p")
    assert [name for name in SERVED if name in kept] == list(kept)


async def test_samplers_of_infill_are_read_too(served: Served) -> None:
    fields = {"input_prefix": "a", "input_suffix": "b", "samplers": ["infill"]}
    response = await served.http.post("/infill", json=fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "samplers")


def softmax(logits: dict[int, float]) -> dict[int, float]:
    highest = max(logits.values())
    weights = {token: math.exp(value - highest) for token, value in logits.items()}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def chain(
    names: Sequence[str], logits: dict[int, float], values: dict[str, Any]
) -> dict[int, float]:
    """Return the distribution of llama.cpp's chain: each sampler sees what those before it left."""
    for name in names:
        ranked = sorted(logits, key=lambda token: -logits[token])
        probs = softmax(logits)
        match name:
            case "penalties":  # of the tokens 0 to 2
                factor = values["repetition_penalty"]
                for token in logits.keys() & {0, 1, 2}:
                    value = logits[token]
                    value = value / factor if value > 0 else value * factor
                    logits = logits | {token: value - values["presence_penalty"]}
            case "temperature":
                logits = {token: value / values[name] for token, value in logits.items()}
            case "top_k":
                logits = {token: logits[token] for token in ranked[: values[name] or len(ranked)]}
            case "top_p":
                kept, mass = {}, 0.0
                for token in ranked:
                    kept[token] = logits[token]
                    mass += probs[token]
                    if mass >= values[name]:
                        break
                logits = kept
            case "min_p":
                least = values[name] * probs[ranked[0]]
                logits = {token: logits[token] for token in ranked if probs[token] >= least}
            case _:
                field = FIELDS.get(name, name)
                scores = np.array([logits[token] for token in ranked])
                stays = REFERENCES[field](scores, values[field])
                logits = {ranked[place]: scores[place] for place in np.flatnonzero(stays)}
    return softmax(logits)


def equal(one: dict[int, float], other: dict[int, float]) -> bool:
    return one.keys() == other.keys() and all(
        math.isclose(one[token], other[token], rel_tol=1e-9) for token in one
    )


@pytest.mark.parametrize(("temperature", "presence"), [(0.6, 0.0), (0.6, 0.7), (1.7, 0.0)])
@pytest.mark.variants(1)
def test_samplers_that_are_taken_draw_from_llama_cpps_distribution(
    temperature: float, presence: float
) -> None:
    values: dict[str, Any] = {name: some[0] for name, some in VALUES.items()}
    values |= {"temperature": temperature, "top_k": 6, "top_p": 0.8, "min_p": 0.11}
    options = GenerationOptions(
        operation="text_completion",
        model=None,
        sampling={**values, "repetition_penalty": 1.6, "presence_penalty": presence},
    )
    rng = random.Random(5)
    trials = [{token: rng.gauss(0, 1.5) for token in range(12)} for _ in range(20_000)]
    given = values | {"repetition_penalty": 1.6, "presence_penalty": presence}
    taken = refused = 0
    orders: list[Sequence[str]] = [
        names for size in range(4) for names in permutations(SERVED, size)
    ]
    orders += [rng.sample(SERVED, rng.randint(4, len(SERVED))) for _ in range(300)]
    for names in orders:
        try:
            served = dict(with_samplers(options, names, {}).sampling)
        except ApiError:
            # The engine's order of the same samplers is another distribution.
            ordered = [name for name in SERVED if name in names]
            assert any(
                not equal(chain(ordered, logits, given), chain(names, logits, given))
                for logits in trials  # ends at the first one
            ), names
            refused += 1
            continue
        for logits in trials[:20]:
            theirs = chain(names, logits, given)
            assert equal(chain(SERVED, logits, served), theirs), names
        taken += 1
    assert taken > 20
    assert refused > 100
