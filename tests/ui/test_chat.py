"""The chat in a real browser, with the demo model behind it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import playwright.sync_api as playwright
import pytest
import tokenizers

from engine.checkpoint.folder import model_folder
from engine.protocol.sampling_parameters import PARAMETERS
from tests.support.serve import Server
from tests.ui.checks.chat import (
    ask,
    check_reply,
    check_strip,
    check_times,
    check_usage,
    complete,
    figure,
    fill_options,
)
from tests.ui.checks.routes import alter_stream

pytestmark = pytest.mark.ui
UI = {"x-penstock-ui": "1"}


@pytest.fixture
def chat(open_page: Callable[..., Any], demo: Server) -> Any:
    page = open_page(f"{demo.base_url}/ui/")
    page.wait_for_selector(".welcome")
    page.wait_for_selector("[name=temperature]")
    return page


def sent_by(page: Any) -> list[dict[str, Any]]:
    """The bodies of the requests to /v1 that the page sends from now on."""
    bodies: list[dict[str, Any]] = []

    def note(request: Any) -> None:
        if "/v1/" in request.url and request.method == "POST":
            bodies.append(json.loads(request.post_data))

    page.on("request", note)
    return bodies


def test_answer_is_that_of_the_api_with_the_parameters_that_differ(chat: Any, demo: Server) -> None:
    bodies = sent_by(chat)
    fill_options(chat, seed=7, max_tokens=24, temperature=0.9)
    answer = ask(chat, "Hello! Who are you?")
    [body] = bodies
    assert body["messages"] == [{"role": "user", "content": "Hello! Who are you?"}]
    assert {"seed": 7, "max_tokens": 24, "temperature": 0.9}.items() <= body.items()
    assert body.keys().isdisjoint({"top_p", "top_k", "tools", "response_format"})
    named = {"seed": 7, "max_tokens": 24, "temperature": 0.9}
    messages: Any = body["messages"]
    own = {"min_p": 0.05}  # Penstock's: the demo gives the temperature and top_p
    assert own.items() <= body.items()
    with openai.OpenAI(base_url=f"{demo.base_url}/v1", api_key="none") as client:
        reply = client.chat.completions.create(
            model="demo", messages=messages, extra_body=own | {"return_token_ids": True}, **named
        ).model_dump()
    check_reply(chat, answer, reply)
    tokenizer = tokenizers.Tokenizer.from_file(str(model_folder("demo") / "tokenizer.json"))
    ids = reply["choices"][0]["token_ids"]
    check_strip(chat, answer, [tokenizer.decode([one], skip_special_tokens=False) for one in ids])


def test_figures_are_those_of_the_engine(chat: Any, demo: Server) -> None:
    streams = alter_stream(chat, "**/v1/chat/completions")
    with chat.expect_response("**/v1/chat/completions") as sent:
        answer = ask(chat, "What is a river?")
    events = streams[0]
    check_times(answer, [event["timings"] for event in events if "timings" in event][-1])
    check_usage(answer, events[-1]["usage"])
    request_id = sent.value.headers["x-request-id"]
    report = httpx2.get(f"{demo.base_url}/ui/api/requests/{request_id}", headers=UI).json()
    stamps = report["stamps"]
    queue = float(figure(answer, r"queue ([\d.]+) ms"))
    assert queue == pytest.approx(stamps["admitted"] - stamps["submitted"], abs=0.6)


def test_regenerate_edit_and_branches(chat: Any) -> None:
    fill_options(chat, max_tokens=8)
    first = ask(chat, "Hello!").locator(".md").inner_text()
    chat.get_by_role("button", name="Regenerate").click()
    playwright.expect(chat.locator(".versions")).to_contain_text("2/2")
    second = complete(chat).locator(".md").inner_text()
    chat.get_by_role("button", name="Previous version").click()
    playwright.expect(chat.locator(".md").last).to_have_text(first)
    chat.get_by_role("button", name="Next version").click()
    playwright.expect(chat.locator(".md").last).to_have_text(second)

    question = chat.locator(".message").first
    question.hover()
    question.get_by_role("button", name="Edit").click()
    chat.get_by_role("textbox", name="Edit the message").fill("Good evening!")
    chat.get_by_role("button", name="Save as a new version").click()
    playwright.expect(question.locator(".said")).to_have_text("Good evening!")
    complete(chat)
    playwright.expect(question.locator(".versions")).to_contain_text("2/2")
    question.hover()
    question.get_by_role("button", name="Previous version").click()
    playwright.expect(question.locator(".said")).to_have_text("Hello!")
    playwright.expect(chat.locator(".md").last).to_have_text(second)


def test_stop_keeps_what_was_written_and_aborts_the_request(chat: Any, demo: Server) -> None:
    fill_options(chat, max_tokens=900)
    field = chat.locator("[name=ignore_eos]")
    chat.get_by_text("More parameters").click()
    field.select_option("true")
    chat.get_by_role("textbox", name="Message").fill("Tell me a story.")
    chat.keyboard.press("Enter")
    chat.wait_for_selector("[aria-busy] .md")
    chat.keyboard.press("Escape")
    answer = chat.locator(".message").last
    playwright.expect(answer.locator(".figures")).to_contain_text("stopped by you")
    assert answer.locator(".md").inner_text()
    demo.wait_idle()


def test_every_declared_parameter_has_a_field_and_is_sent(chat: Any) -> None:
    bodies = sent_by(chat)
    chat.get_by_text("More parameters").click()
    given = {name: min(1, each.most) for name, each in PARAMETERS.items()}
    fill_options(chat, **given, max_tokens=4)
    ask(chat, "Hello!")
    assert {name: bodies[0][name] for name in given} == given
    field = chat.locator("[name=typical_p]")
    assert field.get_attribute("title") == PARAMETERS["typical_p"].meaning
    fill_options(chat, typical_p=1.5)
    playwright.expect(chat.locator("label", has=field)).to_contain_text("From 0 to 1")


def test_system_prompt_and_schema_are_sent(chat: Any) -> None:
    bodies = sent_by(chat)
    chat.get_by_label("System prompt").fill("You are a river.")
    chat.get_by_text("JSON schema of the answer").click()
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    chat.get_by_label("JSON schema", exact=True).fill(json.dumps(schema))
    chat.get_by_label("JSON schema", exact=True).blur()
    answer = ask(chat, "How many?")
    assert bodies[0]["messages"][0] == {"role": "system", "content": "You are a river."}
    assert bodies[0]["response_format"]["json_schema"]["schema"] == schema
    text = answer.locator(".md code").inner_text()
    assert isinstance(json.loads(text)["n"], int)


def test_tool_call_is_shown_and_answered_by_hand(chat: Any) -> None:
    bodies = sent_by(chat)
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo"]}},
                "required": ["city"],
            },
        },
    }
    chat.get_by_text("Tools", exact=True).click()
    chat.get_by_label("List of tools").fill(json.dumps([weather]))
    chat.get_by_label("List of tools").blur()
    chat.get_by_text("More parameters").click()
    fill_options(chat, tool_choice="required")
    ask(chat, "How is the weather in Oslo?")
    call = chat.get_by_role("region", name="Call of get_weather").first
    playwright.expect(call.locator("pre")).to_contain_text('"city": "Oslo"')
    calls = chat.locator(".tool-call").count()
    fill_options(chat, tool_choice="none")
    for place in range(calls):
        box = chat.locator(".tool-call").nth(place)
        box.get_by_role("textbox").fill('{"degrees": 7}')
        box.get_by_role("button", name="Return this").click()
    complete(chat)
    last = bodies[-1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant"] + ["tool"] * calls
    assert last[2]["content"] == '{"degrees": 7}'
    assert last[2]["tool_call_id"] == last[1]["tool_calls"][0]["id"]


def test_chats_survive_a_reload_and_can_be_searched_and_deleted(chat: Any) -> None:
    fill_options(chat, max_tokens=8)
    text = ask(chat, "Hello!").locator(".md").inner_text()
    chat.get_by_role("button", name="New chat").click()
    ask(chat, "What is a lake?")
    chat.reload()
    entries = chat.locator(".chat-entry")
    playwright.expect(entries).to_have_text(["What is a lake?", "Hello!"])
    chat.get_by_role("searchbox", name="Search chats").fill("HELLO")
    playwright.expect(entries).to_have_text(["Hello!"])
    entries.first.click()
    playwright.expect(chat.locator(".md").last).to_have_text(text)
    chat.on("dialog", lambda dialog: dialog.accept())
    chat.get_by_role("button", name="Delete Hello!").click()
    playwright.expect(entries).to_have_count(0)
    chat.get_by_role("searchbox", name="Search chats").fill("")
    playwright.expect(entries).to_have_text(["What is a lake?"])


def test_export_and_import_restore_the_chat(
    chat: Any, open_page: Callable[..., Any], demo: Server, tmp_path: Path
) -> None:
    fill_options(chat, max_tokens=8)
    text = ask(chat, "Hello!").locator(".md").inner_text()
    with chat.expect_download() as download:
        chat.get_by_role("button", name="Export all").click()
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    other = open_page(f"{demo.base_url}/ui/")
    other.wait_for_selector(".welcome")
    other.get_by_label("File of chats").set_input_files(file)
    other.locator(".chat-entry").click()
    playwright.expect(other.locator(".md")).to_have_text(text)

    for content, problem in (
        ("{", "not JSON"),
        ("{}", "no chats"),
        (file.read_text().replace('"role": "user"', '"rule": "user"'), "broken"),
    ):
        file.write_text(content)
        other.get_by_label("File of chats").set_input_files(file)
        playwright.expect(other.get_by_role("alert")).to_contain_text(problem)


def test_errors_of_the_server_are_shown(chat: Any) -> None:
    chat.locator("summary", has_text="Template options").click()
    chat.get_by_label("Template options").fill('{"messages": 1}')
    chat.get_by_label("Template options").blur()
    chat.get_by_role("textbox", name="Message").fill("Hello!")
    chat.keyboard.press("Enter")
    playwright.expect(chat.get_by_role("alert")).to_contain_text("chat_template_kwargs")
    [fault] = chat.faults  # the browser's own line about the 400
    assert "400" in fault
    chat.faults.clear()


def test_parameter_outside_its_range_is_refused_in_place(chat: Any) -> None:
    fill_options(chat, seed=2**60 + 1)
    playwright.expect(chat.get_by_role("status").filter(has_text="53 bits")).to_be_visible()
    fill_options(chat, seed="", temperature=3)
    playwright.expect(chat.get_by_role("status").filter(has_text="From 0 to 2")).to_be_visible()
    bodies = sent_by(chat)
    message = chat.get_by_role("textbox", name="Message")
    message.fill("Hello!")
    chat.keyboard.press("Enter")
    playwright.expect(chat.get_by_role("alert")).to_contain_text("temperature")
    playwright.expect(message).to_have_value("Hello!")
    assert not bodies
    fill_options(chat, temperature="", max_tokens=4)
    ask(chat, "Hello!")
    assert "temperature" not in bodies[0]


@pytest.mark.parametrize("label", ["JSON schema", "List of tools", "Template options"])
def test_message_stays_in_its_box_while_a_setting_is_not_json(chat: Any, label: str) -> None:
    chat.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    chat.get_by_label(label, exact=True).fill("{")
    message = chat.get_by_role("textbox", name="Message")
    message.fill("Hello!")
    chat.keyboard.press("Enter")
    playwright.expect(chat.get_by_role("alert")).to_contain_text("must be JSON")
    playwright.expect(message).to_have_value("Hello!")
    playwright.expect(chat.locator(".message")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_page_fits_a_phone(open_page: Callable[..., Any], demo: Server, scheme: str) -> None:
    viewport = {"width": 375, "height": 700}
    page = open_page(f"{demo.base_url}/ui/", viewport=viewport, color_scheme=scheme)
    page.get_by_role("textbox", name="Message").fill("Hello! " * 30)
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".message")).to_have_count(2)
    complete(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    page.get_by_role("button", name="Settings").click()
    playwright.expect(page.get_by_label("System prompt")).to_be_visible()
