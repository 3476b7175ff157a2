// Tokens inside rendered markdown: hover one for its candidates, or colour all by surprise.

import { effect, html, signal, useEffect, useRef, useState } from "../html.js";
import { navigate, route } from "../router.js";
import { hello } from "../store.js";
import { percent, visible } from "../text.js";
import { piecesOf } from "./state.js";

/** How answers are coloured: "none" or "bits". Kept over a reload. */
export const colouring = signal(localStorage.getItem("penstock.colouring") === "bits" ? "bits" : "none");

effect(() => localStorage.setItem("penstock.colouring", colouring.value));

const REST_MS = 150; // the mouse rests this long before candidates are asked for
const SHOWN = 5;
const LEVELS = [0.5, 1, 2, 4, 8]; // bits; the classes are surprise-0 to surprise-5

/** The tokens of an answer's content as `[begin, end]` in it, null for those outside. */
async function spansOf(node) {
  const pieces = await piecesOf(node);
  const all = pieces.join("");
  const thoughts = node.reasoning ? all.indexOf(node.reasoning) + node.reasoning.length : 0;
  const start = Math.max(all.indexOf(node.content, Math.max(thoughts, 0)), 0);
  let place = -start;
  return pieces.map((piece) => {
    const begin = place;
    place += piece.length;
    return place > 0 && begin < node.content.length ? [Math.max(begin, 0), place] : null;
  });
}

/** The place in the source of a point of the page, or null. */
function placeAt(x, y) {
  const caret = document.caretPositionFromPoint
    ? document.caretPositionFromPoint(x, y)
    : asPosition(document.caretRangeFromPoint(x, y));
  const node = caret?.offsetNode;
  const leaf = node?.parentElement?.closest("[data-at]");
  if (!leaf || node.nodeType !== Node.TEXT_NODE) return null;
  const before = document.createRange();
  before.setStart(leaf, 0);
  before.setEnd(node, caret.offset);
  return Number(leaf.dataset.at) + before.toString().length;
}

function asPosition(range) {
  return range && { offsetNode: range.startContainer, offset: range.startOffset };
}

/** The ranges of the page that show the source from `begin` to `end`. */
function rangesOf(root, [begin, end]) {
  const found = [];
  for (const leaf of root.querySelectorAll("[data-at]")) {
    const at = Number(leaf.dataset.at);
    if (at >= end || at + leaf.textContent.length <= begin) continue;
    const walker = document.createTreeWalker(leaf, NodeFilter.SHOW_TEXT);
    let place = at;
    for (let text = walker.nextNode(); text; text = walker.nextNode()) {
      const [from, to] = [Math.max(begin - place, 0), Math.min(end - place, text.length)];
      if (from < to) {
        const range = document.createRange();
        range.setStart(text, from);
        range.setEnd(text, to);
        found.push(range);
      }
      place += text.length;
    }
  }
  return found;
}

/** Mark ranges by a name that ::highlight() of the style sheet knows. */
function mark(name, ranges) {
  if (!globalThis.CSS?.highlights) return;
  if (ranges.length) CSS.highlights.set(name, new Highlight(...ranges));
  else CSS.highlights.delete(name);
}

export function Tokens({ node, isGrowing, children }) {
  const root = useRef(null);
  const timer = useRef(0);
  const [found, setFound] = useState(null); // {index, x, y}
  const canExplain = !isGrowing && node.tokens?.length > 0 && hello.value?.model.kind === "decoder";
  useColours(root, node, canExplain);
  const hide = () => {
    clearTimeout(timer.current);
    mark("token", []);
    setFound(null);
  };
  useEffect(() => hide, [node.id]);
  const look = (event) => {
    if (!canExplain) return;
    const { clientX: x, clientY: y } = event;
    clearTimeout(timer.current);
    timer.current = setTimeout(async () => {
      const place = placeAt(x, y);
      const spans = place === null ? [] : await spansOf(node);
      const index = spans.findIndex((span) => span && span[0] <= place && place < span[1]);
      if (index < 0 || !root.current) return hide();
      const ranges = rangesOf(root.current, spans[index]);
      mark("token", ranges);
      setFound({ index, box: ranges[0]?.getBoundingClientRect() });
    }, REST_MS);
  };
  const inspect = () => {
    if (!found || !getSelection().isCollapsed) return;
    const token = String(found.index);
    navigate("chat", { ...route.value.params, drawer: "inspector", answer: node.id, token });
  };
  return html`<div class="tokens" ref=${root} onMouseMove=${look} onMouseLeave=${hide} onClick=${inspect}>
    ${children}
    ${found?.box && html`<${Popover} key=${found.index} node=${node} found=${found} />`}
  </div>`;
}

/** The explanation of an answer, asked for once. */
async function explanationOf(node) {
  const { explainOf } = await import("../explain/explain.js");
  const { answerOf } = await import("./answers.js");
  return explainOf(await answerOf(node.id));
}

function Popover({ node, found }) {
  const [state, setState] = useState({});
  useEffect(() => {
    let isCurrent = true;
    explanationOf(node).then(
      ({ tokens }) => isCurrent && setState(tokens[found.index] ? { token: tokens[found.index] }
        : { problem: `Only the first ${tokens.length.toLocaleString("en")} tokens are explained.` }),
      (error) => isCurrent && setState({ problem: error.message }),
    );
    return () => { isCurrent = false; };
  }, []);
  const left = Math.min(found.box.left, innerWidth - 300);
  const style = { left: `${Math.max(left, 8)}px`, top: `${found.box.bottom + 6}px` };
  return html`<div class="popover" role="tooltip" style=${style}>
    ${state.problem && html`<p class="warn">${state.problem}</p>`}
    ${!state.problem && !state.token && html`<p class="muted">Asking what was likely…</p>`}
    ${state.token && html`<${Candidates} token=${state.token} />`}
  </div>`;
}

function Candidates({ token }) {
  const best = token.candidates.slice(0, SHOWN);
  if (!best.some(({ id }) => id === token.id)) {
    const own = token.candidates.find(({ id }) => id === token.id);
    if (own) best.push(own);
  }
  return html`<table>
    <thead><tr><th>token</th><th class="number">model</th><th class="number">after filters</th></tr></thead>
    <tbody>${best.map((one) => html`<tr data-won=${one.id === token.id}>
      <td class="mono">${visible(one.text)}</td>
      <td class="number">${percent(one.raw)}</td>
      <td class="number">${one.cut ? html`<s>cut</s>` : percent(one.final)}</td></tr>`)}
    </tbody></table>
    <p class="muted">rank ${token.rank} · ${token.kept.toLocaleString("en")} kept · click to inspect</p>`;
}

/** Colour the tokens of an answer by how surprising each was: −log2 of the model's probability. */
function useColours(root, node, canExplain) {
  const isOn = colouring.value === "bits" && canExplain;
  useEffect(() => {
    if (!isOn) return undefined;
    let isCurrent = true;
    const added = [];
    Promise.all([explanationOf(node), spansOf(node)]).then(([{ tokens }, spans]) => {
      if (!isCurrent) return;
      for (const [index, token] of tokens.entries()) {
        const level = levelOf(token);
        if (!level || !spans[index]) continue;
        for (const range of rangesOf(root.current, spans[index])) {
          highlight(level).add(range);
          added.push([level, range]);
        }
      }
    }, console.error);
    return () => {
      isCurrent = false;
      for (const [level, range] of added) highlight(level).delete(range);
    };
  }, [isOn, node.content]);
}

function levelOf(token) {
  const own = token.candidates.find(({ id }) => id === token.id);
  if (!own) return LEVELS.length;
  const bits = -Math.log2(Math.max(own.raw, 1e-30));
  return LEVELS.filter((least) => bits >= least).length;
}

function highlight(level) {
  const name = `surprise-${level}`;
  if (!CSS.highlights.has(name)) CSS.highlights.set(name, new Highlight());
  return CSS.highlights.get(name);
}
