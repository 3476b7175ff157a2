// Encoders: scores of pairs of texts, by the cosine of their vectors or by a head; or labels.

import { post } from "../api.js";
import { html, useState } from "../html.js";
import { hello } from "../store.js";

const START = [
  ["A man is eating food.", "A person eats a meal."],
  ["A man is eating food.", "The sky is blue today."],
];

// By the model's task: what the page says, the route, and how an entry of its answer is shown.
const TASKS = {
  embed: {
    title: "similarity of texts", column: "cosine", route: "v1/score",
    about: `This model turns a text into a vector. The score of a pair is the cosine of its two
      vectors: 1 means the same direction.`,
    show: ({ score }) => score.toFixed(4),
  },
  score: {
    title: "scores of pairs", column: "score", route: "v1/score",
    about: "This model reads a pair as one text, and scores how well text 2 answers text 1.",
    show: ({ score }) => score.toFixed(4),
  },
  classify: {
    title: "labels of pairs", column: "label", route: "v1/classify",
    about: "This model reads a pair as one text, and gives each of its labels a number.",
    show: ({ label, probs }) => `${label} ${Math.max(...probs).toFixed(4)}`,
  },
};

export default function Pairs() {
  const [rows, setRows] = useState(START);
  const [scores, setScores] = useState([]);
  const [problem, setProblem] = useState("");
  const { title, column, route, about, show } = TASKS[hello.value.model.task];
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
      const { data } = await post(route, body);
      setScores(data.map(show));
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`<div class="page pairs">
    <h1>${hello.value.model.id}: ${title}</h1>
    <p class="muted">${about}</p>
    <form onSubmit=${compare}>
      <div class="scroll" tabindex="0" role="region" aria-label="Pairs"><table>
        <thead><tr><th>text 1</th><th>text 2</th><th class="number">${column}</th><th /></tr></thead>
        <tbody>${rows.map((row, place) => html`<tr key=${place}>
          ${[0, 1].map((side) => html`<td><input value=${row[side]} required
            aria-label=${`Text ${side + 1} of pair ${place + 1}`}
            onInput=${(event) => change(place, side, event.target.value)} /></td>`)}
          <td class="number"><output>${scores[place] ?? "–"}</output></td>
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
