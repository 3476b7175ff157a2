"""The JSON of a request's waterfall: what GET /ui/api/requests/{id} answers.

Times are milliseconds with three decimals, counted from the request's arrival. Requests that the
reader may not see are one total, without ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from server.glassbox.requests.step_log import GONE, OpenRequest, RecordedRequest
from server.glassbox.requests.step_model import StepModel
from server.glassbox.requests.waterfall import Neighbour, StepShare, Waterfall
from server.telemetry.choice_record import ChoiceRecord

MOST_STEPS = 2048  # in a report
MOST_NEIGHBOURS = 32  # named in a report; the others are one total
MOST_IN_STEP = 4  # neighbours named for one step
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reader:
    """Which requests a reader may see.

    `names` has the recorded x-request-ids by the engine's ids.
    """

    sees_all: bool
    names: Mapping[int, str]

    def sees(self, engine_id: int) -> bool:
        return engine_id != GONE and (self.sees_all or engine_id in self.names)


def running(opened: OpenRequest, now: float) -> Json:
    """Return the entry in the list of a request that has not ended."""
    return {
        "id": opened.request_id,
        "state": "running",
        "age_ms": _ms(now - opened.arrival),
        "wall_ms": None,
    }


def summary(request: RecordedRequest, now: float) -> Json:
    """Return the entry in the list of a request that has ended."""
    choices = request.choices
    return {
        "id": request.opened.request_id,
        "state": "finished" if request.error is None else "aborted",
        "age_ms": _ms(now - request.opened.arrival),
        "wall_ms": _ms(request.ended - request.opened.arrival),
        "error": request.error,
        "prompt_tokens": sum(choice.prompt_tokens for choice in choices),
        "generated_tokens": sum(choice.num_tokens for choice in choices),
    }


def report(
    request: RecordedRequest, waterfall: Waterfall, model: StepModel, reader: Reader
) -> Json:
    """Return the waterfall of a request for one reader."""
    arrival = request.opened.arrival
    return {
        "id": request.opened.request_id,
        "state": "finished" if request.error is None else "aborted",
        "error": request.error,
        "wall_ms": waterfall.wall_us / 1000,
        "stamps": _stamps(request, waterfall),
        "choices": [_choice(choice, arrival) for choice in request.choices],
        "parts": {name: part / 1000 for name, part in waterfall.parts.items()},
        "who": _who(waterfall.neighbours, reader),
        "steps": _steps(request, waterfall, reader),
        "steps_omitted": max(0, len(waterfall.steps) - MOST_STEPS),
        "fit": fit_fields(model),
    }


def fit_fields(model: StepModel) -> Json:
    """Return the step model. `r2` is None if no steps are known."""
    return {
        "steps": model.num_steps,
        "stalls": model.num_stalls,
        "r2": None if model.r2 is None else round(model.r2, 4),
        "base_ms": _ms(model.constant),
        "prefill_us_per_token": round(model.prefill * 1e6, 3),
        "decode_us_per_token": round(model.decode * 1e6, 3),
        "context_ns_per_key": round(model.context * 1e9, 3),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _stamps(request: RecordedRequest, waterfall: Waterfall) -> Json:
    """Return when the request passed each stage, over all choices. None: it did not."""
    arrival, choices = request.opened.arrival, request.choices
    admitted = min([c.admitted for c in choices if c.admitted is not None], default=None)
    first = min([c.first_token for c in choices if c.first_token], default=None)
    last = max([c.last_token for c in choices if c.last_token], default=None)
    text_end = max([c.text_end for c in choices if c.text_end], default=None)
    ready = max([c.admission.images_ready for c in choices if c.admission], default=0.0)
    encode = [c.admission.encode_begin for c in choices if c.admission]
    stamps = {
        "submitted": waterfall.submitted,
        "encode_begin": min([begin for begin in encode if begin], default=None),
        "images_ready": ready or None,
        "admitted": admitted,
        "first_token": first,
        "last_token": last,
        "text_end": text_end,
        "ended": request.ended,
    }
    return {name: None if stamp is None else _ms(stamp - arrival) for name, stamp in stamps.items()}


def _choice(choice: ChoiceRecord, arrival: float) -> Json:
    def since(stamp: float | None) -> float | None:
        return _ms(stamp - arrival) if stamp else None

    return {
        "index": choice.index,
        "engine_id": choice.id,
        "prompt_tokens": choice.prompt_tokens,
        "cached_tokens": choice.cached_tokens,
        "generated_tokens": choice.num_tokens,
        "finish": choice.finish,
        "preemptions": choice.num_preemptions,
        "submitted": since(choice.submitted),
        "admitted": since(choice.admitted),
        "images": _images(choice),
        "prefills": [
            [since(begin), since(end), chunk.start, chunk.count]
            for begin, end, chunk in choice.prefills
        ],
        "first_token": since(choice.first_token),
        "last_token": since(choice.last_token),
        "text_end": since(choice.text_end),
    }


def _images(choice: ChoiceRecord) -> Json | None:
    """Return what the encoder did for the images of a choice; None if it is known to show none.

    `wait_ms` is the time until they were ready, without that of its own units.
    """
    admission = choice.admission
    if admission is None or not admission.images_ready:
        return None
    waited = admission.images_ready - choice.submitted - admission.encode_seconds
    return {
        "encoded": admission.images_encoded,
        "reused": admission.images_reused,
        "units": admission.encode_units,
        "encode_ms": _ms(admission.encode_seconds),
        "wait_ms": _ms(max(waited, 0.0)),
    }


def _who(neighbours: Sequence[Neighbour], reader: Reader) -> list[list[Any]]:
    """Return [engine id, ms, prompt tokens, ms of the queue, decodes, x-request-id] of each.

    The last entry has no ids and is the total of all that are not named.
    """
    named = [neighbour for neighbour in neighbours if reader.sees(neighbour.id)]
    named = named[:MOST_NEIGHBOURS]
    entries: list[list[Any]] = [
        [
            neighbour.id,
            neighbour.others_us / 1000,
            neighbour.prompt_tokens,
            neighbour.queue_us / 1000,
            neighbour.num_decodes,
            reader.names.get(neighbour.id),
        ]
        for neighbour in named
    ]
    shown = {neighbour.id for neighbour in named}
    rest = [neighbour for neighbour in neighbours if neighbour.id not in shown]
    if rest:
        cost = sum(neighbour.others_us for neighbour in rest) / 1000
        queue = sum(neighbour.queue_us for neighbour in rest) / 1000
        decodes = sum(neighbour.num_decodes for neighbour in rest)
        entries.append([None, cost, None, queue, decodes, None])
    return entries


def _steps(request: RecordedRequest, waterfall: Waterfall, reader: Reader) -> list[Json]:
    """Return the first MOST_STEPS steps, each with its largest members."""
    members = waterfall.members
    # Members of a step are neighbours in this order, those that cost the most first.
    order = np.lexsort((-waterfall.costs, members.step))
    rows = np.stack([members.id, members.prefill, members.decode], 1)[order].tolist()
    costs = waterfall.costs[order].tolist()
    starts = np.searchsorted(members.step[order], np.arange(len(waterfall.steps) + 1)).tolist()
    own_ids = frozenset(request.opened.ids)
    entries = []
    for index, share in enumerate(waterfall.steps[:MOST_STEPS]):
        within = slice(starts[index], starts[index + 1])
        entry = _step(share, request.opened.arrival)
        entry |= _members(rows[within], costs[within], own_ids, reader)
        entries.append(entry)
    return entries


def _step(share: StepShare, arrival: float) -> Json:
    return {
        "n": share.step.number,
        "at": _ms(share.begin - arrival),
        "ms": _ms(share.end - share.begin),
        "queue": share.is_queue,
        "base": _ms(share.base),
        "own": _ms(share.own),
        "others": _ms(share.others),
        "waiting": _ms(share.waiting),
        "unexplained": _ms(share.unexplained),
    }


def _members(
    rows: Sequence[Sequence[int]],
    costs: Sequence[float],
    own_ids: frozenset[int],
    reader: Reader,
) -> Json:
    """Return what a step computed: the request's own tokens, and those of others.

    `who` has [engine id, ms by the model, prefill tokens, decodes] of the largest; `more` is the
    total [number of requests, ms, prefill tokens, decodes] of the others.
    """
    own_prefill = own_decodes = 0
    who: list[list[Any]] = []
    more: list[Any] = [0, 0.0, 0, 0]
    for (engine_id, prefill, decodes), cost in zip(rows, costs, strict=True):
        if engine_id in own_ids:
            own_prefill += prefill
            own_decodes += decodes
        elif len(who) < MOST_IN_STEP and reader.sees(engine_id):
            who.append([engine_id, _ms(cost), prefill, decodes])
        else:
            added = (1, _ms(cost), prefill, decodes)
            more = [have + new for have, new in zip(more, added, strict=True)]
    more[1] = round(more[1], 3)
    return {"prefill": own_prefill, "decode": own_decodes, "who": who, "more": more}
