// The options of a chat: system prompt, parameters, tools, schema. Only what differs is sent.

import { html, useEffect, useState } from "../html.js";
import { hello } from "../store.js";
import { ownSampling, parameters } from "../sampling.js";
import { Sheet } from "../sheet.js";
import { chatParameters, current, notice, refused, resetOptions, setOptions } from "./state.js";

/** The parameters that are always shown; the others of sampling and these are behind "More". */
const FIRST = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];
const MORE = [
  "min_tokens", "stop", "stop_token_ids", "bad_words", "logit_bias", "ignore_eos", "skip_special_tokens",
  "parallel_tool_calls", "tool_choice", "reasoning_effort", "priority", "cache_salt",
];

export function Settings({ isOpen, close }) {
  const [known, setKnown] = useState({});
  useEffect(() => {
    chatParameters().then(setKnown, (error) => { notice.value = error.message; });
  }, []);
  const { options } = current.value;
  const params = options.params ?? {};
  const set = (name, value) => {
    const { [name]: _, ...rest } = params;
    setOptions({ params: value === undefined ? rest : { ...rest, [name]: value } });
  };
  const fields = (names) => names.filter((name) => Object.hasOwn(known, name)).map((name) => html`
    <${Parameter} key=${current.value.id + name} name=${name} about=${known[name]}
      value=${params[name]} set=${(value) => set(name, value)} />`);
  const parts = [...Object.values(options), refused.value];
  const sampling = parameters().map((one) => one.name).filter((name) => !FIRST.includes(name));
  const isChanged = parts.some((value) => value && Object.keys(value).length);
  return html`<${Sheet} as="aside" class="chat-settings" aria-label="Settings" isOpen=${isOpen}
    close=${close}>
    <${Area} name="system" label="System prompt" rows="3" hint="You are …" />
    <h2>Parameters</h2>
    ${fields(FIRST)}
    <details><summary>More parameters</summary>${fields([...sampling, ...MORE])}</details>
    <details open=${Boolean(options.schema)}><summary>JSON schema of the answer</summary>
      <${Area} name="schema" label="JSON schema" rows="6" hint='{"type": "object", …}' isCode />
    </details>
    <details open=${Boolean(options.tools)}><summary>Tools</summary>
      <p class="muted chat-hint">A JSON list, as in OpenAI's API. You answer the calls by hand.</p>
      <${Area} name="tools" label="List of tools" rows="6" isCode
        hint='[{"type": "function", "function": {"name": …}}]' />
    </details>
    <details open=${Boolean(options.templateOptions)}><summary>Template options</summary>
      <${Area} name="templateOptions" label="Template options" rows="2" isCode
        hint='{"enable_thinking": false}' />
    </details>
    <p class="muted chat-hint">Kept in this browser for ${hello.value?.model.id}.</p>
    <button type="button" disabled=${!isChanged} onClick=${resetOptions}>Reset all settings</button>
  </${Sheet}>`;
}

/** A text among the options of a chat. */
function Area({ name, label, rows, hint, isCode = false }) {
  const value = current.value.options[name] ?? "";
  const problem = isCode && value.trim() ? jsonProblem(value) : "";
  return html`<label class="chat-field">
    <span>${label}</span>
    <textarea class=${isCode ? "mono" : ""} rows=${rows} placeholder=${hint} value=${value}
      spellcheck=${!isCode} onInput=${(event) => setOptions({ [name]: event.target.value })} />
    ${problem && html`<small class="warn" role="status">${problem}</small>`}
  </label>`;
}

function jsonProblem(text) {
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return error.message;
  }
}

/** What happens without a parameter that has no default. */
const WITHOUT = { seed: "random", max_tokens: "until it ends" };

const title = (name) => name.replaceAll("_", " ").replace(/^./, (letter) => letter.toUpperCase());

/** One parameter. An empty field means the default, which is not sent. */
function Parameter({ name, about, value, set }) {
  const [draft, setDraft] = useState(null); // the text that is being typed
  const { [name]: rejected, ...others } = refused.value;
  const own = ownSampling()[name];
  const standard = own ?? hello.value?.defaults[name] ?? about.default;
  const change = (event) => {
    const text = event.target.value;
    try {
      set(readField(text, about));
      refused.value = others;
    } catch (error) {
      refused.value = { ...others, [name]: { text, problem: error.message } };
    }
    setDraft(text);
  };
  const leave = () => setDraft(null);
  const problem = rejected?.problem ?? "";
  const common = {
    name, title: about.description, "aria-invalid": problem ? "true" : undefined,
    onInput: change, onBlur: leave,
  };
  let field;
  if (about.type === "boolean") {
    field = html`<select ...${common} value=${value === undefined ? "" : String(value)}>
      <option value="">${standard ? "yes" : "no"} (default)</option>
      <option value=${String(!standard)}>${standard ? "no" : "yes"}</option>
    </select>`;
  } else {
    const shownDefault = WITHOUT[name] ?? standard ?? "none";
    field = html`<input ...${common} type="text" autocomplete="off" inputmode=${modeOf(about)}
      placeholder=${String(shownDefault)} value=${rejected?.text ?? draft ?? shownValue(value)} />`;
  }
  return html`<label class="chat-field chat-parameter" data-changed=${value !== undefined}>
    <span>${title(name)}</span>${field}
    ${problem && html`<small class="warn" role="status">${problem}</small>`}
    ${own !== undefined && value === undefined && html`<small class="muted">Penstock's ${own}: the
      model gives none</small>`}
  </label>`;
}

const isNumeric = ({ type }) => type === "number" || type === "integer";
const modeOf = (about) => (isNumeric(about) ? "decimal" : "text");

function shownValue(value) {
  if (value === undefined) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** The value of a field's text, or undefined if it is empty. Throws an Error that says the range. */
function readField(text, about) {
  if (!text.trim()) return undefined;
  if (about.type === "boolean") return text === "true";
  if (!isNumeric(about)) return readOther(text, about);
  const value = Number(text.replace(",", "."));
  const { minimum = -Infinity, maximum = Infinity } = about;
  if (Number.isInteger(value) && !Number.isSafeInteger(value)) {
    throw new Error("This browser's numbers have 53 bits; a smaller one, please.");
  }
  if (!Number.isFinite(value) || (about.type === "integer" && !Number.isInteger(value))) {
    throw new Error(about.type === "integer" ? "A whole number, please." : "A number, please.");
  }
  if (value < minimum || value > maximum) {
    throw new Error(`From ${minimum} to ${maximum.toLocaleString("en")}.`);
  }
  return value;
}

/** Lists and objects are JSON; a text that is not JSON is taken as it is. */
function readOther(text, about) {
  try {
    const value = JSON.parse(text);
    return about.type === "string" ? text : value;
  } catch {
    if (about.type === "array" || about.type === "object") throw new Error("This must be JSON.");
    return text;
  }
}
