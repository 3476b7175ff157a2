// The messages of the chat that are shown.

import { html, useLayoutEffect, useRef, useSignal } from "../html.js";
import { hello } from "../store.js";
import { Message } from "./message.js";
import { current, live, say, setOptions, tick } from "./state.js";
import { shown } from "./tree.js";

const NEAR = 80; // px from the end within which the view follows what is written

export function Thread() {
  const box = useRef(null);
  const follows = useSignal(true);
  const nodes = shown(current.value);
  const isGrowing = nodes.some(({ id }) => live.value[id]);
  useLayoutEffect(() => {
    follows.value = true;
    box.current.scrollTop = box.current.scrollHeight;
  }, [current.value.id, nodes.length]);
  useLayoutEffect(() => {
    if (!isGrowing) return undefined;
    return tick.subscribe(() => {
      if (!follows.peek()) return;
      requestAnimationFrame(() => { box.current.scrollTop = box.current.scrollHeight; });
    });
  }, [isGrowing]);
  const onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    follows.value = scrollHeight - scrollTop - clientHeight < NEAR;
  };
  return html`<div class="thread" ref=${box} onScroll=${onScroll} tabindex="0" role="log"
    aria-label="Messages" aria-live="off">
    ${nodes.length ? nodes.map((node) => html`<${Message} key=${node.id} node=${node} />`)
      : html`<${Welcome} />`}
  </div>`;
}

/** Send a first prompt. Its tools are added to the settings, unless there are some. */
function begin({ prompt, tools }) {
  if (tools && !current.value.options.tools?.trim()) {
    setOptions({ tools: JSON.stringify(tools, null, 2) });
  }
  say(prompt);
}

function Welcome() {
  const { model, starters, has_template: canChat } = hello.value;
  return html`<div class="welcome">
    <h1>Talk to ${model.id}</h1>
    <p class="muted">Every answer can be opened: which tokens were likely, what each filter cut, and
      where its time went. Move over a word of an answer, or use the buttons under it.</p>
    ${!canChat && html`<p class="warn">This model has no chat template, so it was not trained to
      answer messages.</p>`}
    <div class="starters">
      ${starters.map((one) => html`<button type="button" onClick=${() => begin(one)}>
        ${one.prompt.trim()}${one.tools && html` <small class="muted">with a tool</small>`}</button>`)}
    </div>
  </div>`;
}
