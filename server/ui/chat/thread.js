// The messages of the chat that are shown.

import { html, useLayoutEffect, useRef, useSignal } from "../html.js";
import { hello } from "../store.js";
import { Message } from "./message.js";
import { current, lendTools, say } from "./state.js";
import { shown } from "./tree.js";

const NEAR = 80; // px from the end within which the view follows what is written

export function Thread() {
  const box = useRef(null);
  const follows = useSignal(true);
  const lastTop = useRef(0);
  const nodes = shown(current.value);
  useLayoutEffect(() => {
    follows.value = true;
    box.current.scrollTop = box.current.scrollHeight;
  }, [current.value.id, nodes.length]);
  useLayoutEffect(() => {
    // Also behind the end of an answer, which adds its buttons and the reason of a failure.
    const toEnd = () => {
      if (box.current && follows.peek()) box.current.scrollTop = box.current.scrollHeight;
    };
    const observer = new ResizeObserver(toEnd);
    observer.observe(box.current.lastElementChild);
    return () => observer.disconnect();
  }, [current.value.id, nodes.at(-1)?.id]);
  const onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    // What was written since the last frame is no reason to stop; the reader's way up is.
    if (scrollHeight - scrollTop - clientHeight < NEAR) follows.value = true;
    else if (scrollTop < lastTop.current) follows.value = false;
    lastTop.current = scrollTop;
  };
  const stay = () => { follows.value = false; }; // a part that is opened does not move
  return html`<div class="thread" ref=${box} onScroll=${onScroll}
    onPointerDown=${stay} onKeyDown=${stay} tabindex="0" role="log"
    aria-label="Messages" aria-live="off">
    ${nodes.length ? nodes.map((node) => html`<${Message} key=${node.id} node=${node} />`)
      : html`<${Welcome} />`}
  </div>`;
}

/** Send a first prompt. Its tools are those of this chat alone, unless there are some. */
function begin({ prompt, tools }) {
  if (tools) lendTools(JSON.stringify(tools, null, 2));
  say(prompt);
}

function Welcome() {
  const canHover = matchMedia("(hover: hover)").matches;
  const { model, starters, has_template: canChat } = hello.value;
  return html`<div class="welcome">
    <h1>Talk to ${model.id}</h1>
    <p class="muted">Every answer can be opened: which tokens were likely, what each filter cut, and
      where its time went. ${canHover ? "Move over a word of an answer, or use" : "Use"} the buttons under
      ${canHover ? "it" : "an answer"}.</p>
    ${!canChat && html`<p class="warn">This model has no chat template, so it was not trained to
      answer messages.</p>`}
    <div class="starters">
      ${starters.map((one) => html`<button type="button" onClick=${() => begin(one)}>
        ${one.prompt.trim()}${one.tools && html` <small class="muted">with a tool</small>`}</button>`)}
    </div>
  </div>`;
}
