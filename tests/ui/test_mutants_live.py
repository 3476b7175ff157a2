"""As test_mutants.py, for the engine's live view, prompts, the model and streams of the chat."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest
import tokenizers

from engine.checkpoint.folder import model_folder
from tests.support.process import eventually
from tests.support.serve import Server, serving
from tests.ui.checks import chat, engine, model, prompt
from tests.ui.checks.mutants import UNCHANGED, Change, Changed, add, changes, verify
from tests.ui.checks.routes import alter_json, alter_stream, alter_watch
from tests.ui.checks.watcher import watching
from tests.ui.pages import tab

pytestmark = [pytest.mark.ui, pytest.mark.slow]
FOLDER = model_folder("demo")


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    with serving("demo", "--num-gpu-blocks-override", 40) as server:
        yield server


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    with tab(browser) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


# The live view. The functions change the first event that they fit. A change after which the number
# of blocks differs from the engine's is no mutant: the page notices it and asks for a snapshot.
ONCE = "const once = (found) => found && !window.isChanged && (window.isChanged = true);"
WATCH: dict[str, str] = {
    "owner of a block": """(event) => once(event[0] === "take" && event[4].length)
        && (event[4][0] = (event[4][0] % 40) + 1)""",
    "cached block": """(event) => once(event[0] === "find") && event[1].pop()""",
}
STEP = """(name, { steps = [] }) => { for (const step of steps) {
    step[2] += 100;
    window.isChanged = true;
} }"""


@pytest.fixture
def traffic(demo: Server) -> Iterator[Callable[[], None]]:
    """A function that begins four requests, which run on until the test ends."""
    stop = threading.Event()

    def client(number: int) -> None:
        prompt = [9 + place % 50 for place in range(130)]
        body = {"prompt": [*prompt, number], "max_tokens": 800, "ignore_eos": True, "stream": True}
        while not stop.is_set():
            with httpx2.stream("POST", f"{demo.base_url}/v1/completions", json=body) as response:
                for _ in response.iter_bytes():
                    if stop.is_set():
                        break

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]

    def begin() -> None:
        for thread in threads:
            thread.start()
        eventually(lambda: demo.metric("num_requests_running") == 4, "four requests run")

    yield begin
    stop.set()
    for thread in threads:
        if thread.ident is not None:  # it was started
            thread.join()
    demo.wait_idle()


def open_engine(page: Any, demo: Server, **params: str) -> None:
    query = "&".join(f"{name}={value}" for name, value in params.items())
    page.goto(f"{demo.base_url}/ui/#/engine?{query}")
    page.wait_for_selector(".en-stats")


@changes([*WATCH, "owner in blocks"])
def test_owner_of_a_block(page: Any, demo: Server, traffic: Callable[[], None], name: str) -> None:
    change = None
    if name in WATCH:
        each = f"for (const event of document.kv ?? []) ({WATCH[name]})(event);"
        alter_watch(page, f"(() => {{ {ONCE} return (name, document) => {{ {each} }}; }})()")
        change = Changed(lambda _: None, count=1)  # the script makes it
    elif name != UNCHANGED:
        change = Changed(move_owner)
        alter_json(page, "**/ui/api/blocks", change)
    with watching(demo) as watcher:
        open_engine(page, demo)
        traffic()
        wait_for_change(page, is_changed=name in WATCH)
        engine.pause(page)
        verify(lambda: engine.check_map(page, watcher, 40), change)


def wait_for_change(page: Any, *, is_changed: bool) -> None:
    """Wait until an event was changed, if one should be, and the page has taken it."""
    if is_changed:
        page.wait_for_function("() => window.isChanged")
    page.wait_for_timeout(300)


def move_owner(document: Any) -> None:
    table = document["requests"][0]["tables"][0]
    table[-1] = table[-1] % 40 + 1


@changes(["time of a step"])
def test_step_of_the_engine(
    page: Any, demo: Server, traffic: Callable[[], None], name: str
) -> None:
    change = None
    if name != UNCHANGED:
        alter_watch(page, STEP)
        change = Changed(lambda _: None, count=1)  # the script makes it
    with watching(demo) as watcher:
        open_engine(page, demo, steps="table")
        traffic()
        page.get_by_role("region", name="Last steps").wait_for()
        wait_for_change(page, is_changed=name != UNCHANGED)
        engine.pause(page)
        verify(lambda: engine.check_steps(page, watcher), change)


# Prompts.
LONG = "The river runs past the old mill and the three boats, " * 12
SENT = "The river\nruns past 7 mills."
PROMPT: dict[str, Change] = {
    "token id": add("ids", 3, by=1),
    "offset": add("offsets", 3, by=1),
    "text of a token": lambda answer: answer["pieces"].__setitem__(2, "x"),
}


@changes(["cached tokens"])
def test_cached_tokens_of_a_prompt(page: Any, demo: Server, name: str) -> None:
    messages = [{"role": "user", "content": LONG}, {"role": "user", "content": "Hello"}]
    prompt.send(demo, messages)
    change = None
    if name != UNCHANGED:
        change = Changed(add("cached_tokens", by=-64))
        alter_json(page, "**/ui/api/prompt", change)
    verify(lambda: prompt.check_cached(page, demo, messages), change)


@changes(PROMPT)
def test_token_of_a_prompt(page: Any, demo: Server, tokenizer: Any, name: str) -> None:
    change = None
    if name != UNCHANGED:
        change = Changed(PROMPT[name])
        alter_json(page, "**/ui/api/prompt", change)
    prompt.show(page, demo, text=SENT)
    ids = tokenizer.encode(SENT).ids
    verify(lambda: prompt.check_tokens(page, ids, [tokenizer.decode([i]) for i in ids]), change)


# The model.
def add_to_box(box: str) -> Change:
    def change(document: Any) -> None:
        [found] = [one for one in document["boxes"] if one["name"] == box]
        found["parameters"] += 1

    return change


MODEL: dict[str, Change] = {
    "parameters": add("parameters", by=1),
    "parameters of a norm": add_to_box("norm"),
    "parameters of a layer": add_to_box("blocks.0.mlp.up"),
}


@changes(MODEL)
def test_figure_of_the_model(page: Any, demo: Server, name: str) -> None:
    change = None
    if name != UNCHANGED:
        change = Changed(MODEL[name])
        alter_json(page, "**/ui/api/model", change)
    page.goto(f"{demo.base_url}/ui/#/model")
    page.wait_for_selector(".md-flow", timeout=60_000)
    verify(lambda: model.check_parameters(page, FOLDER), change)


# Answers of the chat.
QUESTION = "Hello! Who are you?"
NAMED: dict[str, Any] = {"seed": 11, "max_tokens": 12, "temperature": 0.9}


def of_event(change: Callable[[Any], None], place: int = 3) -> Change:
    """Return a change of an event of a stream that has a token."""
    return lambda events: change([one for one in events if tokens_of(one)][place])


def tokens_of(event: Any) -> Any:
    return event["choices"] and event["choices"][0].get("token_ids")


STREAM: dict[str, Change] = {
    "token id": of_event(add("choices", 0, "token_ids", 0, by=1)),
    "text": of_event(lambda event: event["choices"][0]["delta"].update(content=" x")),
    "prompt id": lambda events: add("prompt_token_ids", 3, by=1)(events[0]),
    "usage: tokens": lambda events: add("usage", "completion_tokens", by=1)(events[-1]),
    "usage: prompt": lambda events: add("usage", "prompt_tokens", by=1)(events[-1]),
    "usage: cached": lambda events: add("usage", "prompt_tokens_details", "cached_tokens", by=1)(
        events[-1]
    ),
    "rate": lambda events: [
        add("timings", "predicted_per_second", by=500)(one) for one in events if "timings" in one
    ],
}
STAMPS: dict[str, Change] = {
    "first token": add("stamps", "first_token", by=200),
    "admitted": add("stamps", "admitted", by=50),
}


@pytest.fixture(scope="module")
def reply(demo: Server) -> dict[str, Any]:
    """The reply to the official client."""
    messages: Any = [{"role": "user", "content": QUESTION}]
    with openai.OpenAI(base_url=f"{demo.base_url}/v1", api_key="none") as client:
        return client.chat.completions.create(
            model="demo", messages=messages, extra_body={"return_token_ids": True}, **NAMED
        ).model_dump()


@changes([*STREAM, *STAMPS])
def test_figure_of_an_answer(
    page: Any, demo: Server, reply: dict[str, Any], tokenizer: Any, name: str
) -> None:
    change = None
    if name != UNCHANGED:
        change = Changed(STREAM.get(name) or STAMPS[name])
    if change is not None and name in STAMPS:
        alter_json(page, "**/ui/api/requests/*", change)
    altered = change if change is not None and name in STREAM else (lambda events: None)
    streams = alter_stream(page, "**/v1/chat/completions", altered)
    page.goto(f"{demo.base_url}/ui/")
    page.wait_for_selector("[name=temperature]")
    chat.fill_options(page, **NAMED)
    answer = chat.ask(page, QUESTION)
    ids = reply["choices"][0]["token_ids"]

    def check() -> None:
        chat.check_reply(page, answer, reply)
        chat.check_usage(answer, streams[0][-1]["usage"])
        timings = [event["timings"] for event in streams[0] if "timings" in event]
        chat.check_times(answer, timings[-1])
        texts = [tokenizer.decode([one], skip_special_tokens=False) for one in ids]
        chat.check_strip(page, answer, texts)

    verify(check, change)
