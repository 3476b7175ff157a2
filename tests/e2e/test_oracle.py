"""Random requests that combine all parameters; every answer is compared with the oracle's.

A failure names its case. `draw(case)` in this file returns the same request again.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from tests.support.oracle import CLOSE, Body, Expected, Oracle
from tests.support.reference_data import GPT2, LLAMA, located
from tests.support.serve import Server, serving

pytestmark = pytest.mark.usefixtures("one_thread")

CASES, AT_ONCE, LONGEST = 24, 12, 128
TEMPLATE = "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
BLOCK = 16
TIGHT = ("--block-size", BLOCK, "--num-gpu-blocks-override", 18)
SETUPS = {
    "cached": (LLAMA, *TIGHT, "--max-num-batched-tokens", 40),
    "uncached": (GPT2, *TIGHT, "--no-enable-prefix-caching", "--max-num-seqs", 9),
}
WORDS = ["Once", "upon", "a", "time", "Lily", "saw", "the", "big", "red", "ball", "and", "said"]
ODD = ["é", "日本", "🙂", "\u202e", "e\u0301", "\x00", "\n", "  ", "</s>", "<unk>", "\u2028", "ß"]
BLOCKS = [list(range(start, start + BLOCK)) for start in (300, 333, 366)]
OPTIONS: dict[str, list[Any]] = {
    "n": [1, 2, 3],
    "top_k": [-1, 0, 1, 2, 50, 256, 300, 511, 1000],
    "top_p": [0.01, 0.5, 0.9, 0.99, 1],
    "min_p": [0.01, 0.3, 1],
    "presence_penalty": [-2, -0.5, 0.5, 2],
    "frequency_penalty": [-2, -0.5, 0.5, 2],
    "repetition_penalty": [0.1, 0.8, 1.3, 10],
    "ignore_eos": [True, False],
    "min_tokens": [0, 1, 3, 8],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False, True],
    "priority": [-1, 0, 3],
    "cache_salt": ["x", "y"],
}


@dataclass(frozen=True)
class Rig:
    server: Server
    oracle: Oracle


@pytest.fixture(scope="module", params=["cached", pytest.param("uncached", marks=pytest.mark.slow)])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    name, *flags = SETUPS[request.param]
    folder = located(str(name))
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    flags += ["--dtype", "float32", "--max-model-len", LONGEST, "--chat-template", template]
    with serving(folder, *flags) as server:
        yield Rig(server, Oracle(folder))


@dataclass
class Reply:
    """One choice, from a whole response or assembled from chunks."""

    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    scores: list[Body | None] | None = None  # prompt_logprobs

    def take(self, choice: Body) -> None:
        assert self.finish is None, "a choice continues after its finish_reason"
        message = choice.get("message") or choice.get("delta") or choice
        self.prompt = choice.get("prompt_token_ids", self.prompt)
        self.ids += choice.get("token_ids", [])
        self.text += message.get("content") or message.get("text") or ""
        self.finish = choice["finish_reason"]
        self.scores = choice.get("prompt_logprobs")
        for name, values in (choice["logprobs"] or {}).items():
            self.logprobs.setdefault(name, []).extend(values or [])


@dataclass
class Answer:
    choices: dict[int, Reply] = field(default_factory=dict)
    usage: Body = field(default_factory=dict)
    # A chat has a single prompt, so it reports these for the whole answer.
    prompt: list[int] = field(default_factory=list)
    scores: list[Body | None] | None = None
    streamed: bool = False

    def take(self, part: Body) -> None:
        for choice in part["choices"]:
            self.choices.setdefault(choice["index"], Reply()).take(choice)
        self.prompt = part.get("prompt_token_ids", self.prompt)
        self.scores = part.get("prompt_logprobs")
        self.usage = part.get("usage") or self.usage


async def ask(http: httpx2.AsyncClient, body: Body, *, stream: bool) -> Answer:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = body | {"return_token_ids": True, "stream": stream}
    answer = Answer(streamed=stream)
    if not stream:
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        answer.take(response.json())
        return answer
    body = body | {"prompt_logprobs": None}  # not supported in streams
    response = await http.post(path, json=body | {"stream_options": {"include_usage": True}})
    assert response.status_code == 200, response.text
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    for event in events:
        answer.take(json.loads(event.removeprefix("data: ")))
    return answer


def text(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return "".join(rng.choices(ODD + WORDS, k=rng.randint(1, 8)))
    return " ".join(["Once upon a time"] * rng.randint(0, 4) + rng.choices(WORDS, k=3))


def draw(case: str) -> Body:
    """Return a random request; equal cases give equal requests.

    Every request is greedy or seeded, so that it has exactly one correct answer.
    """
    rng = random.Random(case)
    body: Body = {"temperature": rng.choice([0, 0.3, 1, 2]), "seed": rng.getrandbits(64) - 2**63}
    body |= {"max_tokens": rng.choice([1, 2, 9, 20, 45])} if rng.random() < 0.9 else {}
    body |= {name: rng.choice(of) for name, of in OPTIONS.items() if rng.random() < 0.2}
    body["min_tokens"] = min(body.get("min_tokens", 0), body.get("max_tokens", 8))
    ids = [1, 2, *rng.sample(range(3, 259), 6), *rng.sample(range(259, 512), 4)]
    if rng.random() < 0.3:  # byte tokens, which may form characters or invalid UTF-8
        body["logit_bias"] = {str(i): rng.choice([-100, 0.5, 15, 20]) for i in ids}
    if rng.random() < 0.4:
        body["stop_token_ids"] = rng.sample(range(259, 512), 9)
    logprobs = rng.choice([None, None, 0, 1, 5])
    if rng.random() < 0.2:
        body["prompt_logprobs"] = rng.choice([0, 1, 3])
    if rng.random() < 0.3:
        roles = rng.choices(["system", "user", "assistant"], k=2)
        body["messages"] = [{"role": role, "content": text(rng)} for role in roles]
        return body | ({} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs})
    if rng.random() < 0.6:
        body["prompt"] = rng.choice([text(rng), [text(rng) for _ in range(2)]])
    else:
        body["prompt"] = [rng.randrange(512) for _ in range(rng.choice([1, 20, LONGEST - 1]))]
        if rng.random() < 0.5:  # blocks that are in the prefix cache, but after other blocks
            body["prompt"] = [i for _ in range(rng.randint(1, 4)) for i in rng.choice(BLOCKS)]
        if len(body["prompt"]) > LONGEST // 2:  # leaves no room for a longer answer
            body |= {"max_tokens": 1, "min_tokens": 0}
    if rng.random() < 0.4:
        body["echo"] = True
    return body | {"logprobs": logprobs}


def edges(case: str, body: Body, oracle: Oracle, ids: list[int]) -> Body:
    """Return the request with stop strings from its answer `ids`.

    `min_tokens` and `max_tokens` are close to the ends of the stop strings.
    """
    rng = random.Random(f"{case} edges")
    whole, at = oracle.continuation(ids, body), rng.randrange(len(ids))
    middle = len(oracle.certain(ids[:at], body))
    cuts = [(max(0, middle - rng.randint(0, 3)), middle + rng.randint(0, 4)) for _ in range(3)]
    stops = {whole[a:b] + rng.choice(["", "", "q"]) for a, b in cuts} - {""}
    most = min(max(1, at + rng.choice([0, 1, 2, 9])), body.get("max_tokens", LONGEST))
    least = min(max(0, at + rng.choice([-9, -1, 0, 0, 1])), most)
    return body | {"stop": sorted(stops) or ["q"], "min_tokens": least, "max_tokens": most}


def prompts_of(body: Body, oracle: Oracle) -> list[tuple[list[int], str]]:
    """Return (token ids, echoed text) of each prompt."""
    if "messages" in body:
        chat = "".join(f"{m['role']}: {m['content']}\n" for m in body["messages"])
        return [(oracle.encode(f"<s>{chat}", special=False), "")]
    given = body["prompt"]
    many = given if isinstance(given[0], str) and isinstance(given, list) else [given]
    ids = [oracle.encode(p) if isinstance(p, str) else p for p in many]
    texts = [p if isinstance(p, str) else oracle.decode(p, body) for p in many]
    return [(i, t if body.get("echo") else "") for i, t in zip(ids, texts, strict=True)]


def check_prompt(
    body: Body, oracle: Oracle, prompt: list[int], echo: str, reply: Reply, scores: Any
) -> None:
    """Check the prompt logprobs (`scores`) and the logprobs of an echoed prompt.

    Streams have no prompt logprobs. The entries of the echo are removed from `reply`.
    """
    due = oracle.logits(prompt[:1], prompt[1:]).log_softmax(-1) if len(prompt) > 1 else []
    wanted = body.get("prompt_logprobs", -1)
    if scores is not None:
        assert scores[0] is None
        for row, token, entries in zip(due, prompt[1:], scores[1:], strict=True):
            best = row.topk(wanted).indices.tolist() if ordered(row, wanted) else []
            assert best == [] or entries.keys() == {str(i) for i in (token, *best)}
            for name, entry in entries.items():
                assert entry["logprob"] == pytest.approx(row[int(name)].item(), abs=1e-3)
                assert entry["decoded_token"] == oracle.token(int(name)).decode(errors="replace")
            for rank, i in enumerate(best, 1):
                assert entries[str(i)]["rank"] == rank
    if not body.get("echo") or body.get("logprobs") is None:
        return
    told = {name: values[: len(prompt)] for name, values in reply.logprobs.items()}
    for name, values in reply.logprobs.items():
        reply.logprobs[name] = values[len(prompt) :]
    reply.logprobs["text_offset"] = [at - len(echo) for at in reply.logprobs["text_offset"]]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    places = told["text_offset"]
    assert places == sorted(places)
    assert places[0] == 0
    assert places[-1] <= len(echo)
    for token, start, end in zip(prompt, places, [*places[1:], len(echo)], strict=True):
        piece = oracle.token(token).decode(errors="replace")
        if start < end and "\ufffd" not in piece:
            assert echo[start:end].strip(" ") == piece.strip(" ")
    rest = Reply(ids=prompt[1:], logprobs={name: values[1:] for name, values in told.items()})
    offsets = told["text_offset"][1:]
    completion_scores(oracle, rest, due, body["logprobs"], Expected("", "", offsets))


Readings = dict[tuple[Any, ...], tuple[Expected, Any]]  # key: index, prompt and answer


def check(body: Body, answer: Answer, oracle: Oracle, readings: Readings) -> None:
    prompts, n = prompts_of(body, oracle), body.get("n", 1)
    assert sorted(answer.choices) == list(range(len(prompts) * n))
    for index, reply in answer.choices.items():
        prompt, echo = prompts[index // n]
        assert (reply.prompt or answer.prompt) == prompt
        left = LONGEST - len(prompt)
        limit = min(left, body.get("max_tokens", left if "messages" in body else 16))
        key = index, *prompt, None, *reply.ids
        if key not in readings:  # a streamed answer with the same tokens needs no second reading
            readings[key] = oracle.read(body, prompt, reply.ids, index % n, limit)
        expected, logprobs = readings[key]
        assert (reply.finish, reply.text) == (expected.finish, echo + expected.text)
        whole = answer.scores or reply.scores
        assert bool(whole) == ("prompt_logprobs" in body and not answer.streamed)
        check_prompt(body, oracle, prompt, echo, reply, whole)
        scores = chat_scores if "messages" in body else completion_scores
        wanted = body.get("top_logprobs", body.get("logprobs"))
        assert (wanted is None) <= (not reply.logprobs)
        if wanted is not None and expected.offsets:
            scores(oracle, reply, logprobs, wanted, expected)
    lengths = [len(prompt) for prompt, _ in prompts]
    generated = sum(len(reply.ids) for reply in answer.choices.values())
    assert answer.usage["prompt_tokens"] == sum(lengths)
    assert answer.usage["completion_tokens"] == generated
    assert answer.usage["total_tokens"] == sum(lengths) + generated
    assert 0 <= answer.usage["prompt_tokens_details"]["cached_tokens"] <= sum(lengths)


def ordered(row: Any, wanted: int) -> bool:
    """Whether rounding cannot change the `wanted` most likely tokens or their order."""
    return bool((-row.topk(wanted + 1).values.diff() > CLOSE).all())


def completion_scores(
    oracle: Oracle, reply: Reply, logprobs: Any, wanted: int, expected: Expected
) -> None:
    assert reply.logprobs["text_offset"] == expected.offsets
    for place, entry in enumerate(reply.logprobs["top_logprobs"]):
        row, token = logprobs[place], reply.ids[place]
        name = oracle.token(token).decode(errors="replace")
        assert reply.logprobs["tokens"][place] == name
        assert reply.logprobs["token_logprobs"][place] == pytest.approx(row[token].item(), abs=1e-3)
        if not ordered(row, wanted):
            continue
        named: dict[str, float] = {}
        for i in [*row.topk(wanted).indices.tolist(), token]:
            named.setdefault(oracle.token(i).decode(errors="replace"), row[i].item())
        assert entry == pytest.approx(named, abs=1e-3)


def chat_scores(
    oracle: Oracle, reply: Reply, logprobs: Any, wanted: int, expected: Expected
) -> None:
    assert len(reply.logprobs["content"]) == len(expected.offsets)
    for place, entry in enumerate(reply.logprobs["content"]):
        row, token = logprobs[place], reply.ids[place]
        best = row.topk(wanted).indices.tolist() if ordered(row, wanted) else []
        for given, i in zip([entry, *entry["top_logprobs"]], [token, *best], strict=bool(best)):
            assert bytes(given["bytes"]) == oracle.token(i)
            assert given["token"] == oracle.token(i).decode(errors="replace")
            assert given["logprob"] == pytest.approx(row[i].item(), abs=1e-3)


async def test_random_requests_get_the_answers_of_the_oracle(rig: Rig) -> None:
    room, seen = asyncio.Semaphore(AT_ONCE), Counter[str]()
    counters = ("prompt_tokens_total", "generation_tokens_total")
    before = {name: rig.server.metric(name) for name in counters}

    async def one(http: httpx2.AsyncClient, case: str) -> None:
        body = draw(case)
        for again in (False, True):
            async with room:
                answers = [await ask(http, body, stream=stream) for stream in (False, True)]
            readings: Readings = {}
            for answer in answers:
                try:
                    check(body, answer, rig.oracle, readings)
                except AssertionError as error:
                    raise AssertionError(f"case {case!r}, with edges {again}: {body}") from error
                seen["prompt_tokens_total"] += body.get("n", 1) * answer.usage["prompt_tokens"]
                seen["generation_tokens_total"] += answer.usage["completion_tokens"]
                seen.update(f"{reply.finish}" for reply in answer.choices.values())
            whole, streamed = (answer.choices for answer in answers)
            assert {i: (r.text, r.ids) for i, r in whole.items()} == {
                i: (r.text, r.ids) for i, r in streamed.items()
            }
            body = edges(case, body, rig.oracle, whole[0].ids)

    async with rig.server.http() as http:
        await asyncio.gather(*(one(http, f"{case}") for case in range(CASES)))
    assert min(seen["stop"], seen["length"]) > CASES
    for name, value in before.items():
        assert rig.server.metric(name) - value == seen[name]
    assert rig.server.metric("num_preemptions_total") > 0
    rig.server.wait_idle()
