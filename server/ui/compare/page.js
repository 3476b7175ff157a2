// Compare: answers side by side, made by this page or in a file that `penstock compare -o FILE` wrote.

import { html, signal, useRef, useState, useStyle } from "../html.js";
import { navigate, route } from "../router.js";
import { saveJson } from "../files.js";
import { hello } from "../store.js";
import { percent, visible } from "../text.js";
import { Starter } from "./start.js";

const FORMAT = "penstock-comparison";
const LEVELS = [0.1, 0.3, 0.7, 1.5, 3]; // bits; the classes are cmp-0 to cmp-5

const loaded = signal(null); // {name, document}

/** The document of a file. Throws an Error that says what is wrong. */
function parsed(text) {
  let document;
  try {
    document = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  const isSound = document?.format === FORMAT && document.version === 1 &&
    Array.isArray(document.models) && Array.isArray(document.prompts);
  if (!isSound) throw new Error("The file was not written by penstock compare -o FILE.");
  return document;
}

export default function Compare({ params }) {
  useStyle("compare/page.css");
  const [problem, setProblem] = useState("");
  const read = async (file) => {
    try {
      loaded.value = { name: file.name, document: parsed(await file.text()) };
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
  };
  const drop = (event) => {
    event.preventDefault();
    if (event.dataTransfer.files[0]) read(event.dataTransfer.files[0]);
  };
  return html`<div class="page cmp" onDragOver=${(event) => event.preventDefault()} onDrop=${drop}>
    <h1>Compare</h1>
    ${hello.value?.ready.kind === "decoder" && html`<${Starter}
      show=${(document) => { loaded.value = { name: "comparison.json", document }; }} />`}
    <${Opener} read=${read} />
    ${problem && html`<p class="warn" role="alert">${problem}</p>`}
    ${loaded.value && html`<${Result} document=${loaded.value.document} params=${params} />`}
  </div>`;
}

function Opener({ read }) {
  const field = useRef(null);
  const take = () => {
    const [file] = field.current.files;
    field.current.value = ""; // so that the same file can be opened again
    if (file) read(file);
  };
  const save = () => saveJson(JSON.stringify(loaded.value.document), loaded.value.name);
  return html`<div class="cmp-open">
    <p class="muted">Two models, and how far their predictions are apart at each token: write a file
      with <code>penstock compare MODEL MODEL --prompts FILE <span class="cmp-option">-o out.json</span></code> and open it here. It
      stays in this browser.</p>
    <button type="button" onClick=${() => field.current.click()}>Open a file</button>
    ${loaded.value && html`<span class="muted">${loaded.value.name}</span>
      <button class="quiet" type="button" onClick=${save}>Save</button>`}
    <input type="file" hidden accept=".json,application/json" ref=${field} aria-label="Comparison"
      onChange=${take} />
  </div>`;
}

/** The distances between the first model and `place`, along the answer of `writer`. */
function distancesOf(entry, place, writer) {
  const found = entry.distances.find((one) => one.model === place && one.writer === writer);
  return found?.tokens.map((token) => ({ ...token, kl: token.kl ?? Infinity })); // JSON has none
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function Result({ document, params }) {
  const number = Math.min(Number(params.prompt) || 0, document.prompts.length - 1);
  const show = (prompt) => navigate(route.value.page, { ...params, prompt }, { replace: true });
  return html`
    ${!document.same_tokens && html`<p class="warn">These models have other tokens, so their
      predictions have no distance. Their answers can still be read.</p>`}
    <div class="cmp-grid">
      <nav aria-label="Prompts" class="cmp-prompts">
        ${document.prompts.map((entry, place) => html`<button type="button" class="quiet"
          aria-current=${place === number ? "true" : undefined} onClick=${() => show(place)}>
          <span>${place + 1}. ${entry.prompt}</span><small>${summary(document, entry)}</small>
        </button>`)}
      </nav>
      <${Prompt} key=${number} document=${document} entry=${document.prompts[number]} />
    </div>`;
}

function summary(document, entry) {
  return document.models.slice(1).map((_, index) => {
    const place = index + 1;
    const bits = mean((distancesOf(entry, place, 0) ?? []).map((token) => token.kl));
    const parts = entry.answers[place].parts_at;
    const where = parts === null ? "equal" : `part at ${parts}`;
    if (!document.same_tokens) return "";
    return bits === null ? where : `${where}, ${bits.toFixed(3)} bits`;
  }).join(" · ");
}

function Prompt({ document, entry }) {
  const [other, setOther] = useState(1);
  return html`<section aria-label="Answers">
    <p class="cmp-prompt">${entry.prompt}</p>
    ${document.models.length > 2 && html`<label class="cmp-other">Compare ${document.models[0]} with
      <select value=${other} onChange=${(event) => setOther(Number(event.target.value))}>
        ${document.models.slice(1).map((name, place) => html`<option value=${place + 1}>${name}</option>`)}
      </select></label>`}
    <div class="cmp-answers">
      ${[0, other].map((writer) => html`<${Answer} key=${`${other}-${writer}`} document=${document}
        entry=${entry} writer=${writer} against=${writer ? 0 : other}
        tokens=${distancesOf(entry, other, writer)} partsAt=${entry.answers[other].parts_at} />`)}
    </div>
  </section>`;
}

const level = (bits) => LEVELS.filter((least) => bits >= least).length;

/** An answer with its tokens shaded by the distance, and a line about the one under the cursor. */
function Answer({ document, entry, writer, against, tokens, partsAt }) {
  const answer = entry.answers[writer];
  const [pinned, setPinned] = useState(partsAt ?? 0);
  const [hovered, setHovered] = useState(null);
  const place = Math.min(hovered ?? pinned, answer.pieces.length - 1);
  const onKey = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    setPinned(Math.max(0, Math.min(answer.pieces.length - 1, pinned + step)));
  };
  const line = tokens?.[place] && describe(document, answer, tokens[place], place, against);
  return html`<article class="panel">
    <h2>${document.models[writer]}</h2>
    ${!tokens && html`<${Plain} answer=${answer} partsAt=${partsAt} />`}
    ${tokens && html`
      <div class="cmp-text mono" tabindex="0" role="slider" aria-label=${`Tokens of ${document.models[writer]}`}
        aria-valuemin="0" aria-valuemax=${answer.pieces.length - 1} aria-valuenow=${place}
        aria-valuetext=${line} onKeyDown=${onKey} onMouseLeave=${() => setHovered(null)}>
        ${answer.pieces.map((piece, index) => html`<span data-place=${index}
          class=${`cmp-${level(tokens[index].kl)}${index === partsAt ? " cmp-parts" : ""}`}
          data-here=${index === place ? "true" : undefined}
          onMouseEnter=${() => setHovered(index)}
          onClick=${() => setPinned(index)}>${piece}</span>`)}
      </div>
      <${Chart} tokens=${tokens} place=${place} />
      <p class="cmp-line">${line}</p>`}
    <p class="muted">${answer.tokens.length} tokens · ${answer.finish}
      ${tokens && ` · mean ${mean(tokens.map(({ kl }) => kl))?.toFixed(4) ?? "0"} bits`}</p>
  </article>`;
}

/** An answer without distances; a line shows where the two part. */
function Plain({ answer, partsAt }) {
  const hasPart = partsAt !== null && partsAt < answer.pieces?.length;
  if (!hasPart) return html`<p class="cmp-text">${answer.text}</p>`;
  const [before, after] = [answer.pieces.slice(0, partsAt), answer.pieces.slice(partsAt)];
  return html`<p class="cmp-text">${before.join("")}<span class="cmp-parts">${after.join("")}</span></p>`;
}

function describe(document, answer, token, place, against) {
  return `token ${place} “${visible(answer.pieces[place])}”: ${percent(token.own)} here, ` +
    `${percent(token.other)} by ${document.models[against]}, whose likeliest is ` +
    `“${visible(token.best)}”; distance ${token.kl.toFixed(4)} bits`;
}

const HEIGHT = 40;

/** A bar per token: the distance in bits. */
function Chart({ tokens, place }) {
  const most = Math.max(...tokens.map(({ kl }) => Math.min(kl, 20)), 1e-3);
  return html`<svg class="cmp-chart" viewBox=${`0 0 ${tokens.length} ${HEIGHT}`}
    preserveAspectRatio="none" role="img" aria-label=${`Distance per token, up to ${most.toFixed(3)} bits`}>
    ${tokens.map(({ kl }, index) => {
      const height = Math.max((HEIGHT * Math.min(kl, most)) / most, 0.5);
      return html`<rect x=${index + 0.1} y=${HEIGHT - height} width="0.8" height=${height}
        class=${index === place ? "cmp-here" : ""} />`;
    })}
  </svg>`;
}
