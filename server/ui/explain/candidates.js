// The funnel of one token: each candidate from the model's logit to the draw.

import { html, useNarrow, useState } from "../html.js";
import { percent, visible } from "../text.js";
import { isBanned } from "./explain.js";

const SHOWN = 10; // candidates before "show all"

/** The columns behind the token, in the order of the funnel; a phone shows its end first. */
const COLUMNS = ["logit", "raw", "penal.", "T", "cut", "final", "luck", "p/luck", "won"];
const NARROW = ["final", "won", "raw", "T", "cut", "luck", "p/luck", "penal.", "logit"];

/** Candidates in the order in which they rank; one is selected, for a fork. */
export function CandidateTable({ token, settings, selected, choose }) {
  const [showsAll, setShowsAll] = useState(false);
  const likely = token.candidates.slice(0, SHOWN);
  const pinned = token.candidates.slice(SHOWN).filter(
    (one) => one.id === token.id || one.id === token.drawn || one === selected || isBanned(one),
  );
  const rows = showsAll ? token.candidates : [...likely, ...pinned];
  const most = Math.max(...token.candidates.map(chance));
  const temperature = `T=${settings.temperature}`;
  const hidden = token.candidates.length - rows.length;
  const columns = useNarrow() ? NARROW : COLUMNS;
  return html`<section aria-label="Candidates">
    <div class="ins-scroll" tabindex="0" role="region" aria-label="Table of candidates">
      <table class="ins-table">
        <thead><tr>
          <th scope="col">token</th>
          ${columns.map((name) => html`<th scope="col" key=${name}>
            ${name === "T" ? temperature : name}</th>`)}
        </tr></thead>
        <tbody>
          ${rows.map((one) => html`<${Row} key=${one.id} one=${one} token=${token} most=${most}
            isSelected=${one === selected} choose=${choose} columns=${columns} />`)}
        </tbody>
      </table>
    </div>
    ${(hidden > 0 || showsAll) && html`<button type="button" class="quiet"
      onClick=${() => setShowsAll(!showsAll)}>
      ${showsAll ? "Show fewer" : `Show ${hidden} more`}
    </button>`}
  </section>`;
}

/** What wins the draw: the greatest share of luck. */
function chance(one) {
  return one.luck === null || one.cut !== 0 ? 0 : one.final / one.luck;
}

/** The cells of a candidate, by their column. */
function cellsOf(one, token, most) {
  const hasWon = one.id === token.drawn;
  const won = hasWon && one.luck !== null;
  const width = `${(100 * chance(one)) / (most || 1)}%`;
  return {
    logit: html`<td>${one.logit.toFixed(2)}</td>`,
    raw: html`<td title=${one.raw}>${percent(one.raw)}</td>`,
    "penal.": html`<td title=${one.adjusted}>${percent(one.adjusted)}</td>`,
    T: html`<td title=${one.temped}>${percent(one.temped)}</td>`,
    cut: html`<td>${one.why || "–"}</td>`,
    final: html`<td title=${one.final}>${one.cut ? "–" : percent(one.final)}</td>`,
    luck: html`<td title=${one.luck ?? ""}>${one.luck === null ? "–" : one.luck.toPrecision(3)}</td>`,
    "p/luck": html`<td>${chance(one) ? chance(one).toPrecision(3) : "–"}</td>`,
    won: html`<td class="ins-race"><span class=${won ? "ins-won" : ""} style=${{ width }} />
      ${hasWon && html`<b>${one.luck === null ? "drawn" : "won"}</b>`}</td>`,
  };
}

function Row({ one, token, most, isSelected, choose, columns }) {
  const cells = cellsOf(one, token, most);
  return html`<tr class=${one.cut ? "ins-cut" : ""} data-token=${one.id}>
    <th scope="row"><label>
      <input type="radio" name="ins-candidate" checked=${isSelected} onChange=${() => choose(one)} />
      <code>${visible(one.text)}</code>${one.id === token.id && html` <small>sent</small>`}
    </label></th>
    ${columns.map((name) => cells[name])}
  </tr>`;
}
