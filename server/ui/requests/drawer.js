// Waterfall: why one request took its time. A drawer beside any answer.

import { get } from "../api.js";
import { saveJson } from "../files.js";
import { html, useEffect, useState, useStyle } from "../html.js";
import { hrefOf, route } from "../router.js";
import { duration, number } from "../text.js";
import {
  count, imagesLine, isRough, nameOf, neighbourName, partsOf, shareOf, sumLine,
} from "./format.js";
import { StepRow, StepTable } from "./steps.js";

const MOST_COSTS = 8;

/** `params` has `request`, an x-request-id, or `answer`, the id of an answer of the chat. */
export default function Waterfall({ params }) {
  useStyle("requests/drawer.css");
  const [report, setReport] = useState(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const stop = new AbortController();
    setReport(null);
    setProblem("");
    load(params).then(
      (found) => stop.signal.aborted || setReport(found),
      (error) => stop.signal.aborted || setProblem(error.message),
    );
    return () => stop.abort();
  }, [params.request, params.answer]);
  return html`<div class="wf">
    <h2>Why this time</h2>
    ${problem && html`<p class="wf-note" role="alert">${problem}</p>`}
    ${!problem && !report && html`<p class="wf-note" role="status">Loading…</p>`}
    ${report && html`<${Report} report=${report} />`}
  </div>`;
}

const pathOf = (id) => `/ui/api/requests/${encodeURIComponent(id)}`;

/** The x-request-id that the parameters name. */
async function requestOf(params) {
  if (params.request) return params.request;
  const { answerOf } = await import("../chat/answers.js");
  const answer = await answerOf(params.answer);
  if (!answer?.requestId) throw new Error("This answer has no request id, so its time is not known.");
  return answer.requestId;
}

/** The report of a request. */
async function load(params) {
  return get(pathOf(await requestOf(params)));
}

function Report({ report }) {
  const outcome = report.error === null ? "" : `aborted: ${report.error}`;
  return html`
    <p class="wf-id"><code>${report.id}</code> ${outcome && html`<strong>${outcome}</strong>`}</p>
    <p class="wf-sum">${sumLine(report)}</p>
    <${Parts} report=${report} />
    ${report.choices.filter(({ images }) => images).map(({ index, images }) => html`
      <p key=${index} class="wf-images">${report.choices.length > 1 && `Choice ${index}: `}
        ${imagesLine(images)}</p>`)}
    <${StepRow} report=${report} />
    <${Costs} who=${report.who} />
    ${report.choices.length > 1 && html`<${Choices} choices=${report.choices} />`}
    <${Fit} fit=${report.fit} />
    <div class="wf-actions">
      <button type="button" onClick=${() => download(report.id)}>Download trace (JSON)</button>
      <span class="wf-note">Perfetto (ui.perfetto.dev) and chrome://tracing open it.</span>
    </div>
    <${StepTable} steps=${report.steps} />
  `;
}

/** The bar of parts, and a legend with each part's time and share. */
function Parts({ report }) {
  const parts = partsOf(report);
  const shown = parts.filter(([name]) => report.parts[name] > 0);
  const total = shown.reduce((sum, [name]) => sum + report.parts[name], 0) || 1;
  return html`<section aria-label="Parts of the time">
    <div class="wf-bar" aria-hidden="true">
      ${shown.map(([name]) => {
        const width = `${(100 * report.parts[name]) / total}%`;
        return html`<span key=${name} class=${`wf-${name}`} style=${{ width }} />`;
      })}
    </div>
    <dl class="wf-legend">
      ${parts.map(
        ([name, meaning]) => html`<div key=${name} title=${meaning}>
          <dt><span class=${`wf-swatch wf-${name}`} aria-hidden="true" />${nameOf(name)}</dt>
          <dd>${duration(report.parts[name])}${" "}<small>${shareOf(report.parts[name], report.wall_ms)}</small></dd>
        </div>`,
      )}
    </dl>
  </section>`;
}

/** Other requests, with what each has cost this one. */
function Costs({ who }) {
  if (!who.length) return html`<p class="wf-note">No other request shared its steps.</p>`;
  const named = who.filter(([id]) => id !== null).slice(0, MOST_COSTS);
  const rest = who.filter((entry) => !named.includes(entry));
  const most = Math.max(...who.map(([, cost, , queue]) => cost + queue), 1e-9);
  const rows = named.map((entry) => html`<${Cost} key=${entry[0]} entry=${entry} most=${most} />`);
  if (rest.length) {
    const sum = (place) => rest.reduce((total, entry) => total + entry[place], 0);
    const entry = [null, sum(1), null, sum(3), sum(4), null];
    rows.push(html`<${Cost} key="rest" entry=${entry} most=${most} />`);
  }
  return html`<section>
    <h3>Who cost what</h3>
    <div class="wf-scroll" tabindex="0" role="region" aria-label="Who cost what">
      <table class="wf-table">
        <thead><tr>
          ${["request", "prompt", "decodes", "in its steps", "in the queue"].map(
            (name) => html`<th scope="col" key=${name}>${name}</th>`,
          )}
          <td />
        </tr></thead>
        <tbody>${rows}</tbody>
      </table>
    </div>
  </section>`;
}

function Cost({ entry: [id, cost, prompt, queue, decodes, requestId], most }) {
  const width = `${(100 * (cost + queue)) / most}%`;
  const name = neighbourName(id, requestId);
  return html`<tr>
    <th scope="row">${requestId ? html`<a href=${linkTo(requestId)}>${name}</a>` : name}</th>
    <td>${prompt === null ? "–" : `${prompt.toLocaleString("en")} tok`}</td>
    <td>${decodes.toLocaleString("en")}</td>
    <td>${duration(cost)}</td>
    <td>${duration(queue)}</td>
    <td class="wf-cost"><span class="wf-others" style=${{ width }} /></td>
  </tr>`;
}

function linkTo(request) {
  return hrefOf(route.value.page, { drawer: "waterfall", request });
}

/** When each choice of a request passed each stage. */
function Choices({ choices }) {
  const stages = ["admitted", "first_token", "last_token"];
  const time = (ms) => (ms === null ? "–" : duration(ms));
  return html`<section>
    <h3>${count(choices.length, "choice")}</h3>
    <div class="wf-scroll" tabindex="0" role="region" aria-label="Choices">
      <table class="wf-table">
        <thead><tr>
          ${["choice", "admitted", "first token", "last token", "tokens", "finish"].map(
            (name) => html`<th scope="col" key=${name}>${name}</th>`,
          )}
        </tr></thead>
        <tbody>
          ${choices.map(
            (choice) => html`<tr key=${choice.index}>
              <th scope="row">${choice.index}</th>
              ${stages.map((stage) => html`<td key=${stage}>${time(choice[stage])}</td>`)}
              <td>${choice.generated_tokens}</td>
              <td>${choice.finish ?? "aborted"}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
  </section>`;
}

function Fit({ fit }) {
  if (fit.r2 === null) return html`<p class="wf-note">No steps are recorded to fit a model to.</p>`;
  const stalls = fit.stalls ? `, ${count(fit.stalls, "stall")} left out` : "";
  return html`<p class="wf-fit">
    fit: ${count(fit.steps, "step")}${stalls}, R² ${number(fit.r2, 2)}${" "}
    ${isRough(fit) && html`<strong class="wf-rough">rough here</strong>`}
    <br />a step takes ${duration(fit.base_ms)} + ${number(fit.prefill_us_per_token, 1)} µs for each
    prompt token + ${number(fit.decode_us_per_token, 1)} µs for each decode +
    ${" "}${number(fit.context_ns_per_key, 2)} ns for each key that a token attends to
  </p>`;
}

/** Save the trace events as a file. */
async function download(id) {
  saveJson(JSON.stringify(await get(`${pathOf(id)}?format=trace`)), `${id}.trace.json`);
}
