// An answer that is JSON, shown as code: indented, coloured, and still the answer's own characters.

import { html, useMemo } from "../html.js";
import { Figure } from "./code.js";

const LEXEME = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|[[\]{},:]/g;
const MOST = 50_000; // characters; longer answers stay as they are

/** Whether a text is a JSON object or list. A number or a word alone is an answer in plain text. */
export function isJson(text) {
  if (!/^\s*[[{]/.test(text) || text.length > MOST) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** The lexemes of a valid JSON text, each `{text, at, before, kind}`; `before` is new white space. */
export function lexemes(source) {
  const found = [];
  let depth = 0;
  const matches = [...source.matchAll(LEXEME)];
  for (const [place, match] of matches.entries()) {
    const [text] = match;
    const last = matches[place - 1]?.[0];
    const next = matches[place + 1]?.[0];
    const closes = text === "}" || text === "]";
    if (closes) depth -= 1;
    const isEmpty = closes && (last === "{" || last === "[");
    const begins = (last === "{" || last === "[" || last === ",") || closes;
    let before = "";
    if (begins && !isEmpty) before = `\n${"  ".repeat(depth)}`;
    else if (last === ":") before = " ";
    if (text === "{" || text === "[") depth += 1;
    found.push({ text, at: match.index, before, kind: kindOf(text, next) });
  }
  return found;
}

function kindOf(text, next) {
  if (text.startsWith('"')) return next === ":" ? "attr" : "string";
  if (/^[-\d]/.test(text)) return "number";
  return /^[tfn]/.test(text) ? "literal" : "";
}

/** `data-at` of each part is its place in the answer, so that a token is found under the mouse. */
export function Json({ text }) {
  const parts = useMemo(() => lexemes(text), [text]);
  const indented = parts.map(({ before, text: one }) => before + one).join("");
  return html`<div class="md"><${Figure} name="json" text=${indented}>
    <code>${parts.map(({ text: one, at, before, kind }) => html`${before}<span data-at=${at}
      class=${kind && `hl-${kind}`}>${one}</span>`)}</code>
  </${Figure}></div>`;
}
