// Encoders: how similar pairs of texts are, by the cosine of their vectors.

import { post } from "../api.js";
import { html, useState } from "../html.js";
import { hello } from "../store.js";

const START = [
  ["A man is eating food.", "A person eats a meal."],
  ["A man is eating food.", "The sky is blue today."],
];

export default function Pairs() {
  const [rows, setRows] = useState(START);
  const [scores, setScores] = useState([]);
  const [problem, setProblem] = useState("");
  const change = (place, side, text) => {
    setScores([]);
    setRows(rows.map((row, index) => {
      if (index !== place) return row;
      return side ? [row[0], text] : [text, row[1]];
    }));
  };
  const compare = async (event) => {
    event.preventDefault();
    setProblem("");
    const body = { model: hello.value.model.id, text_1: rows.map((row) => row[0]) };
    body.text_2 = rows.map((row) => row[1]);
    try {
      const { data } = await post("v1/score", body);
      setScores(data.map(({ score }) => score));
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`<div class="page pairs">
    <h1>${hello.value.model.id}: similarity of texts</h1>
    <p class="muted">This model turns a text into a vector. The score of a pair is the cosine of its
      two vectors: 1 means the same direction.</p>
    <form onSubmit=${compare}>
      <div class="scroll" tabindex="0" role="region" aria-label="Pairs"><table>
        <thead><tr><th>text 1</th><th>text 2</th><th class="number">cosine</th><th /></tr></thead>
        <tbody>${rows.map((row, place) => html`<tr key=${place}>
          ${[0, 1].map((side) => html`<td><input value=${row[side]} required
            aria-label=${`Text ${side + 1} of pair ${place + 1}`}
            onInput=${(event) => change(place, side, event.target.value)} /></td>`)}
          <td class="number"><output>${scores[place]?.toFixed(4) ?? "–"}</output></td>
          <td><button class="quiet" type="button" aria-label=${`Remove pair ${place + 1}`}
            disabled=${rows.length === 1}
            onClick=${() => { setScores([]); setRows(rows.filter((_, other) => other !== place)); }}>
            ×</button></td>
        </tr>`)}</tbody>
      </table></div>
      ${problem && html`<p class="warn" role="alert">${problem}</p>`}
      <p><button class="primary">Compare</button>${" "}
        <button type="button" onClick=${() => setRows([...rows, ["", ""]])}>Add a pair</button></p>
    </form>
  </div>`;
}
