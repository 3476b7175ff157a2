// Charts of the Model page. Each has its figures as text or as a table beside it.
import { html, useState } from "../html.js";

const WIDTH = 480;
const HEIGHT = 160;

/** How long each pair of dimensions takes for one turn, against the context. */
export function Wavelengths({ name, wavelengths, context }) {
  const [isOpen, setOpen] = useState(false);
  const top = Math.log(Math.max(context * 2, ...wavelengths));
  const bottom = Math.log(Math.min(...wavelengths));
  const y = (value) => HEIGHT - ((Math.log(value) - bottom) / (top - bottom)) * (HEIGHT - 8) - 4;
  const x = (pair) => ((pair + 0.5) * WIDTH) / wavelengths.length;
  const turning = wavelengths.filter((length) => length <= context).length;
  const text = `${turning} of ${wavelengths.length} pairs turn at least once in ${context.toLocaleString("en")} tokens`;
  return html`<figure class="md-chart" data-name=${name}>
    <figcaption><b>${name}</b>: ${text}; the others tell far from near.</figcaption>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`${name}: ${text}`}>
      <line class="md-context" x1="0" x2=${WIDTH} y1=${y(context)} y2=${y(context)} />
      <text class="md-label" x="4" y=${y(context) - 4}>context ${context.toLocaleString("en")}</text>
      ${wavelengths.map((length, pair) => html`<circle key=${pair} r="3" cx=${x(pair)} cy=${y(length)}
        class=${length <= context ? "md-inside" : "md-outside"}><title>pair ${pair}: ${amount(length)} tokens</title></circle>`)}
    </svg>
    <details onToggle=${(event) => setOpen(event.currentTarget.open)}>
      <summary>Wavelengths as a table</summary>
      ${isOpen && html`<div class="scroll md-scroll" tabindex="0" role="region" aria-label=${`Wavelengths of ${name}`}>
        <table><thead><tr><th scope="col">pair</th><th scope="col">tokens a turn</th>
          <th scope="col">turns in the context</th></tr></thead><tbody>
          ${wavelengths.map((length, pair) => html`<tr key=${pair}><th scope="row">${pair}</th>
            <td>${amount(length)}</td><td>${amount(context / length)}</td></tr>`)}
        </tbody></table></div>`}
    </details>
  </figure>`;
}

function amount(value) {
  if (value >= 100) return Math.round(value).toLocaleString("en");
  return value.toPrecision(3);
}

/** How many keys a query sees. In an encoder, the window of a layer is to both sides. */
export function keysInWindow({ kind, window }) {
  if (window === null) return Infinity;
  return kind === "full" ? 2 * window - 1 : window;
}

/** What each layer sees: the whole context, or a window. */
export function Windows({ attention, context }) {
  const layers = Object.entries(attention).filter(([, facts]) => facts.kind !== "cross");
  return html`<figure class="md-chart">
    <figcaption>Keys that a query of each layer sees, of a context of ${context.toLocaleString("en")}.</figcaption>
    <div class="scroll md-scroll" tabindex="0" role="region" aria-label="Windows"><table><thead><tr>
      <th scope="col">layer</th><th scope="col">keys</th><td /></tr></thead><tbody>
      ${layers.map(([name, facts], layer) => {
        const keys = keysInWindow(facts);
        const width = `${(100 * Math.min(keys, context)) / context}%`;
        return html`<tr key=${name}><th scope="row">${layer}</th>
          <td>${keys === Infinity ? "all" : keys.toLocaleString("en")}</td>
          <td class="md-wide"><span class="md-bar" aria-hidden="true"><span style=${{ width }} /></span></td></tr>`;
      })}
    </tbody></table></div>
  </figure>`;
}

/** cap * tanh(x / cap) beside x itself. */
export function Softcap({ title, cap }) {
  const most = cap * 3;
  const x = (value) => ((value + most) / (2 * most)) * WIDTH;
  const y = (value) => HEIGHT / 2 - (value / (cap * 1.25)) * (HEIGHT / 2);
  const points = Array.from({ length: 121 }, (_, i) => {
    const value = -most + (2 * most * i) / 120;
    return `${x(value).toFixed(1)},${y(cap * Math.tanh(value / cap)).toFixed(1)}`;
  });
  const loss = (at) => `${at * cap} becomes ${(cap * Math.tanh(at)).toFixed(1)}`;
  return html`<figure class="md-chart">
    <figcaption><b>${title}</b> are capped at ±${cap}: ${loss(0.5)}, ${loss(1)}, ${loss(2)}.</figcaption>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`Softcap ${cap}: ${loss(1)}`}>
      <line class="md-axis" x1="0" x2=${WIDTH} y1=${y(0)} y2=${y(0)} />
      <line class="md-axis" x1=${x(0)} x2=${x(0)} y1="0" y2=${HEIGHT} />
      <line class="md-context" x1=${x(-cap * 1.25)} y1=${y(-cap * 1.25)} x2=${x(cap * 1.25)} y2=${y(cap * 1.25)} />
      <polyline class="md-curve" points=${points.join(" ")} />
    </svg>
  </figure>`;
}
