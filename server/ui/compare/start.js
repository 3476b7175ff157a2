// A comparison that the page makes: the same prompts, answered by two models or with other settings.

import { get, post } from "../api.js";
import { html, useEffect, useRef, useState } from "../html.js";
import { withSampling } from "../sampling.js";
import { hello } from "../store.js";

const MOST_TOKENS = 128;
const MOST_PROMPTS = 32;
const FORMAT = "penstock-comparison";

/** One side: a model or adapter, a system prompt, and values; an empty value is the default. */
const emptySide = () => ({ model: hello.value.model.id, system: "", temperature: "" });

const labelOf = ({ model, system, temperature }) => [
  model, temperature !== "" && `T=${temperature}`, system.trim() && `“${system.trim().slice(0, 24)}”`,
].filter(Boolean).join(" · ");

/** The answer of one side: `{text, tokens, pieces, finish}`. */
async function answerOf(side, prompt, { seed, maxTokens, signal }) {
  const params = withSampling(side.temperature === "" ? {} : { temperature: Number(side.temperature) });
  const common = {
    model: side.model, ...params, seed, max_tokens: maxTokens, return_token_ids: true,
  };
  const system = side.system.trim() ? [{ role: "system", content: side.system }] : [];
  const messages = [...system, { role: "user", content: prompt }];
  const isChat = hello.value.has_template;
  const answer = isChat
    ? await post("v1/chat/completions", { ...common, messages }, { signal })
    : await post("v1/completions", { ...common, prompt: side.system + prompt }, { signal });
  const [choice] = answer.choices;
  const tokens = choice.token_ids ?? [];
  const { texts } = await post("detokenize", { tokens, return_texts: true }, { signal });
  const text = isChat ? choice.message.content ?? "" : choice.text;
  return { text, tokens, pieces: texts, finish: choice.finish_reason };
}

/** The index of the first token that differs, or null if the answers are equal. */
function partsAt(first, other) {
  const index = first.tokens.findIndex((token, place) => token !== other.tokens[place]);
  if (index >= 0) return index;
  return first.tokens.length === other.tokens.length ? null : first.tokens.length;
}

/** Answer all prompts; both sides of a prompt at once. The document is that of `penstock compare`. */
async function compare(sides, prompts, options, progress) {
  const document = {
    format: FORMAT, version: 1, models: sides.map(labelOf), same_tokens: true,
    settings: { seed: options.seed, max_tokens: options.maxTokens }, prompts: [],
  };
  for (const [number, prompt] of prompts.entries()) {
    progress(`Prompt ${number + 1} of ${prompts.length}…`);
    const [first, other] = await Promise.all(sides.map((side) => answerOf(side, prompt, options)));
    const answers = [{ ...first, parts_at: null }, { ...other, parts_at: partsAt(first, other) }];
    document.prompts.push({ prompt, answers, distances: [] });
  }
  return document;
}

/** The names that the server answers to: its model, and its LoRA adapters. */
function useModels() {
  const [names, setNames] = useState([hello.value.model.id]);
  useEffect(() => {
    get("v1/models").then(({ data }) => setNames(data.map(({ id }) => id)), () => {});
  }, []);
  return names;
}

export function Starter({ show }) {
  const names = useModels();
  const [sides, setSides] = useState(() => [emptySide(), emptySide()]);
  const [prompts, setPrompts] = useState(
    () => hello.value.starters.map(({ prompt }) => prompt.trim().split("\n", 1)[0]).join("\n"),
  );
  const [state, setState] = useState({ progress: "", problem: "" });
  const stop = useRef(null);
  const change = (place, part) => {
    setSides(sides.map((side, index) => (index === place ? { ...side, ...part } : side)));
  };
  const start = async (event) => {
    event.preventDefault();
    const lines = prompts.split("\n").map((line) => line.trim()).filter(Boolean);
    const { seed, most } = event.target.elements;
    const problem = lines.length ? "" : "Write at least one prompt, one a line.";
    const isTooMany = lines.length > MOST_PROMPTS && `At most ${MOST_PROMPTS} prompts, please.`;
    if (problem || isTooMany) return setState({ progress: "", problem: problem || isTooMany });
    stop.current = new AbortController();
    const options = {
      seed: Number(seed.value), maxTokens: Number(most.value), signal: stop.current.signal,
    };
    setState({ progress: "…", problem: "" });
    try {
      const progress = (text) => setState({ progress: text, problem: "" });
      show(await compare(sides, lines, options, progress));
      setState({ progress: "", problem: "" });
    } catch (error) {
      setState({ progress: "", problem: error.name === "AbortError" ? "" : error.message });
    }
    return undefined;
  };
  return html`<form class="cmp-start panel" onSubmit=${start} aria-label="Ask both">
    <div class="cmp-sides">
      ${sides.map((side, place) => html`<${Side} key=${place} side=${side} names=${names}
        title=${place ? "Second" : "First"} change=${(part) => change(place, part)} />`)}
    </div>
    <label>Prompts, one a line
      <textarea rows="4" value=${prompts} onInput=${(event) => setPrompts(event.target.value)} /></label>
    <div class="cmp-open">
      <label>Seed <input name="seed" type="number" min="0" step="1" value="0" required /></label>
      <label>Max tokens <input name="most" type="number" min="1" step="1" value=${MOST_TOKENS}
        required /></label>
      ${state.progress
        ? html`<button type="button" onClick=${() => stop.current.abort()}>Stop</button>
          <span role="status" class="muted">${state.progress}</span>`
        : html`<button class="primary">Compare</button>`}
    </div>
    ${state.problem && html`<p class="warn" role="alert">${state.problem}</p>`}
  </form>`;
}

function Side({ side, names, title, change }) {
  const given = withSampling({}).temperature ?? hello.value.defaults.temperature ?? 1;
  return html`<fieldset>
    <legend>${title}</legend>
    <label>Model <select value=${side.model} aria-label=${`${title} model`}
      onChange=${(event) => change({ model: event.target.value })}>
      ${names.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
    <label>Temperature <input type="number" min="0" max="2" step="any" value=${side.temperature}
      placeholder=${given} aria-label=${`${title} temperature`}
      onInput=${(event) => change({ temperature: event.target.value })} /></label>
    <label>System prompt <input value=${side.system} aria-label=${`${title} system prompt`}
      onInput=${(event) => change({ system: event.target.value })} /></label>
  </fieldset>`;
}
