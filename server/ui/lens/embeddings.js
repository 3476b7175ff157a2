// Embeddings: the cosine of the angle between the embeddings of any two tokens.
import { post } from "../api.js";
import { html, useRef, useState } from "../html.js";
import { useAnswer } from "./data.js";
import { HeatMap } from "./heat.js";
import { exact, figure, short, visible } from "./text.js";

const MOST = 32;

/** The cosines of up to 32 different tokens: those of the words in the URL, or of the text. */
async function load(words, ids, signal) {
  let chosen = ids;
  if (words) {
    const body = { prompt: words, add_special_tokens: false };
    chosen = (await post("/tokenize", body, { signal })).tokens;
  }
  const different = [...new Set(chosen)];
  const shown = different.slice(0, MOST);
  if (!shown.length) throw new Error("There are no tokens to compare.");
  const answer = await post("/ui/api/lens/embeddings", { ids: shown }, { signal });
  return { ...answer, ids: shown, omitted: different.length - shown.length };
}

export default function Embeddings({ report, params, update }) {
  const field = useRef(null);
  const ids = [...report.source, ...report.tokens];
  const words = params.words ?? "";
  const { value, error } = useAnswer(JSON.stringify([words, ids]), (signal) => load(words, ids, signal));
  const choose = (event) => {
    event.preventDefault();
    update({ words: field.current.value });
  };
  return html`
    <form class="lens-row" onSubmit=${choose}>
      <label class="lens-grow">Words to compare (empty: the tokens of the text)
        <input ref=${field} value=${words} placeholder=" river lake sea" /></label>
      <button>Compare</button>
    </form>
    ${error && html`<p class="warn" role="alert">${error}</p>`}
    ${value && html`<${Grid} value=${value} />`}`;
}

function Grid({ value: { cosine, texts, ids, omitted } }) {
  const readOut = (row, column) => `${visible(texts[row])} and ${visible(texts[column])}: ${figure(cosine[row][column])}`;
  return html`
    ${omitted > 0 && html`<p class="muted">Only the first ${MOST} different tokens are shown.</p>`}
    <${HeatMap} id=${cosine} rows=${texts.length} columns=${texts.length} rowLabels=${texts}
      columnLabels=${texts} label="Cosine of embeddings" readOut=${readOut} largest=${32}
      shadeAt=${(row, column) => Math.round(255 * Math.max(0, Math.min(1, cosine[row][column])))}
      file="embeddings" />
    <p class="muted">Dark: 0 or less; bright: 1, the same direction.</p>
    <${CosineTable} cosine=${cosine} texts=${texts} ids=${ids} />`;
}

function CosineTable({ cosine, texts, ids }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>Cosines as a table</summary>
    ${isOpen && html`<div class="lens-scroll" tabindex="0" role="region" aria-label="Cosines">
      <table class="lens-table" id="lens-cosines"><thead><tr><td />
        ${texts.map((text, at) => html`<th scope="col" key=${at} class="mono">${short(text)}</th>`)}
      </tr></thead><tbody>${cosine.map((row, at) => html`<tr key=${at} data-id=${ids[at]}>
        <th scope="row" class="mono">${visible(texts[at])}</th>
        ${row.map((value, column) => html`<td class="number" key=${column}>${exact(value)}</td>`)}</tr>`)}
      </tbody></table></div>`}
  </details>`;
}
