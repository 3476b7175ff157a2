// The boxes of a model as a tree to draw. Boxes come from the server in the order of computation.

const OPERATIONS = new Set(["add", "norm", "softcap"]);

/** Roots of the tree, each `{box, index, children, count, total}`; `total` is of all its layers. */
export function treeOf(boxes) {
  const nodes = boxes.map((box, index) => ({ box, index, children: [], parent: null }));
  const byName = new Map();
  for (const node of nodes) {
    const isModule = !isOperation(node.box);
    if (isModule && node.box.name && !byName.has(node.box.name)) byName.set(node.box.name, node);
  }
  const roots = [];
  for (const node of nodes) {
    node.parent = parentOf(node, byName);
    (node.parent?.children ?? roots).push(node);
  }
  for (const node of nodes) node.count = layersOf(node);
  for (const node of nodes) node.total = totalOf(node);
  return { roots, nodes };
}

/** Tables of angles, which layers read as text says: a line for each would hide the others. */
export function isAngles(box) {
  return box.kind.endsWith("RotaryEmbedding");
}

export function isOperation(box) {
  return OPERATIONS.has(box.kind) && box.name.split(".").at(-1).startsWith(`${box.kind} `);
}

function parentOf(node, byName) {
  let path = node.box.name;
  while (path.includes(".")) {
    path = path.slice(0, path.lastIndexOf("."));
    const found = byName.get(path);
    if (found && found !== node) return found;
  }
  return null;
}

function layersOf(node) {
  for (let at = node; at; at = at.parent) if (at.box.layers.length) return at.box.layers.length;
  return 1;
}

/** Parameters of a node with its parts, in all layers that it stands for. */
function totalOf(node) {
  const own = node.box.parameters * node.count;
  return node.children.reduce((sum, child) => sum + totalOf(child), own);
}

/** A parameter that a module reads but that computes nothing of its own, such as a table. */
export function isTable(box) {
  return box.shape.length === 0;
}

/**
 * Split the roots into columns: an encoder and a decoder. A column ends where, after its blocks,
 * something begins that reads nothing before it.
 */
export function columnsOf(roots) {
  const columns = [[]];
  let hasBlocks = false;
  for (const node of roots) {
    const isStart = node.box.inputs.length === 0 && !isTable(node.box);
    if (hasBlocks && isStart) {
      columns.push([]);
      hasBlocks = false;
    }
    columns.at(-1).push(node);
    hasBlocks ||= node.box.layers.length > 0;
  }
  const isAside = ({ box }) => isAngles(box) || isTable(box);
  return columns.map((column) => column.sort((a, b) => isAside(b) - isAside(a)));
}

/**
 * Where each sibling gets its inputs: for sibling `to`, the places of siblings before it that it
 * reads, or -1 for what the parent reads. `steps` has those that read their predecessor.
 */
export function linesOf(siblings, nodes) {
  const place = new Map(siblings.map((node, i) => [node, i]));
  const placeOf = (index) => {
    for (let at = nodes[index]; at; at = at.parent) if (place.has(at)) return place.get(at);
    return -1;
  };
  const hasParent = siblings[0]?.parent !== null;
  const steps = new Set();
  const skips = [];
  siblings.forEach((node, to) => {
    for (const index of node.box.inputs) {
      const source = nodes[index];
      if (isTable(source.box) || isAngles(source.box) || sharesWeights(node, source)) continue;
      let from = placeOf(index);
      if (from >= to) from = -1; // the same place of the layer before
      if (from === -1 && !hasParent) continue;
      if (from === to - 1) steps.add(to);
      else if (!skips.some((skip) => skip.from === from && skip.to === to)) skips.push({ from, to });
    }
  });
  return { steps, skips: withLanes(skips) };
}

/** Whether a box reads the parameters of another, and not its output: a tied head. */
export function sharesWeights(node, source) {
  return node.box.kind === "LMHead" && /Embedding/.test(source.box.kind);
}

/** Give lines that overlap different lanes, the shortest the innermost. */
function withLanes(skips) {
  const ends = [];
  const sorted = [...skips].sort((a, b) => a.to - a.from - (b.to - b.from));
  for (const skip of sorted) {
    let lane = 0;
    while (ends[lane]?.some((other) => other.from < skip.to && skip.from < other.to)) lane += 1;
    (ends[lane] ??= []).push(skip);
    skip.lane = lane;
  }
  return sorted;
}

/** What a node reads from outside of the column it is in: [name, …]. */
export function farInputs(node, column, nodes) {
  const within = (index) => {
    for (let at = nodes[index]; at; at = at.parent) if (column.includes(at)) return true;
    return false;
  };
  if (node.children.length) return [];
  return node.box.inputs.filter((index) => !within(index)).map((index) => nodes[index].box.name);
}

/** Tables that a node reads, by name: angles, a relative bias, the embedding of a tied head. */
export function tablesOf(node, nodes) {
  if (node.children.length) return [];
  const isRead = (source) =>
    isTable(source.box) || isAngles(source.box) || sharesWeights(node, source);
  return node.box.inputs
    .map((index) => nodes[index])
    .filter(isRead)
    .map((source) => source.box.name || "scalars of the model");
}

/** "0–3", "0, 2, 4–6": the layers of a block as text. */
export function rangeOf(layers) {
  const parts = [];
  for (const layer of layers) {
    const last = parts.at(-1);
    if (last && layer === last[1] + 1) last[1] = layer;
    else parts.push([layer, layer]);
  }
  return parts.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
}

/** The tab of the Lens page that shows what this box does. */
export function tabOf(box) {
  const kind = box.kind.toLowerCase();
  if (kind.includes("attention")) return "attention";
  if (kind.includes("lmhead") || kind === "softcap") return "predictions";
  if (kind.includes("embedding") && !kind.includes("rotary")) return "embeddings";
  if (kind.includes("rotary") || kind === "sinusoids") return "attention";
  return "residual";
}
