// The tokens of a prompt as boxes. Arrows move over them; the line below describes the current one.
import { html, useEffect, useMemo, useRef, useState } from "../html.js";
import { boxesOf } from "../images.js";
import { Picture } from "../pictures.js";
import { STATES, boxText, describeBox, stateOfBox } from "./facts.js";

const MOST = 4000; // boxes that are drawn; the table has no more either
const MOVES = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 };

/** `answer` is the server's; its `pictures` are those of the messages, in the order of its images. */
export function Tokens({ answer }) {
  const [pinned, setPinned] = useState(0);
  const [hovered, setHovered] = useState(null);
  const box = useRef(null);
  const boxes = useMemo(() => boxesOf(answer.images, answer.ids.length).slice(0, MOST), [answer]);
  const count = boxes.length;
  const index = Math.min(hovered ?? pinned, count - 1);
  useEffect(() => setHovered(null), [answer]);
  const drawings = useMemo(() => boxes.map((one, place) => drawn(answer, one, place)), [answer]);

  function move(event) {
    let next = pinned + (MOVES[event.key] ?? 0);
    if (event.key === "Home") next = 0;
    else if (event.key === "End") next = count - 1;
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      next = otherLine(box.current, pinned, event.key === "ArrowDown" ? 1 : -1);
    } else if (!(event.key in MOVES)) return;
    event.preventDefault();
    next = Math.max(0, Math.min(count - 1, next));
    setHovered(null);
    setPinned(next);
    box.current.children[next]?.scrollIntoView({ block: "nearest" });
  }

  const find = (event) => event.target.closest?.("[data-i]")?.dataset.i;
  useEffect(() => {
    const before = box.current?.querySelector(".pr-current");
    before?.classList.remove("pr-current");
    box.current?.children[index]?.classList.add("pr-current");
  }, [index, boxes]);
  if (!count) return html`<p class="muted">This prompt has no tokens.</p>`;
  const text = boxText(answer, boxes[index]);
  const about = describeBox(answer, boxes[index]);
  const last = boxes.at(-1).end;
  return html`<section aria-label="Tokens">
    <${Legend} answer=${answer} />
    <div class="pr-tokens" ref=${box} tabindex="0" role="slider" aria-label="Token"
      aria-valuemin="1" aria-valuemax=${last} aria-valuenow=${boxes[index].begin + 1}
      aria-valuetext=${`${text}, ${about}`} onKeyDown=${move}
      onPointerOver=${(event) => setHovered(find(event) ? Number(find(event)) : null)}
      onPointerLeave=${() => setHovered(null)}
      onClick=${(event) => find(event) && setPinned(Number(find(event)))}>${drawings}</div>
    <p class="pr-line"><code>${text}</code> ${about}</p>
    ${answer.ids.length > last && html`<p class="muted">
      The first ${last.toLocaleString("en")} tokens are drawn.</p>`}
    <${Table} answer=${answer} boxes=${boxes} />
  </section>`;
}

/** A box. A line break in the text breaks the line here, too. */
function drawn(answer, box, place) {
  const names = ["pr-token", `pr-${stateOfBox(answer, box)}`];
  const isImage = box.place !== undefined;
  if (isImage) names.push("pr-image");
  else if (answer.special[box.begin]) names.push("pr-special");
  if (box.begin > 0 && box.begin % answer.block_size === 0) names.push("pr-block");
  if (!isImage && answer.pieces[box.begin].endsWith("\n")) names.push("pr-break");
  const picture = isImage && answer.pictures?.[box.place];
  return html`<span key=${place} class=${names.join(" ")} data-i=${place}>
    ${picture && html`<${Picture} picture=${picture} alt="" />`}${boxText(answer, box)}</span>`;
}

/** The token on the next or previous drawn line that is nearest to this one. */
function otherLine(box, index, direction) {
  const from = box.children[index].getBoundingClientRect();
  const isBeyond = (place) => (direction > 0 ? place.top > from.top + 4 : place.top < from.top - 4);
  let best = index;
  let line = null;
  for (let i = index + direction; box.children[i]; i += direction) {
    const place = box.children[i].getBoundingClientRect();
    if (!isBeyond(place)) continue;
    line ??= place.top;
    if (Math.abs(place.top - line) > 4) break;
    const distance = Math.abs(place.left - from.left);
    if (best === index || distance < Math.abs(box.children[best].getBoundingClientRect().left - from.left)) best = i;
  }
  return best;
}

function Legend({ answer }) {
  const count = (state) => {
    const { cached_tokens: cached, block_size: size, ids } = answer;
    const whole = Math.floor(cached / size) * size;
    return { cached: whole, part: cached - whole, new: ids.length - cached }[state];
  };
  return html`<ul class="pr-legend">
    ${Object.entries(STATES).map(([state, [name, meaning]]) => html`<li key=${state} title=${meaning}>
      <span class=${`pr-token pr-${state}`} aria-hidden="true">a</span> ${name} <b>${count(state)}</b>
    </li>`)}
    <li><span class="pr-token pr-new pr-special" aria-hidden="true">a</span> special
      ${" "}<b>${answer.special.filter(Boolean).length}</b></li>
    <li><span class="pr-token pr-new pr-block" aria-hidden="true">a</span> begins a block</li>
  </ul>`;
}

/** The same as a table, made when it is opened. */
function Table({ answer, boxes }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>Tokens as a table</summary>
    ${isOpen && html`<div class="scroll pr-table" tabindex="0" role="region" aria-label="Table of tokens">
      <table><thead><tr>
        ${["place", "id", "offset", "token", "state"].map(
          (name) => html`<th scope="col" key=${name}>${name}</th>`)}
      </tr></thead><tbody>
        ${boxes.map((box) => html`<${Row} key=${box.begin} answer=${answer} box=${box} />`)}
      </tbody></table>
    </div>`}
  </details>`;
}

function Row({ answer, box }) {
  const { begin, end, place } = box;
  const isImage = place !== undefined;
  const isSpecial = !isImage && answer.special[begin];
  return html`<tr>
    <th scope="row">${begin}${isImage && ` to ${end - 1}`}</th>
    <td>${isImage ? "" : answer.ids[begin]}</td><td>${answer.offsets[begin]}</td>
    <td class="mono">${boxText(answer, box)}</td>
    <td>${STATES[stateOfBox(answer, box)][0]}${isSpecial ? ", special" : ""}</td>
  </tr>`;
}
