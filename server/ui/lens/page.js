// Lens: what the model does inside for one text, in tabs.
import { post } from "../api.js";
import { html, useEffect, useRef, useState, useStyle } from "../html.js";
import { boxesOf } from "../images.js";
import { navigate } from "../router.js";
import { hello } from "../store.js";
import { visible } from "../text.js";
import Attention from "./attention.js";
import { bodyOfAnswer, useAnswer, useLens } from "./data.js";
import Embeddings from "./embeddings.js";
import Logit from "./logit.js";
import Picture from "./picture.js";
import Predictions from "./predictions.js";
import Residual from "./residual.js";
import State from "./state.js";
import { piecesOf } from "./text.js";

const TABS = [
  ["predictions", "Predictions", Predictions],
  ["attention", "Attention", Attention],
  ["picture", "Picture", Picture],
  ["logit", "Logit lens", Logit],
  ["residual", "Residual", Residual],
  ["state", "State", State],
  ["embeddings", "Embeddings", Embeddings],
];
const EXAMPLE = "I want to move";
const SOURCE = "Dan loves icecream";
// Parameters that belong to one text.
const OF_THE_TEXT = { row: "", token: "", from: "", words: "", answer: "" };

/** `params`: tab, text or answer, source, and what the tabs show. */
export default function Lens({ params }) {
  useStyle("lens/page.css");
  const facts = hello.value;
  const update = (changes) => navigate("lens", { ...params, ...changes }, { replace: true });
  const chosen = useBody(params, facts);
  const { value: report, error, isLoading } = useLens(chosen.body);
  if (!facts) return html`<p class="empty muted">Loading…</p>`;
  const problem = chosen.error || error;
  return html`<div class="page lens">
    <h1>Lens</h1>
    <${Input} key=${params.answer ?? ""} params=${params} facts=${facts} update=${update} />
    ${problem && html`<p class="warn" role="alert">${problem}</p>`}
    ${isLoading && html`<p class="muted" role="status">Looking…</p>`}
    ${report && html`<${Tokens} report=${report} omitted=${chosen.omitted} facts=${facts}
        answerFrom=${chosen.answerFrom} />
      <${Tabs} report=${report} body=${chosen.body} params=${params} update=${update}
        facts=${facts} answerFrom=${chosen.answerFrom} pictures=${chosen.pictures} />`}
    ${!report && !problem && !isLoading && html`<p class="empty muted">Give a text to see the
      model's predictions, attention and residual stream for it. It is computed between the steps
      of other requests; nothing of it enters the cache.</p>`}
  </div>`;
}

/** The request body for the parameters of the URL: null until there is a text. */
function useBody(params, facts) {
  const { answer, text, source } = params;
  const fromChat = useAnswer(answer && facts ? answer : null, () => bodyOfAnswer(answer, facts));
  if (answer) return { body: null, ...fromChat.value, error: fromChat.error };
  if (!facts) return { body: null };
  if (facts.ready.kind !== "encoder-decoder") return { body: text ? { text } : null };
  return { body: source ? { source, text: text ?? "" } : null };
}

function Input({ params, facts, update }) {
  const isTranslation = facts.ready.kind === "encoder-decoder";
  const first = useRef(null);
  const second = useRef(null);
  const [problem, setProblem] = useState("");
  const example = isTranslation ? SOURCE : EXAMPLE;

  async function submit(event) {
    event.preventDefault();
    setProblem("");
    const given = first.current.value;
    if (!isTranslation) return update({ ...OF_THE_TEXT, text: given });
    try {
      const text = second.current.value || (await translate(given));
      second.current.value = text;
      return update({ ...OF_THE_TEXT, source: given, text });
    } catch (error) {
      return setProblem(error.message);
    }
  }

  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey) submit(event);
  };
  const given = isTranslation ? params.source : params.text;
  useEffect(() => {
    if (given !== undefined) first.current.value = given;
    if (isTranslation && params.text !== undefined) second.current.value = params.text;
  }, [given, params.text]);
  return html`<form class="lens-row lens-input" onSubmit=${submit}>
    <label class="lens-grow">${isTranslation ? "Source" : "Text"}
      <textarea rows="2" ref=${first} onKeyDown=${onKey}
        defaultValue=${given ?? (params.answer ? "" : example)} /></label>
    ${isTranslation && html`<label class="lens-grow">Target (empty: the model translates)
      <textarea rows="2" ref=${second} onKeyDown=${onKey}
        defaultValue=${params.text ?? ""} /></label>`}
    <button class="primary">Look</button>
    ${params.answer && html`<p class="muted lens-note">Shows this answer with its prompt.</p>`}
    ${problem && html`<p class="warn" role="alert">${problem}</p>`}
  </form>`;
}

/** The model's own translation of a source. */
async function translate(source) {
  const body = { prompt: source, max_tokens: 64, temperature: 0 };
  return (await post("/v1/completions", body)).choices[0].text;
}

/** The tokens that the model reads. */
function Tokens({ report, omitted, facts, answerFrom }) {
  const box = useRef(null);
  useEffect(() => {
    const first = box.current.querySelector(".lens-answer");
    if (first) box.current.scrollTop = first.offsetTop - box.current.offsetTop;
  }, [report]);
  const strip = (ids) => {
    const texts = piecesOf(report, ids);
    const isText = ids === report.tokens;
    return boxesOf(isText ? report.images : [], ids.length).map(({ begin, end, place }) => {
      if (place !== undefined) {
        return html`<span key=${begin} class="lens-image"
          title=${`${begin} to ${end - 1}`}>image ${place + 1}</span>`;
      }
      return html`<span key=${begin} class=${isText && begin === answerFrom ? "lens-answer" : ""}
        title=${`${begin}: id ${ids[begin]}`}>${visible(texts[begin])}</span>`;
    });
  };
  const count = `${report.tokens.length} of at most ${facts.ready.max_lens_tokens} tokens`;
  return html`<div class="lens-tokens mono" aria-label="Tokens" role="group" ref=${box}
    tabindex="0">
    ${report.source.length > 0
      && html`<p class="lens-strip">${strip(report.source)}<small>→</small></p>`}
    <p class="lens-strip">${strip(report.tokens)}<small>${count}</small></p>
    ${omitted > 0
      && html`<p class="muted">The last ${omitted} tokens of the answer do not fit.</p>`}
  </div>`;
}

function Tabs({ report, body, params, update, facts, answerFrom, pictures }) {
  const hidden = [!report.states && "state", !report.images.length && "picture"];
  const all = TABS.filter(([id]) => !hidden.includes(id));
  const first = facts.ready.kind === "encoder" ? all[1] : all[0]; // an encoder predicts nothing
  const shown = all.find(([id]) => id === params.tab) ?? first;
  const tabs = useRef(null);
  const wasMoved = useRef(false);
  useEffect(() => {
    if (answerFrom) tabs.current.scrollIntoView({ block: "start" }); // behind the text of the form
  }, [report]);
  useEffect(() => {
    if (wasMoved.current) tabs.current.querySelector("[aria-selected=true]").focus();
    wasMoved.current = false;
  }, [shown]);
  const onKey = (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    wasMoved.current = true;
    update({ tab: all[(all.indexOf(shown) + move + all.length) % all.length][0] });
  };
  return html`
    <div class="lens-tabs" role="tablist" aria-label="Views" ref=${tabs} onKeyDown=${onKey}>
      ${all.map(([id, title]) => html`<button type="button" role="tab" key=${id}
        id=${`lens-tab-${id}`} aria-controls="lens-panel" tabindex=${id === shown[0] ? 0 : -1}
        aria-selected=${id === shown[0] ? "true" : "false"}
        onClick=${() => update({ tab: id })}>${title}</button>`)}
    </div>
    <div class="panel" role="tabpanel" id="lens-panel" aria-labelledby=${`lens-tab-${shown[0]}`}>
      <${shown[2]} report=${report} body=${body} params=${params} update=${update} facts=${facts}
        answerFrom=${answerFrom} pictures=${pictures} />
    </div>`;
}
