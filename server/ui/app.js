// Start: read the server's facts, then show the shell.
import { html, render } from "./html.js";
import { get } from "./api.js";
import { hello, problem } from "./store.js";
import { Shell } from "./shell.js";

const REFRESH_MS = 2000;

async function refresh() {
  try {
    hello.value = await get("ui/api/hello");
    problem.value = "";
  } catch (error) {
    problem.value = error.message;
  }
}

/** Ask again while the window is visible; a hidden one costs the server nothing. */
async function keepFresh() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((done) => setTimeout(done, REFRESH_MS));
  }
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${Shell} refresh=${refresh} />`, root);
keepFresh();
