// Residual stream: how much each sublayer changes it, and how it grows.
import { html } from "../html.js";
import { visible } from "../text.js";
import { Chart } from "./chart.js";
import { Choice, FigureTable } from "./parts.js";
import { exact, piecesOf } from "./text.js";

const KINDS = { attention: ["o", 1], recurrent: ["+", 4], cross: ["+", 3], mlp: ["x", 2],
  "per-layer input": ["o", 4] };

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
  const named = tokens.map((text, at) => [String(at), `${at} ${visible(text)}`]);
  return html`
    <div class="lens-row">
      ${stacks.length > 1 && html`<${Choice} label="Stream of the" value=${stack}
        options=${stacks.map((name) => [name, name])}
        pick=${(name) => update({ stream: name, token: "" })} />`}
      <${Choice} label="Tokens" value=${token === null ? "" : String(token)}
        options=${[["", "all"], ...named]}
        pick=${(chosen) => update({ token: chosen })} />
      <label><input type="checkbox" checked=${leavesOut} disabled=${token !== null}
        onChange=${(event) => update({ first: event.target.checked ? "0" : "" })} />${" "}
        leave out position 0</label>
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
    points: updates.filter((one) => one.kind === kind)
      .map((one) => [one.layer, scaleOf(one, choice)]),
  }));
  const xs = Array.from({ length: layers }, (_, layer) => `${layer}`);
  return html`<section aria-label="Update scale">
    <${Chart} label="Update scale" series=${series} xs=${xs} xTitle="layer" />
    <p class="muted">√(σr² / (σr² + σs²)): σr of what a sublayer adds, σs of the stream before
      it.</p>
    <${FigureTable} id="lens-updates" summary="Update scale as a table" label="Update scales"
      heads=${["layer", "sublayer", "update scale"]}
      rows=${updates.map((one) => [one.layer, one.kind, exact(scaleOf(one, choice))])} />
  </section>`;
}

function Norms({ norms, choice }) {
  const before = norms.map((norm) => rmsOf(norm.before, choice));
  const after = norms.map((norm) => rmsOf(norm.after, choice));
  const series = [
    { name: "before the norm", mark: "o", hue: 1, points: [...before.entries()] },
    { name: "after the norm", mark: "x", hue: 2, points: [...after.entries()] },
  ];
  return html`<section aria-label="Size of the stream">
    <${Chart} label="RMS of the stream" series=${series} xs=${norms.map((_, at) => `${at}`)}
      isLog=${true} xTitle="norm" />
    <p class="muted">Root mean square over features and tokens, in the order of the norms.</p>
    <${FigureTable} id="lens-norms" summary="RMS of the stream as a table" label="Sizes"
      heads=${["norm", "before", "after"]}
      rows=${norms.map(({ name }, at) => [name, exact(before[at]), exact(after[at])])} />
  </section>`;
}
