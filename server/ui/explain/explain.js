// Explanations of answers: one request for each answer, when it is first looked at.

import { post } from "../api.js";
import { parameters } from "../sampling.js";

export const MAX_TOKENS = 1024; // of an answer, explained by the server
export const CANDIDATES = 32; // of a token
const MOST_KEPT = 32; // answers whose explanations stay in memory

/**
 * What a draw depends on besides the tokens and the parameters of sampling. Other fields of a request
 * are not sent.
 */
const FIELDS = [
  "seed", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "stop_token_ids",
  "ignore_eos", "response_format", "structured_outputs", "thinking_token_budget", "cache_salt",
];

/** Codes of why a token could not be drawn: its probability is 0 before any cut. */
const BANNED = [4, 5];
export const isBanned = ({ cut }) => BANNED.includes(cut);

const found = new Map(); // promises by answer id, the oldest first

/**
 * Explain an answer of the chat; the result is kept by the answer's id. Resolves to `{agrees,
 * numDrawn, cachedTokens, numOmitted, tokens: [{id, text, rank, entropyRaw, entropyFinal, kept,
 * mass, ok, drawn, isForced, isChosen, candidates: [{id, text, logit, raw, adjusted, temped, cut, final,
 * luck}]}]}`. `why` says what removed a token whose `cut` is not 0. `agrees` of `numDrawn` draws give the answer's token. The others were chosen by the
 * user, who forked the answer there; their `ok` is null. Where the seed is not known, `agrees`,
 * `ok`, `drawn` and `luck` are null. Rejects with ApiError.
 */
export function explainOf(answer) {
  const known = found.get(answer.id);
  if (known) return known;
  const promise = load(answer);
  found.set(answer.id, promise);
  promise.catch(() => found.delete(answer.id)); // the next call asks again
  if (found.size > MOST_KEPT) found.delete(found.keys().next().value);
  return promise;
}

async function load(answer) {
  const length = Math.min(answer.tokens.length, MAX_TOKENS);
  const parts = answer.parts ?? [{ start: 0, params: answer.params }];
  const tokens = [];
  let cachedTokens = 0;
  let knowsDice = true;
  for (const [place, { start, params }] of parts.entries()) {
    const end = Math.min(parts[place + 1]?.start ?? length, length);
    if (start >= end) break;
    const report = await explainPart(answer, start, end, params);
    const forced = new Set(report.forced);
    tokens.push(...report.tokens.map((row, place) => tokenOf(row, report, forced.has(place))));
    cachedTokens += report.cached_tokens;
    knowsDice &&= report.agrees !== null;
  }
  const chosen = new Set(answer.chosen);
  for (const [index, token] of tokens.entries()) {
    token.isChosen = chosen.has(index);
    if (token.isChosen) token.ok = null;
  }
  return {
    agrees: knowsDice ? tokens.filter(({ ok }) => ok).length : null,
    numDrawn: tokens.filter(({ isChosen }) => !isChosen).length,
    cachedTokens,
    numOmitted: answer.tokens.length - length,
    tokens,
  };
}

/** Explain the tokens [start, end) of an answer; those before were the prompt of their request. */
function explainPart({ prompt, tokens, pictures }, start, end, given) {
  return post("ui/api/explain", {
    ...(pictures?.length && { images: pictures }),
    prompt_ids: [...prompt, ...tokens.slice(0, start)],
    answer_ids: tokens.slice(start, end),
    params: drawFields(given),
    candidates: CANDIDATES,
  });
}

/** The fields of a request that a draw depends on. */
export function drawFields(given) {
  const params = {};
  for (const name of [...parameters().map((one) => one.name), ...FIELDS]) {
    if (given?.[name] != null) params[name] = given[name];
  }
  return params;
}

function tokenOf(row, { pieces, cuts }, isForced) {
  const [id, rank, entropyRaw, entropyFinal, kept, mass, ok, candidates, drawn] = row;
  return {
    id, rank, entropyRaw, entropyFinal, kept, mass, ok, drawn, isForced,
    text: pieces[id] ?? "",
    candidates: candidates.map(([one, logit, raw, adjusted, temped, cut, luck]) => ({
      id: one, text: pieces[one] ?? "", logit, raw, adjusted, temped, cut, luck,
      why: cut === 0 ? "" : cuts[cut],
      final: cut === 0 ? temped / mass : 0,
    })),
  };
}

/** The candidate that is the answer's own token; the server always sends it. */
export function ownCandidate(token) {
  return token.candidates.find((candidate) => candidate.id === token.id);
}

/** How surprising the answer's token was to the model, in bits. */
export function surprise(token) {
  return -Math.log2(Math.max(ownCandidate(token).raw, 2 ** -64));
}
