// Switch heads or layers off, and draw the answer again with the same dice.

import { emptyAnswer, stream } from "../chat/stream.js";
import { post } from "../api.js";
import { html, useEffect, useRef, useState } from "../html.js";
import { hello } from "../store.js";
import { visible } from "../text.js";
import { drawFields } from "./explain.js";

const ROOM = 64; // tokens beyond the answer's own, because another answer may be longer
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** The part of the page; nothing for a model whose parts cannot be switched off. */
export function SwitchOff({ answer }) {
  const sizes = hello.value?.ready.ablatable_heads ?? [];
  const [off, setOff] = useState(new Set()); // "layer" or "layer.head"
  const [drawn, setDrawn] = useState(null); // {tokens, pieces, finish, error, off}
  const running = useRef(null);
  useEffect(() => () => running.current?.abort(), []);
  if (!sizes.length) return null;

  const toggle = (name) => {
    const next = new Set(off);
    if (!next.delete(name)) next.add(name);
    setOff(next);
  };
  const draw = async () => {
    running.current?.abort();
    const stop = new AbortController();
    running.current = stop;
    const result = emptyAnswer(`ui-off-${Date.now()}`, {});
    const note = () => stop.signal.aborted || setDrawn({ ...result, off: label(off), isRunning: true });
    note();
    await stream("ui/api/ablate", bodyOf(answer, off), result, stop.signal, note);
    if (stop.signal.aborted) return;
    const tokens = result.tokens.length ? result.tokens : [];
    const pieces = tokens.length ? await piecesOf(tokens) : [];
    if (!stop.signal.aborted) setDrawn({ ...result, pieces, off: label(off) });
  };
  return html`<section class="ins-try" aria-label="Switch parts of the model off">
    <h3>Switch off</h3>
    <p class="muted">A head adds nothing to the stream, a layer neither its attention nor its MLP.
      The dice stay the same.</p>
    <${Parts} sizes=${sizes} off=${off} toggle=${toggle} />
    <div class="ins-actions">
      <button type="button" class="primary" onClick=${draw}>Draw again</button>
      <button type="button" disabled=${!off.size} onClick=${() => setOff(new Set())}>All on</button>
      <span class="muted" role="status">${label(off)}</span>
    </div>
    ${drawn && html`<${Drawn} answer=${answer} drawn=${drawn} />`}
  </section>`;
}

/** A grid of switches: a row for each layer, which one tab stop reaches and arrows move in. */
function Parts({ sizes, off, toggle }) {
  const [at, setAt] = useState([0, 0]); // row and column; column 0 is the layer
  const box = useRef(null);
  const move = (event) => {
    const by = MOVES[event.key];
    if (!by) return;
    event.preventDefault();
    const row = Math.max(0, Math.min(sizes.length - 1, at[0] + by[0]));
    const column = Math.max(0, Math.min(sizes[row], at[1] + by[1]));
    setAt([row, column]);
    box.current.querySelector(`[data-at="${row} ${column}"]`).focus();
  };
  const part = (row, column) => {
    const name = column ? `${row}.${column - 1}` : `${row}`;
    const isOff = off.has(name) || off.has(`${row}`);
    const text = column ? `H${column - 1}` : `L${row}`;
    return html`<button type="button" key=${column} data-at=${`${row} ${column}`}
      class=${isOff ? "ins-off" : ""} aria-pressed=${off.has(name) ? "true" : "false"}
      aria-label=${column ? `layer ${row}, head ${column - 1}, off` : `layer ${row}, off`}
      tabindex=${row === at[0] && column === at[1] ? 0 : -1}
      onClick=${() => { setAt([row, column]); toggle(name); }}>${text}</button>`;
  };
  return html`<div class="ins-parts" role="group" aria-label="Layers and heads" ref=${box}
    onKeyDown=${move}>
    ${sizes.map((heads, row) => html`<div key=${row}>
      ${Array.from({ length: heads + 1 }, (_, column) => part(row, column))}
    </div>`)}
  </div>`;
}

/** The new answer: tokens as before are muted, and the first other one is marked. */
function Drawn({ answer, drawn }) {
  if (drawn.error) return html`<p role="alert" class="warn">${drawn.error}</p>`;
  const before = answer.tokens.slice(lastPart(answer).start);
  const same = drawn.tokens.findIndex((token, at) => token !== before[at]);
  const first = same < 0 ? drawn.tokens.length : same;
  const isSame = first === before.length && drawn.tokens.length === before.length;
  const line = isSame
    ? `The same ${before.length} tokens.`
    : `The first ${first} of ${before.length} tokens are the same.`;
  const pieces = drawn.pieces ?? [];
  return html`<div class="ins-drawn">
    <p role="status">${drawn.isRunning ? "Drawing…" : line}
      <span class="muted"> ${drawn.off}</span></p>
    <p class="ins-answer">${pieces.length
      ? html`<span class="muted">${pieces.slice(0, first).join("")}</span>${first < pieces.length
        && html`<mark title="the first other token">${visible(pieces[first])}</mark>`}${
          pieces.slice(first + 1).join("")}`
      : drawn.content}</p>
  </div>`;
}

async function piecesOf(tokens) {
  try {
    return (await post("detokenize", { tokens, return_texts: true })).texts;
  } catch {
    return [];
  }
}

const lastPart = (answer) => (answer.parts ?? [{ start: 0, params: answer.params }]).at(-1);

function partsOff(off) {
  const names = [...off].map((name) => name.split(".").map(Number));
  return {
    layers: names.filter(({ length }) => length === 1).map(([layer]) => layer).sort((a, b) => a - b),
    heads: names.filter(({ length }) => length === 2).sort((a, b) => a[0] - b[0] || a[1] - b[1]),
  };
}

/** What is off, in words. */
function label(off) {
  const { layers, heads } = partsOff(off);
  const shown = [...layers.map((layer) => `L${layer}`), ...heads.map(([l, h]) => `L${l} H${h}`)];
  if (!shown.length) return "nothing is off";
  const rest = shown.length - 8;
  return `off: ${shown.slice(0, 8).join(", ")}${rest > 0 ? ` and ${rest} more` : ""}`;
}

/** The request: what the answer's last part was drawn from, with its seed and settings. */
function bodyOf(answer, off) {
  const { start, params } = lastPart(answer);
  const { ready, model } = hello.value;
  const used = answer.prompt.length + start;
  const longest = answer.tokens.length - start + ROOM;
  return {
    model: params?.model ?? model.id,
    prompt: [...answer.prompt, ...answer.tokens.slice(0, start)],
    ...drawFields(params),
    ...(params?.stop ? { stop: params.stop } : {}),
    max_tokens: Math.max(1, Math.min(longest, ready.max_model_len - used, limitOf(params))),
    off: partsOff(off),
  };
}

/** The request's own limit of tokens. */
const limitOf = (params) => params?.max_completion_tokens ?? params?.max_tokens ?? Infinity;
