// Attention: thumbnails of all heads, and one head at full size.
import { html, useMemo, useState } from "../html.js";
import { visible } from "../text.js";
import { cellStyle, shadeOf } from "./colours.js";
import { bytesOf, useHead, useRow } from "./data.js";
import { HeatMap } from "./heat.js";
import { Kinds, byKind, kindOf, scoresOf } from "./kinds.js";
import { Choice, FigureTable, Scale } from "./parts.js";
import { exact, figure, piecesOf, short } from "./text.js";
import { Thumbs } from "./thumbs.js";

const LARGE = 100; // maps with more tokens take the whole width
const ORDERS = [["", "by what they do"], ["index", "by index"], ["flat", "flat to spiky"]];
const NAMES = { decoder: "self-attention", encoder: "encoder", cross: "cross-attention" };

export default function Attention({ report, body, params, update, answerFrom }) {
  const stacks = Object.keys(report.attention);
  const stack = stacks.includes(params.stack) ? params.stack : stacks.at(-1);
  const found = report.attention[stack];
  const row = rowOf(found.numbers, params.layer);
  const layer = found.numbers[row];
  const head = place(params.head, found.heads);
  const sorting = ORDERS.some(([name]) => name === params.order) ? params.order : "";
  const order = useMemo(() => orders(found, sorting), [found, sorting]);
  const shades = useMemo(() => bytesOf(found.thumbs), [found]);
  const isLarge = Math.max(found.queries, found.keys) > LARGE;
  return html`<div class=${isLarge ? "lens-one" : "lens-two"}>
    <section aria-label="All heads">
      <div class="lens-row">
        ${stacks.length > 1 && html`<${Choice} label="Attention of" value=${stack}
          options=${stacks.map((name) => [name, NAMES[name]])}
          pick=${(name) => update({ stack: name, row: "" })} />`}
        <${Choice} label="Heads" value=${sorting} options=${ORDERS}
          pick=${(chosen) => update({ order: chosen })} />
      </div>
      <${Thumbs} found=${found} shades=${shades} order=${order} isLabelled=${!sorting} layer=${row} head=${head}
        pick=${(one) => update({ ...one, row: params.row })} />
      <${Scale} most="1" text="weight; the shade is its square root" />
      <${Kinds} found=${found} pick=${(one) => update({ ...one, row: params.row })} />
      ${isHybrid(found) && html`<p class="muted">Layers with attention:
        ${" "}${found.numbers.join(", ")}. The others are recurrent, see State.</p>`}
    </section>
    <${Head} key=${`${stack} ${layer} ${head}`} report=${report} body=${body} found=${found}
      which=${{ stack, layer, head }} at=${row} params=${params} update=${update}
      answerFrom=${answerFrom} />
  </div>`;
}

/** A number of a URL, at least 0 and below `count`. */
function place(text, count) {
  const number = Number.parseInt(text ?? "0", 10) || 0;
  return Math.max(0, Math.min(count - 1, number));
}

const isHybrid = ({ numbers }) => numbers.some((number, row) => number !== row);

/** The place in `numbers` of the layer that a URL names; the layer before it if it has none. */
function rowOf(numbers, text) {
  const wanted = place(text, Infinity);
  return Math.max(0, numbers.findLastIndex((number) => number <= wanted));
}

/** The heads of each layer in the order shown: one of ORDERS. */
function orders(found, sorting) {
  return found.flatness.map((row, layer) => {
    const heads = row.map((_, head) => head);
    if (sorting === "index") return heads;
    if (sorting === "flat") return heads.sort((a, b) => row[b] - row[a]);
    return byKind(found, layer, heads);
  });
}

function Head({ report, body, found, which, at, params, update, answerFrom }) {
  const { stack, layer, head } = which;
  const answer = useHead(report, body, which);
  const [cursor, setCursor] = useState(null);
  const keys = piecesOf(report, stack === "decoder" ? report.tokens : keyIds(report, stack));
  const queries = piecesOf(report, stack === "encoder" ? keyIds(report, stack) : report.tokens);
  const window = found.windows[at];
  const pinned = params.row ? place(params.row, queries.length) : null;
  const title = `L${layer} H${head}`;
  const [kind, scores] = [kindOf(found, at, head), scoresOf(found, at, head)];
  const opened = answerFrom && stack !== "encoder" ? answerFrom : queries.length - 1;
  if (answer.error) return html`<p class="warn" role="alert">${answer.error}</p>`;
  if (!answer.value) return html`<p class="muted" role="status">Loading ${title}…</p>`;
  const shades = answer.value;
  const isSeen = (row, column) => (stack !== "decoder" || column <= row)
    && (window === null || Math.abs(row - column) < window);
  const readOut = (row, column) => {
    const pair = `${visible(queries[row])} (${row}) → ${visible(keys[column])} (${column})`;
    if (!isSeen(row, column)) return `${pair}: not visible`;
    return `${pair}: ${figure((shades[row * keys.length + column] / 255) ** 2)}`;
  };
  const row = pinned ?? cursor;
  return html`<section aria-label="One head">
    <h2>${title} <small class="muted">${kind && html`<strong>${kind.title}</strong> · `}
      ${NAMES[stack]}${scores && `, ${scores}`}, flatness${" "}
      ${figure(found.flatness[at][head])}
      ${window !== null && ` · window ${window}`}
      ${found.softcap !== null && ` · softcap ${found.softcap}`}</small></h2>
    <${HeatMap} id=${shades} rows=${queries.length} columns=${keys.length} rowLabels=${queries}
      columnLabels=${keys} start=${startOf(pinned ?? opened, stack)}
      shadeAt=${(r, c) => (isSeen(r, c) ? shades[r * keys.length + c] : null)}
      edge=${stack === "decoder" && window !== null ? (r) => Math.max(0, r - window + 1) : null}
      pinned=${pinned} readOut=${readOut} label=${`Attention of ${title}: rows look at columns`}
      onCursor=${(r) => setCursor(r)} onPin=${(r) => update({ row: r === pinned ? "" : String(r) })}
      file=${`attention-L${layer}-H${head}`} />
    ${row !== null && html`<${Row} report=${report} body=${body} which=${which} row=${row}
      isPinned=${pinned !== null} queries=${queries} keys=${keys}
      unpin=${() => update({ row: "" })} />`}
  </section>`;
}

/** The first place of the cursor in a row: a key that is visible. */
const startOf = (row, stack) => [row, stack === "decoder" ? row : 0];

/** The tokens that the encoder reads: the source of a translation, or the text itself. */
function keyIds(report, stack) {
  return stack !== "decoder" && report.source.length ? report.source : report.tokens;
}

/** One query: every key in the shade of its exact weight, and the figures as a table. */
function Row({ report, body, which, row, isPinned, queries, keys, unpin }) {
  const { value, error } = useRow(report, body, which, row);
  return html`<div class="lens-query">
    <h3>From <span class="mono">${visible(queries[row])}</span> (${row})${" "}
      ${isPinned
        ? html`<button type="button" class="quiet" onClick=${unpin}>Unpin</button>`
        : html`<small class="muted">click or Enter pins a row</small>`}</h3>
    ${error && html`<p class="warn" role="alert">${error}</p>`}
    ${value && html`
      <p class="lens-strip mono">${value.weights.map((weight, key) => html`<span key=${key}
        style=${cellStyle(shadeOf(weight))}
        title=${`${key}: ${exact(weight)}`}>${short(keys[key], 20)}</span>`)}</p>
      <${RowTable} value=${value} keys=${keys} />`}
  </div>`;
}

/** The figures of a row; of a model with a softcap the scores before and after it, too. */
function RowTable({ value, keys }) {
  const caps = value.scores !== undefined;
  const heads = ["key", "token", ...(caps ? ["score", "after softcap"] : []), "weight"];
  const rows = value.weights.map((weight, key) => {
    const scores = caps ? [exact(value.scores[key]), exact(value.capped[key])] : [];
    return [key, visible(keys[key]), ...scores, exact(weight)];
  });
  const summary = caps ? "Scores before and after the softcap" : "Weights as a table";
  return html`<${FigureTable} summary=${summary} label="Weights of the row" heads=${heads}
    rows=${rows} startsOpen=${caps} />`;
}
