"""Another token for a past answer: what the branch sends, its text, and its own replay."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import playwright.sync_api as playwright
import pytest
import tokenizers

from engine.checkpoint.folder import model_folder
from tests.support.draws import DrawOracle
from tests.support.serve import Server, serving
from tests.ui.checks.chat import answer_of, ask, complete, fill_options
from tests.ui.checks.inspector import check_token
from tests.ui.checks.routes import alter_stream

pytestmark = pytest.mark.ui
SYSTEM = "You stand at the old mill by the river and answer in a few plain words. " * 8
QUESTION = "Hello! Who are you?"
LONGEST = 40
PLAIN: dict[str, Any] = {"temperature": 0.9, "top_p": 1.0, "min_p": 0.0}
# Kept tokens are a part of the branch's prompt, which each of these treats in its own way.
PENALTIES = PLAIN | {
    "presence_penalty": 1.5,
    "frequency_penalty": 0.7,
    "repetition_penalty": 1.3,
    "min_tokens": 30,
}


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    with serving("demo", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def oracle() -> DrawOracle:
    return DrawOracle(model_folder("demo"))


@pytest.fixture
def client(demo: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.base_url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
def chat(open_page: Callable[..., Any], demo: Server) -> Any:
    page = open_page(f"{demo.base_url}/ui/")
    page.wait_for_selector(".welcome")
    page.wait_for_selector("[name=temperature]")
    page.get_by_text("More parameters").click()
    page.get_by_label("System prompt").fill(SYSTEM)
    return page


def sent_by(page: Any) -> list[dict[str, Any]]:
    """The completions requests that the browser sends from now on, seen by its debugger."""
    bodies: list[dict[str, Any]] = []
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")

    def note(event: dict[str, Any]) -> None:
        if event["request"]["url"].endswith("/v1/completions"):
            bodies.append(json.loads(event["request"]["postData"]))

    session.on("Network.requestWillBeSent", note)
    return bodies


def open_inspector(page: Any) -> Any:
    """Open the Inspector of the last answer; return its strip of tokens."""
    page.locator(".message").last.get_by_role("button", name="Why these tokens").click()
    page.wait_for_selector(".ins-table")
    strip = page.get_by_role("listbox")
    strip.focus()
    return strip


def close_inspector(page: Any) -> None:
    page.keyboard.press("Escape")
    playwright.expect(page.locator(".drawer")).to_have_count(0)


def choose_other(page: Any) -> int:
    """Choose the neighbour of the answer's token in the table; return its id."""
    own = selected(page)
    for key in ("ArrowDown", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
        if selected(page) not in (own, END):
            return selected(page)
    raise AssertionError("the token has no neighbours")


END = 2  # <|im_end|>


def selected(page: Any) -> int:
    return int(page.locator("tr:has(input:checked)").get_attribute("data-token"))


def fork_at(page: Any, index: int) -> tuple[int, dict[str, Any]]:
    """Fork the last answer by the keyboard; return the token and the usage of the branch."""
    open_inspector(page)
    for _ in range(index):
        page.keyboard.press("ArrowRight")
    token = choose_other(page)
    streams = alter_stream(page, "**/v1/completions")
    page.keyboard.press("Enter")
    close_inspector(page)
    figures = page.locator(".message").last.locator(".figures")
    playwright.expect(figures).to_contain_text(f"forked at token {index}")
    complete(page)
    page.unroute("**/v1/completions")
    return token, streams[0][-1]["usage"]


def text_of(ids: list[int]) -> str:
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(model_folder("demo")) / "tokenizer.json"))
    text: str = tokenizer.decode(ids)
    return text


def original(client: openai.OpenAI, **params: Any) -> tuple[list[int], list[int]]:
    """The ids of prompt and answer, as the official client gets them."""
    system: Any = {"role": "system", "content": SYSTEM}
    user: Any = {"role": "user", "content": QUESTION}
    named, extra = split(params)
    reply = client.chat.completions.create(
        model="demo", messages=[system, user], max_tokens=LONGEST, **named, extra_body=extra
    ).model_dump()
    return reply["prompt_token_ids"], reply["choices"][0]["token_ids"]


def continued(client: openai.OpenAI, ids: list[int], **params: Any) -> dict[str, Any]:
    """The choice that the official client gets for a prompt of ids."""
    named, extra = split(params)
    reply = client.completions.create(model="demo", prompt=ids, **named, extra_body=extra)
    choice: dict[str, Any] = reply.model_dump()["choices"][0]
    return choice


def split(params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of OpenAI's API, and the others."""
    others = {"repetition_penalty", "min_tokens", "min_p"}
    named = {name: value for name, value in params.items() if name not in others}
    extra = {name: value for name, value in params.items() if name in others}
    return named, {"return_token_ids": True, **extra}


def check_replay(page: Any, oracle: DrawOracle, parts: list[dict[str, Any]]) -> None:
    """The Inspector draws every token again that was drawn, and its figures are the reference's.

    A part has the `prompt` of its request, the `tokens` that follow, and the `params`. The last
    token of all parts but the last one was chosen.
    """
    open_inspector(page)
    length = sum(len(part["tokens"]) for part in parts)
    chosen = len(parts) - 1
    agrees = page.locator(".ins-agrees")
    drawn = length - chosen
    playwright.expect(agrees.locator("strong")).to_have_text(f"replay agrees {drawn}/{drawn}")
    if chosen:
        playwright.expect(agrees).to_contain_text(f"{chosen} chosen by you")
    playwright.expect(page.locator(".ins-strip [role=option]")).to_have_count(length)
    start = 0
    for place, part in enumerate(parts):
        draws = oracle.explain(part["prompt"], part["tokens"], part["params"])
        last = len(draws) - 1
        for index in {0, last // 2, last}:
            page.locator(f"#ins-token-{start + index}").click()
            is_chosen = index == last and place < chosen
            check_token(page, draws[index], part["tokens"][index], is_chosen=is_chosen)
        start += len(draws)
    close_inspector(page)


@pytest.mark.parametrize("params", [PLAIN, PENALTIES], ids=["plain", "penalties"])
def test_fork_sends_the_kept_tokens_and_is_explained(
    chat: Any, client: openai.OpenAI, oracle: DrawOracle, params: dict[str, Any]
) -> None:
    params = params | {"seed": 11}
    fill_options(chat, max_tokens=LONGEST, **params)
    ask(chat, QUESTION)
    bodies = sent_by(chat)
    prompt, tokens = original(client, **params)
    parts = [{"prompt": prompt, "tokens": tokens, "params": params}]
    check_replay(chat, oracle, parts)

    for version, index in ((2, 4), (3, 5)):  # the second fork is at the first token of the branch
        token, usage = fork_at(chat, index)
        kept = [*tokens[:index], token]
        rest = params | {"max_tokens": LONGEST - len(kept)}
        if "min_tokens" in params:
            rest["min_tokens"] = params["min_tokens"] - len(kept)
        body = bodies.pop()
        assert body["prompt"] == prompt + kept
        assert {name: body[name] for name in rest} == rest
        expected = continued(client, prompt + kept, **rest)

        answer = chat.locator(".message").last
        tokens = kept + expected["token_ids"]
        text = text_of(kept) + expected["text"]
        assert answer_of(chat, answer)["tokens"] == tokens
        assert answer_of(chat, answer)["text"] == text
        assert answer.locator(".md").inner_text().split() == text.split()
        playwright.expect(answer.locator(".versions")).to_contain_text(f"{version}/{version}")
        check_cached(answer, usage, len(prompt + kept))

        before = parts[-1]
        begun = len(before["prompt"]) - len(prompt)
        before["tokens"] = kept[begun:]
        parts.append({"prompt": prompt + kept, "tokens": expected["token_ids"], "params": rest})
        check_replay(chat, oracle, parts)


def check_cached(answer: Any, usage: dict[str, Any], prompt_tokens: int) -> None:
    """The figures under a branch are those of its usage: the start of its prompt was cached."""
    found = re.search(r"cached ([\d,]+)/([\d,]+)", answer.locator(".figures").inner_text())
    assert found
    cached, total = (int(text.replace(",", "")) for text in found.groups())
    assert cached == usage["prompt_tokens_details"]["cached_tokens"]
    assert total == usage["prompt_tokens"] == prompt_tokens
    assert cached >= (prompt_tokens - 1) // 64 * 64 > 0


def test_fork_without_max_tokens_may_fill_the_context(chat: Any, client: openai.OpenAI) -> None:
    """The completions route alone would end it after 16 tokens."""
    fill_options(chat, seed=11, temperature=0.9)
    ask(chat, QUESTION)
    bodies = sent_by(chat)
    fork_at(chat, 2)
    [body] = bodies
    assert body["max_tokens"] == 16384 - len(body["prompt"])
    rest = {"seed": 11, "temperature": 0.9, "max_tokens": body["max_tokens"]}
    expected = continued(client, body["prompt"], **rest)
    text = chat.locator(".message").last.locator(".md").inner_text()
    assert text.split() == (text_of(body["prompt"][-3:]) + expected["text"]).split()


def test_fork_to_the_end_token_ends_the_answer(chat: Any) -> None:
    fill_options(chat, seed=11, max_tokens=LONGEST)
    answer = ask(chat, QUESTION)
    tokens = answer_of(chat, chat.locator(".message").last)["tokens"]
    assert tokens[-1] == END
    bodies = sent_by(chat)
    script = "async ([id, token]) => (await import('/ui/chat/answers.js')).fork(id, 3, token)"
    chat.evaluate(script, [answer.get_attribute("data-id"), END])
    branch = chat.locator(".message").last
    playwright.expect(branch.locator(".versions")).to_contain_text("2/2")
    playwright.expect(branch.locator(".figures")).to_contain_text("stop")
    assert branch.locator(".md").inner_text().split() == text_of(tokens[:3]).split()
    playwright.expect(branch.get_by_role("button", name="Why this time")).to_have_count(0)
    assert not bodies
    open_inspector(chat)
    agrees = chat.locator(".ins-agrees strong")
    playwright.expect(agrees).to_have_text("replay agrees 3/3")


def test_fork_sends_no_tools(chat: Any, demo: Server) -> None:
    """The completions route does not know them."""
    fill_options(chat, seed=3, max_tokens=12, tool_choice="none")
    chat.get_by_text("Tools", exact=True).click()
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    chat.get_by_label("List of tools").fill(json.dumps([tool]))
    chat.get_by_label("List of tools").blur()
    ask(chat, QUESTION)
    bodies = sent_by(chat)
    fork_at(chat, 1)
    [body] = bodies
    assert body.keys().isdisjoint({"tools", "tool_choice", "messages"})
    reply = httpx2.post(f"{demo.base_url}/v1/completions", json=body | {"stream": False})
    assert "x-ignored-params" not in reply.headers
