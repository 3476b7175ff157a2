// The sampler's cuts and draw with other settings, computed from the candidates of one token.
// Where tokens that are not among them could change the result, it is null.

import { cutsOf } from "../sampling.js";
import { CANDIDATES, isBanned } from "./explain.js";

const GREEDY_BELOW = 1e-5;
const TRIED = ["top_k", "top_p", "min_p"]; // cuts that are computed here

/** The settings that an answer was drawn with; `others` names the cuts that cannot be tried. */
export function settingsOf(params, defaults = {}) {
  const value = (name, otherwise) => params?.[name] ?? defaults?.[name] ?? otherwise;
  return {
    temperature: value("temperature", 1),
    topK: Math.max(0, value("top_k", 0)),
    topP: value("top_p", 1),
    minP: value("min_p", 0),
    others: cutsOf(params).filter(({ name }) => !TRIED.includes(name)).map(({ label }) => label),
  };
}

/**
 * Return `{winner, kept, isWhole, undecided}` for other settings: the candidate that the same dice
 * draw, the candidates that could be drawn, whether these are all, and why one of both is not known
 * ("" if they are). `winner` and `kept` are null where they are not known. `original` are the
 * settings of the answer.
 */
export function redraw(token, settings, original, vocabulary) {
  const likely = likeliest(token);
  const isOriginal = Object.keys(original).every((name) => settings[name] === original[name]);
  if (isOriginal && token.drawn !== null) {
    const winner = token.candidates.find((one) => one.id === token.drawn);
    const kept = token.candidates.filter((one) => one.final > 0);
    return { winner, kept, isWhole: kept.length === token.kept, undecided: "" };
  }
  if (settings.others.length) {
    const undecided = `the server alone computes ${settings.others.join(" and ")}`;
    return { winner: null, kept: null, isWhole: false, undecided };
  }
  if (settings.temperature < GREEDY_BELOW) {
    return { winner: likely[0], kept: likely.slice(0, 1), isWhole: true, undecided: "" };
  }
  const isComplete = likely.length < CANDIDATES || likely.length === vocabulary;
  const weights = likely.map((one) => one.adjusted ** (1 / settings.temperature));
  const rest = isComplete ? [0, 0] : restBounds(likely, settings.temperature, vocabulary);
  const kept = keptOf(likely, weights, rest, settings, isComplete);
  if (kept === null) {
    return {
      winner: null, kept: null, isWhole: false,
      undecided: "a cut falls where tokens beyond these candidates decide",
    };
  }
  const isWhole = isComplete || kept.length < likely.length;
  if (likely[0].luck === null) {
    return { winner: null, kept, isWhole, undecided: "the seed of this answer is not known" };
  }
  const score = (one) => Math.log(one.adjusted) / settings.temperature - Math.log(one.luck);
  const winner = kept.reduce((best, one) => (score(one) > score(best) ? one : best));
  if (!isWhole && !beats(score(winner), token, settings, original)) {
    return { winner: null, kept, isWhole, undecided: "a token beyond these candidates could win" };
  }
  return { winner, kept, isWhole, undecided: "" };
}

/** The likeliest tokens without a gap, in the sampler's order. */
export function likeliest(token) {
  const order = token.candidates.filter((one) => !isBanned(one) && one.adjusted > 0);
  return order.slice(0, CANDIDATES);
}

/**
 * Bounds of the sum of p ** (1 / T) over the tokens that are not listed: their probabilities have a
 * known sum, and none exceeds the last listed one.
 */
function restBounds(likely, temperature, vocabulary) {
  const most = likely.at(-1).adjusted;
  const mass = Math.max(0, 1 - likely.reduce((sum, one) => sum + one.adjusted, 0));
  const power = 1 / temperature;
  const count = Math.max(1, vocabulary - likely.length);
  const concentrated = mass * most ** (power - 1); // as few tokens as possible
  const spread = count * (mass / count) ** power; // all equally likely
  return [Math.min(concentrated, spread), Math.max(concentrated, spread)];
}

/** The candidates that the cuts keep, or null where the rest decides. As `cut` of the sampler. */
function keptOf(likely, weights, [least, most], settings, isComplete) {
  const { topK, topP, minP } = settings;
  if (topK > likely.length && topP < 1 && !isComplete) return null; // a share of unknown mass
  const withinK = topK > 0 ? Math.min(topK, likely.length) : likely.length;
  const listed = weights.slice(0, withinK).reduce((sum, weight) => sum + weight, 0);
  const reaches = topK === 0 || topK > likely.length;
  const total = reaches ? [listed + least, listed + most] : [listed, listed];
  const kept = [];
  let before = 0;
  for (const [index, one] of likely.slice(0, withinK).entries()) {
    const isWithin = total.map((mass) => topP >= 1 || before < topP * mass);
    if (index > 0) {
      if (weights[index] < minP * weights[0]) break;
      if (isWithin[0] !== isWithin[1]) return null;
      if (!isWithin[0]) break;
    }
    kept.push(one);
    before += weights[index];
  }
  return kept;
}

/**
 * Whether no token beyond the candidates can reach `score`. The answer's own draw bounds their
 * luck: each of them has lost it, if no cut had removed it.
 */
function beats(score, token, settings, original) {
  const likely = likeliest(token);
  const drawn = likely.find((one) => one.id === token.drawn); // not if it is a token beyond them
  const first = original.temperature;
  if (!drawn || likely.at(-1).cut !== 0 || first < GREEDY_BELOW) return false;
  if (original.topK > 0 || original.topP < 1 || original.minP > 0) return false;
  if (settings.temperature > first) return false;
  const won = Math.log(drawn.adjusted) / first - Math.log(drawn.luck);
  const gain = Math.log(likely.at(-1).adjusted) * (1 / settings.temperature - 1 / first);
  return score > won + gain || (settings.temperature === first && score >= won);
}

/** Draw `count` times by the final probabilities; return [candidate or null for others, times]. */
export function drawOften(token, count, random = Math.random) {
  const likely = token.candidates.filter((one) => one.final > 0);
  const times = new Map();
  for (let number = 0; number < count; number += 1) {
    let left = random();
    const drawn = likely.find((one) => (left -= one.final) < 0) ?? null;
    times.set(drawn, (times.get(drawn) ?? 0) + 1);
  }
  return [...times].sort((a, b) => b[1] - a[1]);
}
