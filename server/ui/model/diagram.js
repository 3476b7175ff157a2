// The block diagram: boxes from top to bottom, lines beside them for what skips a box.
import { html } from "../html.js";
import { hrefOf } from "../router.js";
import { keysInWindow } from "./charts.js";
import {
  columnsOf, farInputs, isOperation, isTable, linesOf, rangeOf, tabOf, tablesOf,
} from "./tree.js";

const SIGNS = { add: "+", norm: "norm", softcap: "softcap" };

export function Diagram({ tree, total, tokens }) {
  const columns = columnsOf(tree.roots);
  const titles = columns.length > 1 ? ["Encoder", "Decoder"] : [""];
  return html`<div class="md-columns">
    ${columns.map((column, i) => html`<section key=${i} aria-label=${titles[i] || "Blocks"}>
      ${titles[i] && html`<h3>${titles[i]}</h3>`}
      <${Flow} siblings=${column} column=${column} tree=${tree} total=${total} tokens=${tokens} />
    </section>`)}
  </div>`;
}

/** Siblings in order. Lane 0 is nearest to the boxes. */
function Flow({ siblings, ...rest }) {
  const { steps, skips } = linesOf(siblings, rest.tree.nodes);
  const lanes = Math.max(0, ...skips.map(({ lane }) => lane + 1));
  const columns = `${lanes ? `repeat(${lanes}, 12px) ` : ""}minmax(0, 1fr)`;
  return html`<div class="md-flow" style=${{ gridTemplateColumns: columns }}>
    ${siblings.map((node, i) => html`<div key=${node.index} class=${steps.has(i) ? "md-step" : "md-start"}
      style=${{ gridRow: `${i + 1}`, gridColumn: `${lanes + 1}` }}>
      <${Box} node=${node} ...${rest} />
    </div>`)}
    ${skips.map(({ from, to, lane }) => html`<span key=${`${from}-${to}`} class="md-skip" aria-hidden="true"
      style=${{ gridRow: `${from + 2} / ${to + 2}`, gridColumn: `${lanes - lane} / ${lanes + 1}` }} />`)}
  </div>`;
}

function Box(props) {
  const { node, tree, column, total, tokens } = props;
  const { box } = node;
  if (isOperation(box)) return html`<${Operation} node=${node} tokens=${tokens} />`;
  const isBlock = box.layers.length > 0;
  const classes = ["md-box"];
  if (isBlock) classes.push("md-block");
  if (isTable(box)) classes.push("md-table");
  return html`<div class=${classes.join(" ")} data-name=${box.name} data-parameters=${node.total}>
    <div class="md-head">
      <a href=${hrefOf("lens", { tab: tabOf(box) })} title="Show it at work in the lens">
        ${nameOf(box)}</a>
      <span class="muted">${box.kind}</span>
      ${isBlock && html`<b class="md-times">× ${box.layers.length}</b>
        <span class="muted">layers ${rangeOf(box.layers)}</span>`}
    </div>
    <${Facts} node=${node} tree=${tree} column=${column} tokens=${tokens} />
    <${Share} node=${node} total=${total} />
    ${node.children.length > 0 && html`<${Flow} siblings=${node.children} column=${column}
      tree=${tree} total=${total} tokens=${tokens} />`}
  </div>`;
}

function nameOf(box) {
  if (!box.name) return "scalars of the model";
  return box.layers.length ? box.name.split(".").slice(0, -1).join(".") : box.name.split(".").at(-1);
}

function Operation({ node, tokens }) {
  const { box } = node;
  const sign = box.detail ? `${SIGNS[box.kind]} ${box.detail}` : SIGNS[box.kind];
  const label = { add: "addition", norm: "norm without weights", softcap: "softcap" }[box.kind];
  return html`<div class=${`md-operation md-${box.kind}`} title=${`${label}, ${shapeOf(box, tokens)}`}>
    <span aria-label=${label}>${sign}</span>
  </div>`;
}

/** The output's shape for a prompt of so many tokens. */
function shapeOf(box, tokens) {
  return [tokens.toLocaleString("en"), ...box.shape].join(" × ");
}

function Facts({ node, tree, column, tokens }) {
  const { box } = node;
  const facts = [];
  if (box.detail) facts.push(box.detail);
  const isAgain = tree.nodes.some((other) => other.index < node.index && other.box.name === box.name);
  if (isAgain) facts.push(`the same weights as ${box.name} above, used again`);
  if (box.attention) facts.push(...attentionFacts(box.attention, tokens));
  const tables = tablesOf(node, tree.nodes);
  if (box.kind === "LMHead" && box.parameters === 0) facts.push(`tied: the weight of ${tables.join(", ")}`);
  else if (tables.length && !isOperation(box)) facts.push(`reads ${tables.join(", ")}`);
  const far = farInputs(node, column, tree.nodes).filter((name) => !tables.includes(name));
  if (far.length) facts.push(`reads ${far.join(", ")} of the encoder`);
  return html`<p class="md-facts">
    ${!isTable(box) && html`<span class="mono md-shape">${shapeOf(box, tokens)}</span> `}
    ${facts.join(" · ")}
  </p>`;
}

function attentionFacts(facts, tokens) {
  const keys = Math.min(tokens, keysInWindow(facts));
  const found = [`${facts.num_heads} heads of ${facts.head_dim}`];
  if (facts.num_kv_heads !== facts.num_heads) found.push(`${facts.num_kv_heads} of keys and values`);
  found.push(facts.kind);
  if (facts.kind !== "cross") found.push(`scores ${facts.num_heads} × ${tokens} × ${keys}`);
  if (facts.softcap !== null) found.push(`softcap ${facts.softcap}`);
  if (facts.has_relative_bias) found.push("relative positions");
  return found;
}

/** Parameters of a box with its parts and in all layers, and their share of the model. */
function Share({ node, total }) {
  if (!node.total) return null;
  const share = (100 * node.total) / total;
  const each = node.count > 1 ? `${(node.total / node.count).toLocaleString("en")} × ${node.count} = ` : "";
  return html`<p class="md-share">
    <span class="md-bar" aria-hidden="true"><span style=${{ width: `${share}%` }} /></span>
    <span>${each}<b>${node.total.toLocaleString("en")}</b> ${share.toFixed(share < 1 ? 2 : 1)} %</span>
  </p>`;
}
