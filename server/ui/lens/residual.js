// Residual stream: how much each sublayer changes it, and how it grows.
import { html, useState } from "../html.js";
import { Chart } from "./chart.js";
import { exact, piecesOf, visible } from "./text.js";

const KINDS = { attention: ["o", 1], cross: ["+", 3], mlp: ["x", 2] };

export default function Residual({ report, params, update }) {
  const stacks = report.residual.map(({ stack }) => stack);
  const stack = stacks.includes(params.stream) ? params.stream : stacks.at(-1);
  const found = report.residual.find((one) => one.stack === stack);
  const ids = stack === "encoder" && report.source.length ? report.source : report.tokens;
  const tokens = piecesOf(report, ids);
  const leavesOut = params.first === "0" && tokens.length > 1;
  const token = params.token === undefined || params.token === "" ? null
    : Math.min(Number.parseInt(params.token, 10) || 0, tokens.length - 1);
  const choice = { token, leavesOut };
  return html`
    <div class="lens-row">
      ${stacks.length > 1 && html`<label>Stream of the${" "}
        <select value=${stack} onChange=${(event) => update({ stream: event.target.value, token: "" })}>
          ${stacks.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>`}
      <label>Tokens${" "}
        <select value=${token === null ? "" : String(token)}
          onChange=${(event) => update({ token: event.target.value })}>
          <option value="">all</option>
          ${tokens.map((text, at) => html`<option value=${String(at)} key=${at}>${at} ${visible(text)}</option>`)}
        </select></label>
      <label><input type="checkbox" checked=${leavesOut} disabled=${token !== null}
        onChange=${(event) => update({ first: event.target.checked ? "0" : "" })} /> leave out position 0</label>
    </div>
    <div class="lens-two">
      <${Updates} updates=${found.updates} choice=${choice} />
      <${Norms} norms=${found.norms} choice=${choice} />
    </div>`;
}

/** The update scale that is shown: of one token, of all, or of all but the first. */
function scaleOf(update, { token, leavesOut }) {
  if (token !== null) return update.scales[token];
  return leavesOut ? update.scale_after_first : update.scale;
}

/** The root mean square over the tokens that are shown. */
function rmsOf(values, { token, leavesOut }) {
  if (token !== null) return values[token];
  const shown = leavesOut ? values.slice(1) : values;
  return Math.sqrt(shown.reduce((sum, value) => sum + value * value, 0) / shown.length);
}

function Updates({ updates, choice }) {
  const layers = Math.max(...updates.map(({ layer }) => layer)) + 1;
  const kinds = Object.keys(KINDS).filter((kind) => updates.some((one) => one.kind === kind));
  const series = kinds.map((kind) => ({
    name: kind,
    mark: KINDS[kind][0],
    hue: KINDS[kind][1],
    points: updates.filter((one) => one.kind === kind).map((one) => [one.layer, scaleOf(one, choice)]),
  }));
  const xs = Array.from({ length: layers }, (_, layer) => `${layer}`);
  return html`<section aria-label="Update scale">
    <${Chart} label="Update scale" series=${series} xs=${xs} xTitle="layer" />
    <p class="muted">√(σr² / (σr² + σs²)): σr of what a sublayer adds, σs of the stream before it.</p>
    <${Table} id="lens-updates" name="Update scale" heads=${["layer", "sublayer", "update scale"]}
      rows=${updates.map((one) => [one.layer, one.kind, exact(scaleOf(one, choice))])} />
  </section>`;
}

function Norms({ norms, choice }) {
  const figures = norms.map(({ name, before, after }) => [name, rmsOf(before, choice), rmsOf(after, choice)]);
  const series = [["before the norm", "o", 1, 1], ["after the norm", "x", 2, 2]].map(
    ([name, mark, hue, column]) => ({ name, mark, hue, points: figures.map((row, at) => [at, row[column]]) }),
  );
  return html`<section aria-label="Size of the stream">
    <${Chart} label="RMS of the stream" series=${series} xs=${figures.map((_, at) => `${at}`)}
      isLog=${true} xTitle="norm" />
    <p class="muted">Root mean square over features and tokens, in the order of the norms.</p>
    <${Table} id="lens-norms" name="RMS of the stream" heads=${["norm", "before", "after"]}
      rows=${figures.map(([name, before, after]) => [name, exact(before), exact(after)])} />
  </section>`;
}

function Table({ id, name, heads, rows }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>${name} as a table</summary>
    ${isOpen && html`<div class="lens-scroll" tabindex="0" role="region" aria-label=${`Table: ${name}`}>
      <table class="lens-table" id=${id}><thead><tr>
        ${heads.map((head) => html`<th scope="col" key=${head}>${head}</th>`)}</tr></thead>
      <tbody>${rows.map((row, at) => html`<tr key=${at}>
        ${row.map((text, column) => (column ? html`<td key=${column}>${text}</td>`
          : html`<th scope="row" key=${column}>${text}</th>`))}</tr>`)}</tbody></table></div>`}
  </details>`;
}
