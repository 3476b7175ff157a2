// Predictions: the most likely next tokens after every position, as columns.
import { html } from "../html.js";
import { boxesOf } from "../images.js";
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
  const columns = boxesOf(report.images, tokens.length); // an image has one, without figures
  const ranks = found[0].top.map((_, rank) => rank);
  return html`
    <p class="muted">Each column has the most likely tokens after its token. The token that follows
      in the text is framed. Entropy is in bits: 0 is certain.</p>
    <${Scroll} tabindex="0" role="region" aria-label="Predictions"
      toward=${answerFrom ? ".lens-answer" : ""}>
      <table class="lens-table lens-columns" id="lens-predictions">
        <thead>
          <tr><td />${columns.map(({ begin, place }) => html`<${Head} key=${begin} place=${place}
            text=${tokens[begin]} isAnswer=${begin === answerFrom} />`)}</tr>
        </thead>
        <tbody>
          ${ranks.map((rank) => html`<tr key=${rank}><th scope="row">${rank + 1}</th>
            ${columns.map(({ begin, place }) => (place === undefined
              ? html`<${Cell} key=${begin} report=${report} entry=${found[begin].top[rank]}
                  next=${report.tokens[begin + 1]} />`
              : html`<td key=${begin} />`))}</tr>`)}
          <tr><th scope="row">entropy</th>
            ${columns.map(({ begin, place }) => html`<td key=${begin}>${place === undefined
              && figure(found[begin].entropy)}</td>`)}</tr>
          <tr><th scope="row">next</th>
            ${columns.map(({ begin, place }) => html`<td key=${begin}>${place === undefined
              && nextLine(found[begin].actual)}</td>`)}</tr>
        </tbody>
      </table>
    <//>`;
}

function Head({ text, place, isAnswer }) {
  if (place !== undefined) return html`<th scope="col" class="lens-image">image ${place + 1}</th>`;
  return html`<th scope="col" class=${isAnswer ? "mono lens-answer" : "mono"}
    title=${visible(text)}>${short(text)}</th>`;
}

const nextLine = (actual) => (actual ? `#${actual.rank} · ${percent(actual.p)}` : "–");

function Cell({ report, entry: [id, p], next }) {
  const text = report.pieces[id];
  return html`<td class=${id === next ? "lens-actual" : ""} style=${cellStyle(shadeOf(p))}
    data-id=${id} data-p=${p} title=${`${visible(text)} (${id}): ${p}`}>
    <span class="mono">${short(text)}</span> <small>${percent(p)}</small></td>`;
}
