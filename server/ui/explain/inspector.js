// The Inspector of one answer: a strip of its tokens, and one token's funnel and dice.

import { html, useEffect, useMemo, useRef, useState } from "../html.js";
import { hello } from "../store.js";
import { cutsOf } from "../sampling.js";
import { visible } from "../text.js";
import { explainOf, ownCandidate, surprise } from "./explain.js";
import { SwitchOff } from "./ablate.js";
import { CandidateTable } from "./candidates.js";
import { Experiments } from "./experiments.js";
import { settingsOf } from "./filter.js";

const MOST_SURPRISE = 8; // bits at which the colour is strongest
const DEEPEST = 45; // percent of amber: text stays readable on it
const MOVES = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };

/**
 * `answer` is one of the chat's. `fork(id, index, tokenId)` opens a branch; without it forking is
 * disabled. `token` is the index that is shown, and `onToken(index)` is called to show another.
 */
export function Inspector({ answer, token = 0, onToken, fork }) {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    let isCurrent = true;
    explainOf(answer).then(
      (explained) => isCurrent && setFound(explained),
      (error) => isCurrent && setProblem(error.message),
    );
    return () => { isCurrent = false; };
  }, [answer.id]);
  if (problem) return html`<p role="alert">${problem}</p>`;
  if (!found) return html`<p role="status" class="muted">Computing the answer once more…</p>`;
  const index = Math.max(0, Math.min(found.tokens.length - 1, token));
  return html`<${Explained} answer=${answer} found=${found} index=${index} onToken=${onToken}
    fork=${fork} />`;
}

function Explained({ answer, found, index, onToken, fork }) {
  const token = found.tokens[index];
  const [chosen, setChosen] = useState(null); // id of a candidate; null: the token's own
  const [status, setStatus] = useState("");
  const selected = token.candidates.find(({ id }) => id === chosen) ?? ownCandidate(token);
  const show = (next) => {
    setChosen(null);
    onToken(Math.max(0, Math.min(found.tokens.length - 1, next)));
  };
  const forkHere = () => {
    if (!fork) return;
    setStatus(`A branch with “${visible(selected.text)}” has begun.`);
    Promise.resolve(fork(answer.id, index, selected.id)).catch((error) => setStatus(error.message));
  };
  const onKey = (event) => {
    if (event.key in MOVES) show(index + MOVES[event.key]);
    else if (event.key === "Home") show(0);
    else if (event.key === "End") show(found.tokens.length - 1);
    else if (event.key === "Enter") forkHere();
    else if (event.key === "ArrowUp") setChosen(neighbour(token, selected, -1).id);
    else if (event.key === "ArrowDown") setChosen(neighbour(token, selected, 1).id);
    else return;
    event.preventDefault();
  };
  const settings = useMemo(() => settingsOf(answer.params, hello.value?.defaults), [answer.id]);
  return html`
    <${Agreement} found=${found} />
    <${Strip} tokens=${found.tokens} index=${index} show=${show} onKey=${onKey} />
    <${Facts} token=${token} position=${answer.prompt.length + index}
      cuts=${cutsOf(answer.params)} />
    <${CandidateTable} token=${token} settings=${settings} selected=${selected}
      choose=${(one) => setChosen(one.id)} />
    <div class="ins-actions">
      <button type="button" class="primary" disabled=${!fork} onClick=${forkHere}>
        Fork here with “${visible(selected.text)}”
      </button>
      ${!fork && html`<span class="muted">${answer.pictures?.length
        ? "An answer to pictures cannot be forked." : "Forking needs an answer of the chat."}</span>`}
      <span role="status">${status}</span>
    </div>
    <${Experiments} key=${index} token=${token} original=${settings} />
    ${!answer.pictures?.length && html`<${SwitchOff} answer=${answer} />`}
  `;
}

function neighbour(token, selected, step) {
  const place = token.candidates.indexOf(selected) + step;
  return token.candidates[Math.max(0, Math.min(token.candidates.length - 1, place))];
}

/** Whether the replay draws the answer's tokens. A difference is counted, not hidden. */
function Agreement({ found }) {
  const { agrees, numDrawn, tokens, numOmitted } = found;
  const numChosen = tokens.length - numDrawn;
  const uneven = hello.value?.uneven;
  const differs = agrees !== null && agrees < numDrawn;
  const text = agrees === null
    ? "The seed of this answer is not known, so its dice are not, either."
    : `replay agrees ${agrees}/${numDrawn}`;
  return html`<p class="ins-agrees">
    <strong class=${differs ? "warn" : ""}>${text}</strong>
    ${numChosen > 0 && html`<span class="muted"> · ${numChosen} chosen by you, not drawn</span>`}
    ${uneven && html`<span class="muted"> · near ties may differ: ${uneven.why}</span>`}
    ${numOmitted > 0 && html`<span class="muted"> · ${numOmitted} later tokens are not explained</span>`}
  </p>`;
}

/** The tokens as a list box: coloured from the ground to amber by surprise. */
function Strip({ tokens, index, show, onKey }) {
  const box = useRef(null);
  useEffect(() => {
    box.current?.children[index]?.scrollIntoView({ block: "nearest" });
  }, [index]);
  const click = (event) => {
    const place = [...box.current.children].indexOf(event.target.closest("[role=option]"));
    if (place >= 0) show(place);
  };
  return html`<div class="ins-strip" role="listbox" tabindex="0" ref=${box} onKeyDown=${onKey}
    onClick=${click} aria-label="Tokens of the answer, coloured by surprise"
    aria-activedescendant=${`ins-token-${index}`}>
    ${tokens.map((token, place) => html`<${StripToken} key=${place} token=${token} place=${place}
      isShown=${place === index} />`)}
  </div>`;
}

function StripToken({ token, place, isShown }) {
  const bits = surprise(token);
  const share = Math.round(DEEPEST * Math.min(1, bits / MOST_SURPRISE));
  const backgroundColor = `color-mix(in srgb, var(--warn) ${share}%, transparent)`;
  const differs = token.ok === false;
  return html`<span id=${`ins-token-${place}`} role="option" aria-selected=${isShown}
    class=${differs ? "ins-differs" : ""} style=${{ backgroundColor }}
    title=${`${bits.toFixed(2)} bits${noteOf(token)}`}>
    ${visible(token.text)}
  </span>`;
}

function noteOf({ isChosen, isForced, ok }) {
  if (isChosen) return "; chosen by you";
  if (isForced) return "; forced: no other token was allowed";
  return ok === false ? "; the replay draws another token" : "";
}

function Facts({ token, position, cuts }) {
  const vocabulary = hello.value?.ready.vocab_size;
  const facts = [
    ["id", token.id],
    ["position", position],
    ["rank", token.rank],
    ["surprise", `${surprise(token).toFixed(2)} bits`],
    ["entropy", `${token.entropyRaw.toFixed(2)} → ${token.entropyFinal.toFixed(2)} bits`],
    ["kept", `${token.kept.toLocaleString("en")}${vocabulary ? ` of ${vocabulary.toLocaleString("en")}` : ""}`],
    ["mass", `${(100 * token.mass).toFixed(1)} %`],
    ...(token.isForced ? [["forced", "no other token was allowed"]] : []),
  ];
  return html`<dl class="ins-facts">
    ${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt>
      <dd data-fact=${name}>${value}</dd></div>`)}
    ${cuts.length > 0 && html`<div><dt>cuts</dt>
      <dd data-fact="cuts">${cuts.map(({ label, value }) => `${label} ${value}`).join(", ")}</dd></div>`}
  </dl>`;
}
