// What heads do, by their attention over a text: scores from 0 to 1, and the name of the largest.
import { html } from "../html.js";
import { figure } from "./text.js";

/** A head with a smaller score has no name. */
export const LEAST = 0.4;
const MOST_NAMED = 6; // heads that are listed for a kind

export const KINDS = [
  { name: "previous", letter: "P", title: "previous token", meaning: "looks at the token before" },
  { name: "induction", letter: "I", title: "induction",
    meaning: "looks behind an earlier occurrence of the token" },
  { name: "first", letter: "F", title: "first token", meaning: "looks at the first token: a rest" },
];

const scoreOf = (found, name, layer, head) => found[name]?.[layer]?.[head] ?? 0;

/** The kind of a head in a row of layers; null if it has none. */
export function kindOf(found, layer, head) {
  const scored = KINDS.map((kind) => [scoreOf(found, kind.name, layer, head), kind]);
  const [score, kind] = scored.reduce((best, one) => (one[0] > best[0] ? one : best));
  return score >= LEAST ? kind : null;
}

/** The heads of a layer by what they do: those of a kind together, the clearest first. */
export function byKind(found, layer, heads) {
  const key = (head) => {
    const kind = kindOf(found, layer, head);
    return kind ? [KINDS.indexOf(kind), -scoreOf(found, kind.name, layer, head)] : [KINDS.length, head];
  };
  return heads.sort((a, b) => key(a)[0] - key(b)[0] || key(a)[1] - key(b)[1]);
}

/** The clearest heads of each kind, as buttons that show them. */
export function Kinds({ found, pick }) {
  if (!found.previous?.[0]?.length) return null;
  return html`<dl class="lens-kinds" aria-label="Heads by what they do">
    ${KINDS.map((kind) => html`<${Kind} key=${kind.name} kind=${kind} found=${found} pick=${pick} />`)}
  </dl>`;
}

function Kind({ kind, found, pick }) {
  const all = found[kind.name].flatMap((row, at) => row.map((score, head) => (
    { at, layer: found.numbers[at], head, score })))
    .filter(({ at, head }) => kindOf(found, at, head) === kind);
  const shown = all.sort((a, b) => b.score - a.score).slice(0, MOST_NAMED);
  const isKnown = found[kind.name][0].length > 0;
  const none = isKnown ? "no head" : "no token is repeated";
  return html`<div>
    <dt title=${kind.meaning}><b class="mono">${kind.letter}</b> ${kind.title}
      ${all.length > 0 && html`<small class="muted"> ${all.length}</small>`}</dt>
    <dd>${shown.map(({ layer, head, score }) => html`<button type="button" class="quiet"
      key=${`${layer} ${head}`} onClick=${() => pick({ layer: String(layer), head: String(head) })}
      >L${layer} H${head} <small>${score.toFixed(2)}</small></button>`)}
      ${!shown.length && html`<small class="muted">${none}</small>`}</dd>
  </div>`;
}

/** The scores of one head in words. */
export function scoresOf(found, layer, head) {
  const known = KINDS.filter(({ name }) => found[name]?.[layer]?.length);
  return known.map(({ name, title }) => `${title} ${figure(found[name][layer][head])}`).join(", ");
}
