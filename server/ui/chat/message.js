// One message: its text, its versions, what can be done with it, and under an answer its figures.

import { html, useLayoutEffect, useRef, useState } from "../html.js";
import { Shown } from "../pictures.js";
import { navigate, route } from "../router.js";
import { hello } from "../store.js";
import { duration } from "../text.js";
import { Copy } from "./code.js";
import { Tokens } from "./hover.js";
import { Json, isJson } from "./json.js";
import { Markdown } from "./markdown.js";
import {
  answerTool, canAsk, current, drop, edit, live, regenerate, retry, show, tick,
} from "./state.js";
import { children } from "./tree.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result of a tool" };

export function Message({ node: stored }) {
  const [isEdited, setEdited] = useState(false);
  const isGrowing = Boolean(live.value[stored.id]);
  if (isGrowing) tick.value; // draw again in each frame in which it grew
  const node = isGrowing ? { ...stored } : stored; // parts with the same props are not drawn again
  const save = (text) => {
    const isNew = text !== null && text !== node.content;
    if (isNew && node.role === "user" && !canAsk()) return; // the text stays in its box
    setEdited(false);
    if (isNew) edit(node, text);
  };
  return html`<article class="message" data-role=${node.role} data-id=${node.id}
    aria-label=${NAMES[node.role]} aria-busy=${isGrowing ? "true" : undefined}>
    ${isEdited ? html`<${Editor} text=${node.content} close=${save} />`
      : html`<${Content} node=${node} isGrowing=${isGrowing} />`}
    ${node.error && !isGrowing && html`<${Failure} node=${node} />`}
    ${node.role === "assistant" && html`<${Figures} node=${node} isGrowing=${isGrowing} />`}
    ${!isGrowing && !isEdited && html`<${Actions} node=${node} startEdit=${() => setEdited(true)} />`}
  </article>`;
}

function Content({ node, isGrowing }) {
  if (node.role !== "assistant") return html`<${Said} node=${node} />`;
  const calls = node.toolCalls ?? [];
  const isEmpty = !node.content && !node.reasoning && !calls.length;
  return html`
    ${node.reasoning && html`<${Thoughts} node=${node} isGrowing=${isGrowing} />`}
    ${node.content && html`<${Tokens} node=${node} isGrowing=${isGrowing}>
      ${!isGrowing && isJson(node.content) ? html`<${Json} text=${node.content} />`
        : html`<${Markdown} text=${node.content} grows=${isGrowing} />`}</${Tokens}>`}
    ${calls.map((call) => html`<${ToolCall} key=${call.id} node=${node} call=${call} />`)}
    ${isEmpty && isGrowing && html`<p class="muted" role="status">Waiting for the first token…</p>`}
    ${isEmpty && !isGrowing && !node.error && html`<p class="muted">The answer is empty.</p>`}
  `;
}

function Said({ node: { content, files = [], pictures = [] } }) {
  return html`
    <${Shown} pictures=${pictures} />
    ${files.length > 0 && html`<ul class="chips" aria-label="Files">
      ${files.map(({ name, tokens }) => html`<li class="chip">${name}
        <small class="muted">${count(tokens)} tok</small></li>`)}</ul>`}
    ${content && html`<p class="said">${content}</p>`}`;
}

/** Why an answer failed, what to do, and a button that asks again. */
function Failure({ node }) {
  return html`<div class="failure" role="alert">
    <p class="warn">${node.error}</p>
    ${node.isLost && html`<p class="muted">${node.content && "What was written is kept. "}
      Check that the server runs (<code>penstock ps</code>), and start it again if it does not
      (<code>penstock serve MODEL</code>). Then try again.</p>`}
    <button type="button" disabled=${Object.keys(live.value).length > 0}
      onClick=${() => retry(node)}>Try again</button>
  </div>`;
}

function Thoughts({ node, isGrowing }) {
  const isThinking = isGrowing && !node.content;
  return html`<details class="thoughts">
    <summary>${isThinking ? "Thinking…" : "Thoughts"}</summary>
    <${Markdown} text=${node.reasoning} grows=${isGrowing} />
  </details>`;
}

/** A call of a tool, and the box for its result. */
function ToolCall({ node, call }) {
  const field = useRef(null);
  const results = Object.values(current.value.nodes).filter(({ toolCallId }) => toolCallId === call.id);
  const isGrowing = Boolean(live.value[node.id]);
  const send = (event) => {
    event.preventDefault();
    if (canAsk()) answerTool(node, call, field.current.value);
  };
  return html`<section class="tool-call" aria-label=${`Call of ${call.name}`}>
    <h3>Calls <code>${call.name}</code></h3>
    <pre tabindex="0"><code>${indented(call.args)}</code></pre>
    ${!isGrowing && !results.length && html`<form onSubmit=${send}>
      <textarea class="mono" rows="2" ref=${field} aria-label=${`Result of ${call.name}`}
        placeholder="What the tool returns" />
      <button class="primary">Return this</button>
    </form>`}
  </section>`;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function Editor({ text, close }) {
  const field = useRef(null);
  useLayoutEffect(() => {
    field.current.focus();
    field.current.setSelectionRange(text.length, text.length);
  }, []);
  const onKey = (event) => {
    if (event.key === "Escape") {
      event.preventDefault();
      close(null);
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) close(field.current.value);
  };
  return html`<div class="editor">
    <textarea rows=${Math.min(text.split("\n").length + 1, 16)} ref=${field} onKeyDown=${onKey}
      aria-label="Edit the message">${text}</textarea>
    <button class="primary" type="button" onClick=${() => close(field.current.value)}>Save as a new
      version</button>
    <button type="button" onClick=${() => close(null)}>Cancel</button>
  </div>`;
}

const numbers = new Intl.NumberFormat("en");
const count = (value) => numbers.format(value);
const FINISH = {
  stop: "stop", length: "length: max tokens", tool_calls: "calls tools", stopped: "stopped by you",
};

/** Tokens, rate, time to the first token, queue, cached part of the prompt, and why it ended. */
function Figures({ node, isGrowing }) {
  const facts = [];
  const number = node.usage?.completion_tokens ?? node.tokens?.length ?? 0;
  if (number) facts.push([`${count(number)} tok`, "Tokens of the answer"]);
  if (node.rate) facts.push([`${node.rate.toFixed(node.rate < 10 ? 1 : 0)} tok/s`,
    "Tokens per second after the first one"]);
  if (node.firstTokenMs != null) facts.push([`TTFT ${duration(node.firstTokenMs)}`,
    "Time to the first token, by the engine's clock"]);
  if (node.queueMs != null) facts.push([`queue ${duration(node.queueMs)}`,
    "Time in the queue, part of the time to the first token"]);
  const cached = node.usage?.prompt_tokens_details?.cached_tokens;
  if (cached != null) facts.push([`cached ${count(cached)}/${count(node.usage.prompt_tokens)}`,
    "Tokens of the prompt that were in the KV cache"]);
  if (node.fork) facts.push([`forked at token ${node.fork.index}`, "The tokens before are the other branch's"]);
  if (node.finish && !isGrowing) facts.push([FINISH[node.finish] ?? node.finish, "Why the answer ended"]);
  return html`<p class="figures muted">
    ${facts.map(([text, title], index) => html`${index > 0 && " · "}<span title=${title}>${text}</span>`)}
  </p>`;
}

function Actions({ node, startEdit }) {
  const isAnswer = node.role === "assistant";
  const isBusy = Object.keys(live.value).length > 0;
  const hasLens = hello.value?.ready.max_lens_tokens > 0;
  const openDrawer = (drawer) => {
    navigate(route.value.page, { ...route.value.params, drawer, answer: node.id });
  };
  const remove = () => {
    if (confirm("Delete this message and all that follow it?")) drop(node);
  };
  return html`<div class="actions">
    <${Versions} node=${node} />
    ${isAnswer && node.tokens?.length > 0 && html`
      <button class="quiet strong" type="button" onClick=${() => openDrawer("inspector")}>Why these tokens</button>
      ${node.requestId && html`<button class="quiet strong" type="button"
        onClick=${() => openDrawer("waterfall")}>Why this time</button>`}
      ${hasLens && html`<button class="quiet strong" type="button"
        onClick=${() => navigate("lens", { answer: node.id })}>Inside the model</button>`}`}
    ${isAnswer && html`<button class="quiet" type="button" disabled=${isBusy}
      onClick=${() => regenerate(node)}>Regenerate</button>`}
    <${Copy} text=${node.content} />
    <button class="quiet" type="button" disabled=${isBusy} onClick=${startEdit}>Edit</button>
    <button class="quiet" type="button" disabled=${isBusy} onClick=${remove}>Delete</button>
  </div>`;
}

/** `< 2/3 >`: which of the versions of a message is shown. */
function Versions({ node }) {
  const all = children(current.value, node.parent);
  if (all.length < 2) return null;
  const place = all.findIndex(({ id }) => id === node.id);
  return html`<span class="versions">
    <button class="quiet" type="button" disabled=${place === 0} aria-label="Previous version"
      onClick=${() => show(node, -1)}>‹</button>
    ${place + 1}/${all.length}
    <button class="quiet" type="button" disabled=${place === all.length - 1}
      aria-label="Next version" onClick=${() => show(node, 1)}>›</button>
  </span>`;
}
