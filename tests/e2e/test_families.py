"""Models with states, latents and layers of several shapes, under random traffic over HTTP.

Every answer equals that of a server without cache, batch and drafts, and greedy ones are those of
transformers. `draw(seed)` returns the same request again.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.golden import Edit, edit_checkpoint, of_transformers
from tests.support.prediction_heads import add_often_right_head
from tests.support.process import ROOT
from tests.support.reference_data import LLAMA, located
from tests.support.serve import Server, complete, serving
from tests.support.thorough import is_thorough

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.usefixtures("one_thread"),
]
VOCAB, END, CONTEXT, BLOCK = 512, 2, 4096, 16
REQUESTS, AT_ONCE = (300 if is_thorough() else 60), 12
# Few blocks and small steps, so that sequences are preempted and prompts are cut.
TIGHT = ("--block-size", BLOCK, "--max-num-batched-tokens", 96, "--max-num-seqs", 10)
PLAIN = ("--no-enable-prefix-caching", "--speculation", "off", "--max-num-seqs", 1)


class Family(NamedTuple):
    """A module of golden tests with a `config`, and what the reference's logits may differ by.

    The differences of transformers between one pass and single tokens are measured: its chunked
    delta rule errs by up to 1e-3 (version 5.24).
    """

    module: str
    close: float
    blocks: int  # of the KV cache: too few for AT_ONCE long sequences
    edit: Edit | None = None  # changes the checkpoint
    flags: tuple[str, ...] = ()


FAMILIES = {
    "qwen3_5": Family("test_qwen3_5", 3e-3, 260),
    "qwen3_5_mtp": Family(
        "test_qwen3_5", 3e-3, 260, add_often_right_head, ("--speculation", "mtp")
    ),
    "lfm2": Family("test_lfm2", 1e-3, 260),
    "granite_hybrid": Family("test_granite_hybrid", 1e-3, 260),
    "gemma4": Family("test_gemma4", 1e-3, 212),
    "deepseek_v3": Family("test_deepseek_v3", 1e-3, 260),
}


class Rig(NamedTuple):
    family: Family
    server: Server
    plain: Server
    reference: Any
    record: Path


@pytest.fixture(scope="module", params=FAMILIES)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    module = import_module(f"tests.engine.models.{family.module}")
    config = module.config(vocab_size=VOCAB, max_position_embeddings=CONTEXT)
    reference = of_transformers(config, folder)
    if family.edit:
        edit_checkpoint(folder, family.edit)
        reference = type(reference).from_pretrained(folder).eval()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(located(LLAMA) / name, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    record = folder / "record.jsonl"
    flags = ("--dtype", "float32", *TIGHT)
    limits = ("--num-gpu-blocks-override", family.blocks)
    with (
        serving(folder, *flags, *limits, *family.flags, "--record", record) as server,
        serving(folder, *flags, *PLAIN) as plain,
    ):
        yield Rig(family, server, plain, reference, record)


def stem(number: int) -> list[int]:
    """Return a long text that prompts begin with; every second one repeats itself."""
    rng = random.Random(f"stem {number}")
    period = 3000 if number % 2 else 25
    words = [rng.randrange(3, VOCAB) for _ in range(period)]
    return words * (3000 // period)


def draw(seed: int) -> dict[str, Any]:
    """Return a random request, which has exactly one correct answer."""
    rng = random.Random(seed)
    length = int(3000 ** rng.uniform(0, 1))
    prompt = stem(rng.randrange(4))[:length] + [rng.randrange(3, VOCAB) for _ in range(3)]
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": rng.choice([1, 5, 24, 40]),
        "temperature": rng.choice([0, 0, 1]),
        "seed": seed,
        "logprobs": 0,
        "return_token_ids": True,
        "ignore_eos": True,
        "stream": rng.random() < 0.5,
    }
    if rng.random() < 0.2:
        body["regex"] = rng.choice(["[a-z ]{9,30}", "(one|two|three hundred)( and more)+", "a{20}"])
        del body["ignore_eos"]
    if not body["stream"]:  # the choices of a whole answer come in order
        body["n"] = rng.choice([1, 1, 2])
    return body


async def abort(server: Server, body: dict[str, Any]) -> None:
    """Begin to stream an answer and leave."""
    async with (
        server.http() as http,
        http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response,
    ):
        async for _ in response.aiter_lines():
            return


async def answers(
    server: Server, bodies: Sequence[dict[str, Any]], at_once: int, aborted: Sequence[int] = ()
) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and logprobs of all requests but the `aborted` ones, which have none.

    Those of several choices follow each other.
    """
    room = asyncio.Semaphore(at_once)

    async def one(number: int) -> tuple[list[int], list[float]]:
        async with room:
            if number in aborted:
                await abort(server, bodies[number])
                return [], []
            async with server.http() as http:
                answer = await complete(http, bodies[number])
        return answer.ids, answer.logprobs

    return await asyncio.gather(*map(one, range(len(bodies))))


def check_greedy(rig: Rig, body: dict[str, Any], ids: list[int]) -> None:
    """Assert that each token is the reference's likeliest, but for its rounding error."""
    prompt = body["prompt"]
    with torch.inference_mode():
        whole = torch.tensor([prompt + ids[:-1]])
        logits = rig.reference(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert bool((chosen >= logits.max(1).values - rig.family.close).all())


async def test_random_traffic_gets_the_answers_of_a_server_without_cache_and_batch(
    rig: Rig,
) -> None:
    bodies = [draw(seed) for seed in range(REQUESTS)]
    aborted = [seed for seed in range(REQUESTS) if seed % 9 == 4]
    found = await answers(rig.server, bodies, AT_ONCE, aborted)
    # Known answers are drafted when they come again, alone. Half of them may not go on as drafted.
    again = []
    for body, (ids, _) in list(zip(bodies, found, strict=True))[: REQUESTS // 3]:
        first = ids[: len(ids) // body.get("n", 1)]
        bias = {str(first[len(first) // 2]): -100} if len(first) > 9 and body["seed"] % 2 else {}
        again.append(body | {"logit_bias": bias})
    bodies += again
    found += await answers(rig.server, again, 1)
    expected = await answers(rig.plain, bodies, 1, aborted)
    for seed, (body, answer, due) in enumerate(zip(bodies, found, expected, strict=True)):
        assert answer == due, f"request {seed}: another answer than without cache and batch"
        is_greedy = not body["temperature"] and "regex" not in body and body.get("n", 1) == 1
        if seed % 6 == 0 and answer[0] and is_greedy:
            check_greedy(rig, body, answer[0])
    assert rig.server.metric("prefix_cache_hits_total") > 0
    if is_thorough():  # few requests may all find room
        assert rig.server.metric("num_preemptions_total") > 0
    drafted = rig.server.metric("spec_decode_num_draft_tokens_total")
    right = rig.server.metric("spec_decode_num_accepted_tokens_total")
    assert 0 < right < drafted
    rig.server.wait_idle()


def test_verify_finds_the_recorded_answers_again(rig: Rig) -> None:
    command = ["verify", rig.record, "--url", rig.server.base_url]
    done = subprocess.run(
        [sys.executable, "-m", "server", *map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
