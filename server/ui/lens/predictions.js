// Predictions: the most likely next tokens after every position, as columns.
import { html } from "../html.js";
import { percent, visible } from "../text.js";
import { Scroll } from "./scroll.js";
import { cellStyle, shadeOf } from "./colours.js";
import { figure, piecesOf, short } from "./text.js";

export default function Predictions({ report, answerFrom }) {
  const found = report.predictions;
  if (!found.length) {
    return html`<p class="empty">An encoder has no head, so it predicts no tokens.</p>`;
  }
  const tokens = piecesOf(report, report.tokens);
  const ranks = found[0].top.map((_, rank) => rank);
  return html`
    <p class="muted">Each column has the most likely tokens after its token. The token that follows
      in the text is framed. Entropy is in bits: 0 is certain.</p>
    <${Scroll} tabindex="0" role="region" aria-label="Predictions"
      toward=${answerFrom ? ".lens-answer" : ""}>
      <table class="lens-table lens-columns" id="lens-predictions">
        <thead>
          <tr><td />${tokens.map((text, at) => html`<th scope="col" key=${at}
            class=${at === answerFrom ? "mono lens-answer" : "mono"} title=${visible(text)}>${short(text)}</th>`)}</tr>
        </thead>
        <tbody>
          ${ranks.map((rank) => html`<tr key=${rank}><th scope="row">${rank + 1}</th>
            ${found.map((column, at) => html`<${Cell} key=${at} report=${report}
              entry=${column.top[rank]} next=${report.tokens[at + 1]} />`)}</tr>`)}
          <tr><th scope="row">entropy</th>
            ${found.map(({ entropy }, at) => html`<td key=${at}>${figure(entropy)}</td>`)}</tr>
          <tr><th scope="row">next</th>
            ${found.map(({ actual }, at) => html`<td key=${at}>${actual
              ? `#${actual.rank} · ${percent(actual.p)}` : "–"}</td>`)}</tr>
        </tbody>
      </table>
    <//>`;
}

function Cell({ report, entry: [id, p], next }) {
  const text = report.pieces[id];
  return html`<td class=${id === next ? "lens-actual" : ""} style=${cellStyle(shadeOf(p))}
    data-id=${id} data-p=${p} title=${`${visible(text)} (${id}): ${p}`}>
    <span class="mono">${short(text)}</span> <small>${percent(p)}</small></td>`;
}
