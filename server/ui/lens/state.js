// State: what each recurrent layer keeps behind every token, by head.
import { html } from "../html.js";
import { visible } from "../text.js";
import { Chart } from "./chart.js";
import { useTrace } from "./data.js";
import { HeatMap } from "./heat.js";
import { Choice, FigureTable, Scale } from "./parts.js";
import { figure, piecesOf } from "./text.js";

const FIGURES = [
  { part: "norms", name: "norm", meaning: "the norm of the state behind the token" },
  { part: "strengths", name: "write strength", mark: "o", hue: 1,
    meaning: "the factor on what the token writes" },
  { part: "decays", name: "decay", mark: "x", hue: 2, meaning: "the factor on the state before it" },
];

const MANY = 32; // heads whose cells are small

const nameOf = ({ layer }) => (layer === null ? "before layer 0" : String(layer));

export default function State({ report, body, params, update }) {
  const traces = report.states;
  const trace = traces.find((one) => nameOf(one) === params.layer) ?? traces[0];
  const { value: found, error } = useTrace(report, body, trace);
  const name = nameOf(trace);
  return html`
    <div class="lens-row">
      <${Choice} label="Layer" value=${name}
        options=${traces.map((one) => [nameOf(one), nameOf(one)])}
        pick=${(layer) => update({ layer })} />
      <${Picks} found=${found} params=${params} update=${update} />
    </div>
    ${error && html`<p class="warn" role="alert">${error}</p>`}
    ${!found && !error && html`<p class="muted" role="status">Loading layer ${name}…</p>`}
    ${found && html`<${Layer} key=${name} report=${report} found=${found} params=${params}
      update=${update} />`}`;
}

/** The figures that a layer has: a convolution has no gates. */
const figuresOf = (found) => FIGURES.filter(({ part }) => found[part]);

const figureOf = (found, params) => figuresOf(found).find(({ part }) => part === params.figure)
  ?? FIGURES[0];

function headOf(found, params) {
  return Math.max(0, Math.min(found.heads - 1, Number.parseInt(params.head, 10) || 0));
}

function Picks({ found, params, update }) {
  if (!found || found.heads === 1) return null;
  const heads = found.norms.map((_, head) => [String(head), `H${head}`]);
  return html`
    <${Choice} label="Map of the" value=${figureOf(found, params).part}
      options=${figuresOf(found).map(({ part, name }) => [part, name])}
      pick=${(part) => update({ figure: part })} />
    <${Choice} label="Head" value=${String(headOf(found, params))} options=${heads}
      pick=${(head) => update({ head })} />`;
}

function Layer({ report, found, params, update }) {
  const tokens = piecesOf(report, report.tokens);
  const head = headOf(found, params);
  if (found.heads === 1) {
    return html`<div class="lens-two">
      <${Head} found=${found} head=${0} tokens=${tokens} />
      ${!found.decays && html`<p class="muted">A short convolution keeps the last inputs. The
        figure is their norm.</p>`}
    </div>`;
  }
  return html`<div class="lens-two">
    <${Heads} found=${found} shown=${figureOf(found, params)} head=${head} tokens=${tokens}
      update=${update} />
    <${Head} found=${found} head=${head} tokens=${tokens} />
  </div>`;
}

/** One figure of all heads; a click or Enter chooses a head. */
function Heads({ found, shown, head, tokens, update }) {
  const values = found[shown.part];
  const most = Math.max(...values.map((row) => Math.max(...row)), Number.MIN_VALUE);
  const readOut = (row, column) => (
    `H${row} ${visible(tokens[column])} (${column}): ${shown.name} ${figure(values[row][column])}`);
  return html`<section aria-label="All heads">
    <h2>All heads <small class="muted">${shown.meaning}</small></h2>
    <${HeatMap} id=${values} rows=${found.heads} columns=${tokens.length}
      rowLabels=${values.map((_, row) => `H${row}`)} columnLabels=${tokens}
      largest=${found.heads > MANY ? 10 : 28} start=${[head, tokens.length - 1]} pinned=${head} readOut=${readOut}
      shadeAt=${(row, column) => Math.round((255 * values[row][column]) / most)}
      label=${`${shown.name} of heads: rows are heads, columns tokens`}
      onPin=${(row) => update({ head: String(row) })} />
    <${Scale} most=${figure(most)} text=${`${shown.name}; click or Enter chooses a head`} />
  </section>`;
}

/** The figures of one head over the tokens, as charts and as a table. */
function Head({ found, head, tokens }) {
  const figures = figuresOf(found);
  const axis = { xs: tokens.map((_, at) => String(at)), xTitle: "token",
    names: tokens.map((text, at) => `${at} ${visible(text)}`) };
  const lineOf = ({ part, name, mark = "o", hue = 4 }) => (
    { name, mark, hue, points: [...found[part][head].entries()] });
  const gates = figures.filter(({ part }) => part !== "norms");
  const title = found.heads > 1 ? ` of H${head}` : "";
  return html`<section aria-label="One head">
    <${Chart} label=${`State${title}`} series=${[lineOf(FIGURES[0])]} isLog=${true} ...${axis} />
    ${gates.length > 0 && html`<${Chart} label=${`Gates${title}`} series=${gates.map(lineOf)}
      ...${axis} />`}
    <${FigureTable} id="lens-state" summary="Figures of the head as a table" label="State"
      heads=${["position", "token", ...figures.map(({ name }) => name)]}
      rows=${tokens.map((text, at) => [at, visible(text),
        ...figures.map(({ part }) => figure(found[part][head][at]))])} />
  </section>`;
}
