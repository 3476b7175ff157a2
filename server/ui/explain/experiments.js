// What other settings or other seeds would have drawn, computed in the browser.

import { html, useState } from "../html.js";
import { hello } from "../store.js";
import { visible } from "../text.js";
import { drawOften, redraw } from "./filter.js";

const OTHER_SEEDS = 20;
const KNOBS = [
  ["temperature", "temperature", 0, 2, 0.05],
  ["topK", "top-k (0: off)", 0, 100, 1],
  ["topP", "top-p", 0.01, 1, 0.01],
  ["minP", "min-p", 0, 1, 0.01],
];

export function Experiments({ token, original }) {
  const [settings, setSettings] = useState(original);
  const [draws, setDraws] = useState(null);
  const vocabulary = hello.value?.ready.vocab_size ?? Number.MAX_SAFE_INTEGER;
  const result = redraw(token, settings, original, vocabulary);
  return html`<section class="ins-try" aria-label="Try other settings">
    <h3>Try</h3>
    <div class="ins-knobs">
      ${KNOBS.map(([name, label, min, max, step]) => html`<label key=${name}>
        <span>${label} <output>${settings[name]}</output></span>
        <input type="range" min=${min} max=${max} step=${step} value=${settings[name]}
          data-knob=${name} onInput=${(event) => {
            setSettings({ ...settings, [name]: Number(event.currentTarget.value) });
          }} />
      </label>`)}
    </div>
    <p class="ins-result" role="status">${resultLine(result)}</p>
    <div class="ins-actions">
      <button type="button" onClick=${() => setSettings(original)}>Reset</button>
      <button type="button" onClick=${() => setDraws(drawOften(token, OTHER_SEEDS))}>
        Draw ${OTHER_SEEDS} other seeds
      </button>
      <span role="status" class="ins-draws">${draws && drawsLine(draws)}</span>
    </div>
  </section>`;
}

function resultLine({ winner, kept, isWhole, undecided }) {
  const count = kept && `${isWhole ? "" : "more than "}${kept.length} kept; `;
  if (undecided) return `${count ?? ""}not known: ${undecided}`;
  return `${count}the same dice would draw: ${visible(winner.text)}`;
}

function drawsLine(draws) {
  const parts = draws.map(([one, times]) => `${one ? visible(one.text) : "others"} ${times}`);
  return parts.join(", ");
}
