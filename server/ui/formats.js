// How the weights of the served model are stored, on disk and in memory.

/** A count of bytes as text: "154.9 MB". */
export function bytes(count) {
  for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (count >= size) return `${(count / size).toFixed(1)} ${unit}`;
  }
  return `${count} B`;
}

/** The format of the weights in memory: that of the quantised ones, else the dtype. */
export const memoryFormat = ({ quantization, dtype }) => quantization ?? dtype;

/** Short, for the status strip: the largest format on disk, and that in memory if it differs. */
export function weightFormat({ formats, ready }) {
  const memory = memoryFormat(ready);
  const disk = formats[0]?.name;
  const same = { BF16: "bfloat16", F16: "float16", F32: "float32" }[disk] ?? disk?.toLowerCase();
  return !disk || same === memory.toLowerCase() ? memory : `${disk} as ${memory}`;
}

/** "Q4_1 168 tensors, F32 61", the largest first. */
export function formatList(formats) {
  return formats.map(({ name, tensors }, place) =>
    `${name} ${tensors.toLocaleString("en")}${place ? "" : ` tensor${tensors === 1 ? "" : "s"}`}`,
  ).join(", ");
}
