"""Chat: own sampling values, kept settings, formulas, JSON, files, and a lost server."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import playwright.sync_api as playwright
import pytest

from engine.checkpoint.folder import model_folder
from tests.support.serve import Server, serving
from tests.ui.checks.chat import ask, fill_options

pytestmark = pytest.mark.ui
ROUTE = "**/v1/chat/completions"


@pytest.fixture
def chat(open_page: Callable[..., Any], demo: Server) -> Any:
    page = open_page(f"{demo.base_url}/ui/")
    page.wait_for_selector("[name=temperature]")
    return page


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo without sampling values and first prompts."""
    folder = tmp_path_factory.mktemp("bare") / "bare"
    shutil.copytree(model_folder("demo"), folder)
    settings = folder / "generation_config.json"
    given = json.loads(settings.read_text())
    del given["temperature"], given["top_p"]
    settings.write_text(json.dumps(given))
    (folder / "starters.json").unlink()
    with serving(folder) as server:
        yield server


def answers(page: Any, text: str) -> Any:
    """Let the server answer `text`; return the answer's message."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
    body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    page.route(ROUTE, lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.get_by_role("textbox", name="Message").fill("Go on.")
    page.keyboard.press("Enter")
    answer = page.locator(".message[data-role=assistant]").last
    playwright.expect(answer.locator(".figures")).to_contain_text("stop")
    return answer


def body_of_first_prompt(page: Any) -> dict[str, Any]:
    with page.expect_request(ROUTE) as sent:
        page.locator(".starters button").first.click()
    body: dict[str, Any] = json.loads(sent.value.post_data)
    return body


def test_own_values_are_shown_and_sent_if_the_model_gives_none(
    open_page: Callable[..., Any], bare: Server
) -> None:
    page = open_page(f"{bare.base_url}/ui/")
    page.wait_for_selector("[name=temperature]")
    own = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
    for name, value in own.items():
        assert page.locator(f"[name={name}]").get_attribute("placeholder") == str(value)
        field = page.locator("label", has=page.locator(f"[name={name}]"))
        playwright.expect(field).to_contain_text("the model gives none")
    page.locator("[name=top_p]").fill("0.5")
    body = body_of_first_prompt(page)
    assert body.items() >= (own | {"top_p": 0.5}).items()
    assert body["messages"][0]["content"] == "What is the capital of France?"


def test_values_of_the_model_are_left_to_the_server(chat: Any) -> None:
    assert chat.locator("[name=temperature]").get_attribute("placeholder") == "0.6"
    body = body_of_first_prompt(chat)
    assert body.keys().isdisjoint({"temperature", "top_p"})
    assert body["min_p"] == 0.05
    assert body["messages"][0]["content"] == "What is the capital of Sweden?"
    playwright.expect(chat.locator(".md")).to_contain_text("Stockholm")


def test_first_prompt_with_a_tool_sends_it(chat: Any) -> None:
    with chat.expect_request(ROUTE) as sent:
        chat.get_by_role("button", name="with a tool").click()
    [tool] = json.loads(sent.value.post_data)["tools"]
    assert tool["function"]["name"] == "get_weather"


def test_tool_of_a_first_prompt_ends_with_its_chat(chat: Any, demo: Server) -> None:
    tools = chat.get_by_label("List of tools")
    chat.get_by_role("button", name="with a tool").click()
    playwright.expect(tools).to_have_value(re.compile("get_weather"))
    playwright.expect(chat.locator(".figures")).to_contain_text("tok/s")
    fill_options(chat, max_tokens=4)
    chat.get_by_role("button", name="New chat").click()
    playwright.expect(tools).to_have_value("")
    playwright.expect(chat.locator("[name=max_tokens]")).to_have_value("4")
    chat.goto(f"{demo.base_url}/ui/")
    chat.reload()
    playwright.expect(chat.locator("[name=max_tokens]")).to_have_value("4")
    playwright.expect(tools).to_have_value("")


def test_colour_of_tokens_outlives_a_reload(chat: Any) -> None:
    colour = chat.get_by_label("Colour tokens by")
    colour.select_option("bits")
    chat.reload()
    playwright.expect(colour).to_have_value("bits")


def test_settings_outlive_a_reload_until_they_are_reset(chat: Any, demo: Server) -> None:
    chat.get_by_label("System prompt").fill("You are a river.")
    chat.locator("[name=temperature]").fill("0.3")
    chat.goto(f"{demo.base_url}/ui/")
    chat.reload()
    system = chat.get_by_label("System prompt")
    playwright.expect(system).to_have_value("You are a river.")
    playwright.expect(chat.locator("[name=temperature]")).to_have_value("0.3")
    chat.get_by_role("button", name="Reset all settings").click()
    playwright.expect(system).to_have_value("")
    chat.reload()
    playwright.expect(chat.locator("[name=temperature]")).to_have_value("")
    playwright.expect(chat.get_by_label("System prompt")).to_have_value("")


def test_number_can_be_typed_digit_by_digit(chat: Any) -> None:
    field = chat.locator("[name=temperature]")
    field.press_sequentially("0.05")
    playwright.expect(field).to_have_value("0.05")
    field.blur()
    playwright.expect(field).to_have_value("0.05")


@pytest.mark.parametrize(
    ("text", "count", "blocks"),
    [
        ("So $a^2 + b^2 = c^2$ holds.", 1, 0),
        (r"With \\(x_1\\) and \\(x_2\\).".replace("\\\\", "\\"), 2, 0),
        ("Before\n\n$$\n\\int_0^1 x\\,dx\n$$\n\nafter", 1, 1),
        ("Before \\[ \\frac{1}{2} \\] after", 1, 1),
        ("It costs $5, and then $7.", 0, 0),
        ("`$a$` and\n\n```\n$$b$$\n```", 0, 0),
        ("$\\undefined{$ stays as it is", 0, 0),
    ],
)
def test_formulas_become_mathml(chat: Any, text: str, count: int, blocks: int) -> None:
    answer = answers(chat, text)
    playwright.expect(answer.locator(".md math")).to_have_count(count)
    playwright.expect(answer.locator("math[display=block], math.tml-display")).to_have_count(blocks)
    if not count:
        chat.wait_for_timeout(300)  # a formula would be there by now
        assert answer.locator("math").count() == 0


def test_json_is_shown_as_indented_code_with_its_own_digits(chat: Any) -> None:
    text = '{"a": [1.50, {"b": null}], "e": {}, "n": 12345678901234567890, "s": "x, [y]"}'
    answer = answers(chat, text)
    shown = answer.locator("figure.code code").inner_text()
    assert shown.splitlines()[:3] == ["{", '  "a": [', "    1.50,"]
    assert '"n": 12345678901234567890' in shown
    assert json.loads(shown) == json.loads(text)
    chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer.locator("figcaption").get_by_role("button", name="Copy").click()
    assert chat.evaluate("navigator.clipboard.readText()") == shown


@pytest.mark.parametrize("text", ["[see here", "42", '{"a": 1} and more'])
def test_other_answers_are_not_shown_as_json(chat: Any, text: str) -> None:
    playwright.expect(answers(chat, text).locator(".md")).to_have_text(text)


def attach(page: Any, name: str, content: bytes) -> None:
    file = {"name": name, "mimeType": "application/octet-stream", "buffer": content}
    page.get_by_label("Files", exact=True).set_input_files([file])


def test_text_file_is_a_chip_and_is_sent_with_its_name(chat: Any) -> None:
    attach(chat, "notes.txt", "Schöne Grüße\n".encode())
    chips = chat.get_by_role("list", name="Attached files")
    playwright.expect(chips).to_contain_text("notes.txt")
    with chat.expect_request(ROUTE) as sent:
        ask(chat, "What is in it?")
    [message] = json.loads(sent.value.post_data)["messages"]
    assert message["content"] == "File notes.txt:\n```\nSchöne Grüße\n```\n\nWhat is in it?"
    playwright.expect(chips).to_have_count(0)
    playwright.expect(chat.locator(".message .chip")).to_contain_text("notes.txt")


def test_dropped_file_can_be_removed(chat: Any) -> None:
    chat.evaluate(
        """() => {
            const data = new DataTransfer();
            data.items.add(new File(["Some text"], "dropped.md"));
            const options = { dataTransfer: data, bubbles: true, cancelable: true };
            const event = new DragEvent("drop", options);
            document.querySelector(".composer").dispatchEvent(event);
        }"""
    )
    chips = chat.get_by_role("list", name="Attached files")
    playwright.expect(chips).to_contain_text("dropped.md")
    chat.get_by_role("button", name="Remove dropped.md").click()
    playwright.expect(chips).to_have_count(0)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"word " * 20_000, "has 20,00. tokens. This model's context has 16,384"),
        (b"word " * 100_000, "has more than 16,384 tokens"),
        (b"\x89PNG\xff", "not a text file"),
        (b"a\0b", "not a text file"),
        (b" \n", "is empty"),
    ],
)
def test_file_that_cannot_be_sent_is_refused(chat: Any, content: bytes, problem: str) -> None:
    attach(chat, "odd.txt", content)
    notice = chat.locator(".chat-notice")
    playwright.expect(notice).to_contain_text("odd.txt")
    playwright.expect(notice).to_have_text(re.compile(problem))
    playwright.expect(chat.locator(".chip")).to_have_count(0)


def test_lost_server_says_what_to_do_and_can_be_tried_again(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    with serving("demo") as server:
        page = open_page(f"{server.base_url}/ui/")
        page.wait_for_selector("[name=temperature]")
        page.get_by_text("More parameters").click()
        page.locator("[name=ignore_eos]").select_option("true")
        fill_options(page, max_tokens=3000)
        page.get_by_role("textbox", name="Message").fill("Tell me a story.")
        page.keyboard.press("Enter")
        page.wait_for_selector("[aria-busy] .md")
        server.process.kill()
        failure = page.locator(".failure")
        playwright.expect(failure).to_contain_text("The connection to the server was lost.")
        playwright.expect(failure).to_contain_text("penstock serve")
        assert page.locator(".message .md").last.inner_text(), "what was written is kept"
        page.get_by_role("button", name="Try again").click()
        playwright.expect(page.locator(".versions")).to_contain_text("2/2")
        playwright.expect(failure).to_contain_text("The server cannot be reached.")
        page.route(
            ROUTE,
            lambda route: route.fulfill(
                content_type="text/event-stream",
                body='data: {"choices": [{"index": 0, "delta": {"content": "Back."}, '
                '"finish_reason": "stop"}]}\n\ndata: [DONE]\n\n',
            ),
        )
        page.get_by_role("button", name="Try again").click()
        playwright.expect(page.locator(".md").last).to_have_text("Back.")
        playwright.expect(page.locator(".versions")).to_contain_text("2/2")
        page.faults.clear()  # the browser's own lines about the lost server


def test_comparison_starts_from_the_page(open_page: Callable[..., Any], demo: Server) -> None:
    page = open_page(f"{demo.base_url}/ui/#/compare")
    page.get_by_label("Prompts, one a line").fill("What is the capital of Sweden?\nSpell garden.")
    page.get_by_label("Second system prompt").fill("Answer in Swedish.")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_role("button", name="2. Spell garden.").click()
    playwright.expect(page.locator(".cmp-answers article")).to_have_count(2)
    playwright.expect(page.locator(".cmp-answers h2").last).to_contain_text("Answer in Swedish.")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save").click()
    document = json.loads(Path(download.value.path()).read_text())
    assert [entry["prompt"] for entry in document["prompts"]] == [
        "What is the capital of Sweden?",
        "Spell garden.",
    ]


def test_model_page_has_the_formats_on_disk_and_in_memory(
    open_page: Callable[..., Any], demo: Server
) -> None:
    page = open_page(f"{demo.base_url}/ui/#/model")
    weights = page.locator(".md-weights")
    playwright.expect(weights).to_contain_text("On disk: 5.8 MB, BF16 38 tensors", timeout=30_000)
    playwright.expect(weights).to_contain_text("In memory:")
