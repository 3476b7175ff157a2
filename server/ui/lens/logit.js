// Logit lens: what the stream would predict after each layer.
import { html, useState } from "../html.js";
import { percent, visible } from "../text.js";
import { cellStyle, shadeOf } from "./colours.js";
import { useLens } from "./data.js";
import { Choice } from "./parts.js";
import { Scroll } from "./scroll.js";
import { figure, piecesOf, short } from "./text.js";

const POSITIONS = 64;
const TOP = 5;
const COSTLY = 5e8; // logits; more take seconds
const SHADINGS = [["", "probability"], ["entropy", "certainty (entropy)"]];
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

export default function Logit({ report, body, params, update, facts, answerFrom }) {
  const count = report.tokens.length;
  const opens = answerFrom && count > POSITIONS ? Math.min(answerFrom, count - POSITIONS) : 0;
  const first = Math.max(0, Math.min(count - 1, Number.parseInt(params.from || opens, 10) || 0));
  const positions = report.tokens.map((_, at) => at).slice(first, first + POSITIONS);
  const layers = (report.attention.decoder?.layers ?? 0) + 1;
  const logits = layers * positions.length * facts.ready.vocab_size;
  const [isAllowed, setAllowed] = useState(logits < COSTLY);
  const hasHead = report.predictions.length > 0;
  const request = { ...body, want: [], logit: { positions, k: TOP } };
  const { value, error, isLoading } = useLens(hasHead && isAllowed ? request : null);
  if (!hasHead) return html`<p class="empty">An encoder has no head, so it has no logit lens.</p>`;
  if (!isAllowed) {
    const millions = (logits / 1e6).toFixed(0);
    return html`<p>This computes ${millions} million logits, which may take a while.${" "}
      <button type="button" onClick=${() => setAllowed(true)}>Compute them</button></p>`;
  }
  return html`
    <p class="muted">Each row reads the stream after a number of layers, through the last norm and
      the head. The last row is the model's own prediction.</p>
    <div class="lens-row">
      <${Choice} label="Shade" value=${params.shade ?? ""} options=${SHADINGS}
        pick=${(shade) => update({ shade })} />
      ${count > POSITIONS && html`<label>From position${" "}
        <input type="number" min="0" max=${count - 1} value=${first}
          onChange=${(event) => update({ from: event.target.value })} /></label>`}
    </div>
    ${error && html`<p class="warn" role="alert">${error}</p>`}
    ${isLoading && html`<p class="muted" role="status">Loading…</p>`}
    ${value && html`<${Grid} report=${value} positions=${positions} shade=${params.shade}
      layers=${layers} most=${Math.log2(facts.ready.vocab_size)} answerFrom=${answerFrom} />`}`;
}

function Grid({ report, positions, shade, layers, most, answerFrom }) {
  const [[row, column], setCursor] = useState([layers - 1, positions.length - 1]);
  const cell = (layer, at) => report.logit[layer * positions.length + at];
  const tokens = piecesOf(report, positions.map((at) => report.tokens[at]));
  const shadeAt = ([, , entropy, top]) => (shade === "entropy"
    ? Math.round(255 * Math.max(0, 1 - entropy / most)) : shadeOf(top[0][1]));
  const [, , entropy, top] = cell(row, column);
  const words = top.map(([id, p]) => `${visible(report.pieces[id])} ${percent(p)}`).join(", ");
  const where = `after ${row} layers at ${visible(tokens[column])}`;
  const readOut = `${where}: ${words}; entropy ${figure(entropy)} bits`;

  function onKey(event) {
    const move = MOVES[event.key];
    if (!move) return;
    event.preventDefault();
    const clamp = (at, count) => Math.max(0, Math.min(count - 1, at));
    setCursor([clamp(row + move[0], layers), clamp(column + move[1], positions.length)]);
  }

  return html`
    <p class="lens-read mono" role="status">${readOut}</p>
    <${Scroll} tabindex="0" role="region" onKeyDown=${onKey} moved=${positions[0]}
      toward=${answerFrom > positions[0] ? ".lens-answer" : ""}
      aria-label="Logit lens; arrows move over the cells">
      <table class="lens-table lens-columns" id="lens-logit">
        <thead><tr><th scope="col">layers</th>${tokens.map((text, at) => html`
          <th scope="col" key=${at}
            class=${positions[at] === answerFrom ? "mono lens-answer" : "mono"}>${short(text)}</th>`)}</tr></thead>
        <tbody>${Array.from({ length: layers }, (_, layer) => html`<tr key=${layer}>
          <th scope="row">${layer}</th>
          ${positions.map((_, at) => {
            const found = cell(layer, at);
            const [id, p] = found[3][0];
            return html`<td key=${at} style=${cellStyle(shadeAt(found))} data-id=${id} data-p=${p}
              data-entropy=${found[2]} class=${layer === row && at === column ? "lens-cursor" : ""}
              onPointerEnter=${() => setCursor([layer, at])}>
              <span class="mono">${short(report.pieces[id])}</span>
              <small>${percent(p)} · ${found[2].toFixed(2)}</small></td>`;
          })}</tr>`)}</tbody>
      </table>
    <//>`;
}
