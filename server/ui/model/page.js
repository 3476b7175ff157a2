// Model: what the served model is made of, drawn from its own modules, and how it is set up.
import { get } from "../api.js";
import { html, useEffect, useMemo, useState, useStyle } from "../html.js";
import { bytes, formatList, memoryFormat } from "../formats.js";
import { navigate } from "../router.js";
import { percent } from "../text.js";
import { Softcap, Wavelengths, Windows } from "./charts.js";
import { Diagram } from "./diagram.js";
import { treeOf } from "./tree.js";

const FIRST_TOKENS = 32;

export default function ModelPage({ params }) {
  useStyle("model/page.css");
  const [model, setModel] = useState(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const stop = new AbortController();
    get("/ui/api/model", { signal: stop.signal }).then(setModel, (error) => {
      if (!stop.signal.aborted) setProblem(error.message);
    });
    return () => stop.abort();
  }, []);
  return html`<div class="page md">
    <h1>Model</h1>
    ${problem && html`<p class="warn" role="alert">${problem}</p>`}
    ${!model && !problem && html`<p class="muted" role="status">
      Looking at the model. The first time takes some seconds…</p>`}
    ${model && html`<${Model} model=${model} params=${params} />`}
  </div>`;
}

function Model({ model, params }) {
  const tree = useMemo(() => treeOf(model.boxes), [model]);
  const most = model.max_model_len;
  const asked = Math.floor(Number(params.t)) || FIRST_TOKENS;
  const tokens = Math.max(1, Math.min(most, asked));
  const setTokens = (value) => navigate("model", { ...params, t: value }, { replace: true });
  return html`
    <p><b>${model.architecture}</b>: <b class="md-total">${model.parameters.toLocaleString("en")}</b>
      ${" "}parameters</p>
    <${Weights} model=${model} />
    <section class="panel">
      <h2>Blocks</h2>
      <label class="md-tokens">Shapes for a prompt of
        <input type="number" min="1" max=${most} value=${tokens}
          onChange=${(event) => setTokens(event.target.value)} /> tokens</label>
      <p class="muted">Each box has the shape of its output and its share of the parameters. A line
        at the left goes around boxes. A click on a name opens the lens.</p>
      <${Diagram} tree=${tree} total=${model.parameters} tokens=${tokens} />
    </section>
    <div class="md-grid">
      <${Positions} model=${model} />
      <${Caps} model=${model} />
      <${Memory} entries=${model.memory} />
      <${Bits} uneven=${model.uneven} />
      <${Settings} settings=${model.settings} />
      <${Config} config=${model.config} />
    </div>`;
}

/** The formats of the weights with their shares of the files, and what became of them in memory. */
function Weights({ model }) {
  const { formats } = model;
  const total = formats.reduce((sum, { nbytes }) => sum + nbytes, 0);
  return html`<section class="panel md-weights"><h2>Weights</h2>
    <p>${formats.length > 0 && html`On disk: <b>${bytes(total)}</b>, ${formatList(formats)}. `}
      In memory: <b>${bytes(model.weight_bytes)}</b> in ${memoryFormat(model)}${
        model.quantization ? `; other weights, and the computation, in ${model.dtype}` : ""}.</p>
    ${formats.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Formats">
      <table>
        <thead><tr><th scope="col">format</th><th scope="col" class="number">tensors</th>
          <th scope="col" class="number">bytes</th><th scope="col" class="number">share</th></tr></thead>
        <tbody>${formats.map(({ name, tensors, nbytes }) => html`<tr key=${name}>
          <th scope="row">${name}</th><td class="number">${tensors.toLocaleString("en")}</td>
          <td class="number">${bytes(nbytes)}</td>
          <td class="number">${percent(nbytes / total)}</td></tr>`)}</tbody>
      </table></div>`}
  </section>`;
}

function Positions({ model }) {
  const found = Object.entries(model.wavelengths);
  const hasWindows = Object.values(model.attention).some(({ window }) => window !== null);
  if (!found.length && !hasWindows) return null;
  return html`<section class="panel"><h2>Positions</h2>
    ${found.length > 0 && html`<p class="muted">Each pair of dimensions turns with the position, at
      a speed of its own. A wavelength is the number of tokens of one turn.</p>`}
    ${found.map(([name, wavelengths]) => html`<${Wavelengths} key=${name} name=${name}
      wavelengths=${wavelengths} context=${model.max_model_len} />`)}
    ${hasWindows && html`<${Windows} attention=${model.attention} context=${model.max_model_len} />`}
  </section>`;
}

function Caps({ model }) {
  const caps = new Set(Object.values(model.attention).map(({ softcap }) => softcap));
  const curves = [...caps].filter((cap) => cap !== null).map((cap) => ["Attention scores", cap]);
  for (const box of model.boxes) {
    if (box.kind === "softcap") curves.push(["Logits", Number(box.detail)]);
  }
  if (!curves.length) return null;
  return html`<section class="panel"><h2>Softcaps</h2>
    ${curves.map(([title, cap]) => html`<${Softcap} key=${title} title=${title} cap=${cap} />`)}
  </section>`;
}

function Memory({ entries }) {
  const shown = entries.filter(({ planned, measured }) => planned || measured);
  if (!shown.length) return null;
  const sum = (name) => shown.reduce((total, entry) => total + (entry[name] ?? 0), 0);
  const most = Math.max(...shown.flatMap(({ planned, measured }) => [planned, measured ?? 0]));
  return html`<section class="panel"><h2>Memory</h2>
    <p class="muted">Calculated from shapes before loading, and measured afterwards.</p>
    <div class="scroll" tabindex="0" role="region" aria-label="Memory"><table>
      <thead><tr><th scope="col">use</th><th scope="col" class="number">calculated</th>
        <th scope="col" class="number">measured</th><td /></tr></thead>
      <tbody>${shown.map(({ name, planned, measured }) => html`<tr key=${name}>
        <th scope="row">${name}</th><td class="number">${bytes(planned)}</td>
        <td class="number">${measured === null ? "–" : bytes(measured)}</td>
        <td class="md-wide"><span class="md-bar" aria-hidden="true">
          <span style=${{ width: `${(100 * (measured ?? planned)) / most}%` }} /></span></td></tr>`)}
      <tr><th scope="row">in all</th><td class="number">${bytes(sum("planned"))}</td>
        <td class="number">${bytes(sum("measured"))}</td><td /></tr>
      </tbody></table></div>
  </section>`;
}

function Bits({ uneven }) {
  return html`<section class="panel"><h2>The same bits?</h2>
    ${uneven
      ? html`<p>Not always: ${uneven.why}. So the last bits of a request's logits depend on the other
          requests in its steps, and two nearly equal tokens may swap.</p>
        <p>To prevent it, ${uneven.cure}.</p>`
      : html`<p>Yes. The bits of a request's logits do not depend on the other requests in its
          steps, as far as Penstock knows of this machine.</p>`}
  </section>`;
}

function Settings({ settings }) {
  if (settings === null) return null; // only an admin sees them
  return html`<section class="panel"><h2>Settings</h2>
    ${settings.length === 0 && html`<p>All settings have their defaults.</p>`}
    ${settings.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Settings"><table>
      <thead><tr>${["flag", "value", "default"].map((name) => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
      <tbody>${settings.map((setting) => html`<tr key=${setting.flag}>
        <th scope="row"><code>${setting.flag}</code></th><td class="md-value">${setting.value}</td>
        <td class="muted">${setting.default || "–"}</td></tr>`)}</tbody></table></div>`}
  </section>`;
}

function Config({ config }) {
  return html`<section class="panel"><h2>Configuration</h2>
    <details><summary>What the model's file reads from config.json</summary>
      <div class="scroll" tabindex="0" role="region" aria-label="Configuration"><table><tbody>
        ${Object.entries(config).map(([name, value]) => html`<tr key=${name}>
          <th scope="row">${name}</th><td class="md-value">${value}</td></tr>`)}
      </tbody></table></div>
    </details>
  </section>`;
}

