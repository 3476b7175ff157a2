// Embeddings: the cosine of the angle between the embeddings of any two tokens.
import { post } from "../api.js";
import { html, useRef } from "../html.js";
import { placesOf } from "../images.js";
import { visible } from "../text.js";
import { useAnswer } from "./data.js";
import { HeatMap } from "./heat.js";
import { FigureTable } from "./parts.js";
import { exact, figure, short } from "./text.js";

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
  const shown = new Set(report.images.flatMap(placesOf).map((at) => report.tokens[at]));
  const ids = [...report.source, ...report.tokens].filter((id) => !shown.has(id));
  const words = params.words ?? "";
  const key = JSON.stringify([words, ids]);
  const { value, error } = useAnswer(key, (signal) => load(words, ids, signal));
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
  const readOut = (row, column) => {
    const pair = `${visible(texts[row])} and ${visible(texts[column])}`;
    return `${pair}: ${figure(cosine[row][column])}`;
  };
  return html`
    ${omitted > 0 && html`<p class="muted">Only the first ${MOST} different tokens are shown.</p>`}
    <${HeatMap} id=${cosine} rows=${texts.length} columns=${texts.length} rowLabels=${texts}
      columnLabels=${texts} label="Cosine of embeddings" readOut=${readOut} largest=${32}
      shadeAt=${(row, column) => Math.round(255 * Math.max(0, Math.min(1, cosine[row][column])))}
      file="embeddings" />
    <p class="muted">Dark: 0 or less; bright: 1, the same direction.</p>
    <${FigureTable} summary="Cosines as a table" label="Cosines" id="lens-cosines" ids=${ids}
      heads=${["token", ...texts.map((text) => short(text))]}
      rows=${cosine.map((row, at) => [visible(texts[at]), ...row.map(exact)])} />`;
}
