// The funnel of one token: each candidate from the model's logit to the draw.

import { html, useState } from "../html.js";
import { percent, visible } from "../text.js";
import { CUTS } from "./explain.js";

const SHOWN = 10; // candidates before "show all"


/** Candidates in the order in which they rank; one is selected, for a fork. */
export function CandidateTable({ token, settings, selected, choose }) {
  const [showsAll, setShowsAll] = useState(false);
  const likely = token.candidates.slice(0, SHOWN);
  const pinned = token.candidates.slice(SHOWN).filter(
    (one) => one.id === token.id || one.id === token.drawn || one === selected || one.cut > 3,
  );
  const rows = showsAll ? token.candidates : [...likely, ...pinned];
  const most = Math.max(...token.candidates.map(chance));
  const temperature = `T=${settings.temperature}`;
  const hidden = token.candidates.length - rows.length;
  return html`<section aria-label="Candidates">
    <div class="ins-scroll" tabindex="0" role="region" aria-label="Table of candidates">
      <table class="ins-table">
        <thead><tr>
          ${["token", "logit", "raw", "penal.", temperature, "cut", "final", "luck", "p/luck"].map(
            (name) => html`<th scope="col" key=${name}>${name}</th>`,
          )}
          <td />
        </tr></thead>
        <tbody>
          ${rows.map((one) => html`<${Row} key=${one.id} one=${one} token=${token} most=${most}
            isSelected=${one === selected} choose=${choose} />`)}
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

function Row({ one, token, most, isSelected, choose }) {
  const hasWon = one.id === token.drawn;
  const won = hasWon && one.luck !== null;
  const width = `${(100 * chance(one)) / (most || 1)}%`;
  return html`<tr class=${one.cut ? "ins-cut" : ""} data-token=${one.id}>
    <th scope="row"><label>
      <input type="radio" name="ins-candidate" checked=${isSelected} onChange=${() => choose(one)} />
      <code>${visible(one.text)}</code>${one.id === token.id && html` <small>sent</small>`}
    </label></th>
    <td>${one.logit.toFixed(2)}</td>
    <td title=${one.raw}>${percent(one.raw)}</td>
    <td title=${one.adjusted}>${percent(one.adjusted)}</td>
    <td title=${one.temped}>${percent(one.temped)}</td>
    <td>${CUTS[one.cut] || "–"}</td>
    <td title=${one.final}>${one.cut ? "–" : percent(one.final)}</td>
    <td title=${one.luck ?? ""}>${one.luck === null ? "–" : one.luck.toPrecision(3)}</td>
    <td>${chance(one) ? chance(one).toPrecision(3) : "–"}</td>
    <td class="ins-race"><span class=${won ? "ins-won" : ""} style=${{ width }} />
      ${hasWon && html`<b>${one.luck === null ? "drawn" : "won"}</b>`}</td>
  </tr>`;
}
