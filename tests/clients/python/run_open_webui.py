"""The cells of Open WebUI with its defaults, as a user of its pages in Chromium sees them.

Each message carries 36 tools, about 11,000 tokens, so that the servers need a long context. Open
WebUI also requests a title, tags and suggestions, which are not streamed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from cells import CITY_SCHEMA, QUESTION, check_usage, run, target
from open_webui_page import ChatPage, Connection, add_model, browsing, squeezed, started
from recorder import Exchange, Recorder

TARGET = target()
TOOLS = 36
CALLED = "get_current_timestamp"
TASKS = ("concise title", "broad tags", "useful messages")  # words of their prompts
NO_N = "its pages have no such field"
NO_WHOLE_CALLS = "it runs tools in streamed answers only"
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY_SCHEMA}}

RECORDER = Recorder(TARGET.url)
CONNECTIONS = [
    Connection(RECORDER.url, TARGET.key),
    Connection(TARGET.url, "wrong", "wrong", ("demo",)),
    Connection(TARGET.url, TARGET.limited_key, "limited", ("demo",)),
    Connection(TARGET.short_url, TARGET.key, "short"),
    Connection(TARGET.endless_url, TARGET.key, "endless"),
]


def messages(since: int) -> list[Exchange]:
    """Return the exchanges of the chat itself, without those of tasks."""
    recorded = RECORDER.exchanges[since:]
    return [exchange for exchange in recorded if exchange.body.get("tools")]


def tasks(since: int) -> list[Exchange]:
    recorded = RECORDER.exchanges[since:]
    return [exchange for exchange in recorded if not exchange.body.get("tools")]


def without_calls(body: dict[str, Any]) -> None:
    # The demo model may otherwise call tools until the context is full.
    if body.get("tools"):
        body["tool_choice"] = "none"


def force_call(body: dict[str, Any]) -> None:
    """Make the answer a call of one tool, without arguments."""
    body["tool_choice"] = {"type": "function", "function": {"name": CALLED}}
    body["parallel_tool_calls"] = False
    functions = {tool["function"]["name"]: tool["function"] for tool in body["tools"]}
    # Its schema allows any member, and the demo model writes them until the context is full.
    functions[CALLED]["parameters"]["additionalProperties"] = False


def answered(page: ChatPage, model: str, text: str = QUESTION) -> Exchange:
    """Send a message in a new chat; wait until the page shows the recorded answer."""
    page.begin(model)
    return sent(page, text, turn=0)


def sent(page: ChatPage, text: str, turn: int) -> Exchange:
    since = len(RECORDER.exchanges)
    page.send(text)
    page.wait(lambda: [each for each in messages(since) if each.is_complete], "an answer")
    [exchange] = messages(since)
    assert exchange.status == 200, exchange.answer
    expected = squeezed(exchange.text)
    assert expected, exchange.answer
    page.wait(lambda: squeezed(page.answer(turn)) == expected, f"the answer {expected!r}")
    return exchange


def cells(page: ChatPage) -> dict[str, Any]:
    def chat() -> None:
        """The requests of tasks, which are not streamed, and a chat that is not."""
        RECORDER.change = without_calls
        since = len(RECORDER.exchanges)
        assert not answered(page, "whole").body["stream"]
        page.wait(lambda: len([x for x in tasks(since) if x.is_complete]) == len(TASKS), "tasks")
        for words in TASKS:
            [task] = [x for x in tasks(since) if words in x.body["messages"][0]["content"]]
            assert not task.body["stream"]
            assert task.status == 200, task.answer
            assert task.text, task.answer

    def stream() -> None:
        """Two turns: the second has the first answer in its messages."""
        RECORDER.change = without_calls
        first = answered(page, "demo")
        assert len(first.body["tools"]) == TOOLS, len(first.body["tools"])
        assert len(first.deltas) > 2, first.answer
        second = sent(page, "What is the capital of Japan?", turn=1)
        roles = [message["role"] for message in second.body["messages"]]
        assert roles == ["user", "assistant", "user"], roles
        assert squeezed(second.body["messages"][1]["content"]) == squeezed(first.text)

    def usage() -> None:
        RECORDER.change = without_calls
        [found] = [event["usage"] for event in answered(page, "usage").events if event.get("usage")]
        check_usage(found["prompt_tokens"], found["completion_tokens"])

    def tools_streamed() -> None:
        """The first message calls a tool; Open WebUI runs it and sends the result."""
        since = len(RECORDER.exchanges)

        def change(body: dict[str, Any]) -> None:
            without_calls(body)
            if body.get("tools") and not messages(since):
                force_call(body)

        RECORDER.change = change
        page.begin("demo")
        page.send("What time is it?")
        page.wait(lambda: [each for each in messages(since)[1:] if each.is_complete], "an answer")
        [_, answer] = messages(since)
        assert answer.status == 200, answer.answer
        *_, request, result = answer.body["messages"]
        [call] = request["tool_calls"]
        assert call["function"]["name"] == CALLED, request
        assert json.loads(call["function"]["arguments"]) == {}, request
        assert result["tool_call_id"] == call["id"], result
        assert "current_timestamp" in result["content"], result
        page.wait(lambda: squeezed(answer.text) in squeezed(page.answer()), "the answer")

    def json_schema() -> None:
        RECORDER.change = without_calls
        text = answered(page, "city").text
        assert list(json.loads(text)) == ["city"], text

    def bad_request() -> None:
        """36 tools do not fit into a context of 1,024 tokens."""
        page.begin("short.demo")
        page.send(QUESTION)
        page.wait_answer("maximum context length is 1024 tokens")

    def wrong_key() -> None:
        page.begin("wrong.demo")
        page.send(QUESTION)
        page.wait_answer("The API key is missing or invalid")

    def rate_limit() -> None:
        """The title takes the one request of the minute, or the first message does."""
        page.begin("limited.demo")
        page.send(QUESTION)
        page.wait(page.answer, "an answer or an error")
        page.send(QUESTION)
        page.wait_answer("has reached its limit of 1 requests per minute", turn=1)

    def abort() -> None:
        began(page)
        page.stop()
        TARGET.check_aborted()

    def stream_error() -> None:
        began(page)
        TARGET.kill_engine()
        page.wait_answer("engine")

    return dict(locals())


def began(page: ChatPage) -> None:
    """Send a message to the model that does not stop; wait until its text in the page grows."""
    page.begin("endless.demo")
    page.send(QUESTION)
    first = page.wait(page.answer, "text")
    page.wait(lambda: len(page.answer()) > len(first), "more text")


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="open-webui-"))
    try:
        with started(folder, CONNECTIONS) as url, browsing(url, TARGET.browser, folder) as page:
            add_model(url, "whole", "demo", stream_response=False)
            add_model(url, "usage", "demo", usage=True)
            add_model(url, "city", "demo", custom_params={"response_format": FORMAT})
            run(cells(page), several=NO_N, tools=NO_WHOLE_CALLS)
    finally:
        RECORDER.close()
        shutil.rmtree(folder, ignore_errors=True)


main()
