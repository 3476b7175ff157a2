// Where the tokens of an image are on its picture, without any drawing.

import { placesOf } from "../images.js";

/**
 * What is drawn of an image: for each part of its grids (the picture, its tiles, the overview) the
 * `rows` and `columns` of cells, the area that they cover as shares of the picture, and `places`, the
 * place in the text of each cell's token, row by row.
 */
export function drawingsOf(image) {
  const tokens = placesOf(image);
  const parts = [...new Set(image.grids.map(({ part }) => part))];
  return parts.map((name) => drawingOf(name, image.grids.filter(({ part }) => part === name), tokens));
}

function drawingOf(name, grids, tokens) {
  const [{ left, top, width, height }] = grids; // all are of one size, the first in the corner
  const below = (grid) => Math.round((grid.top - top) / height);
  const beside = (grid) => Math.round((grid.left - left) / width);
  const rows = (Math.max(...grids.map(below)) + 1) * grids[0].rows;
  const columns = (Math.max(...grids.map(beside)) + 1) * grids[0].columns;
  const places = new Array(rows * columns);
  for (const grid of grids) {
    const length = grid.columns + grid.row_end;
    for (let row = 0; row < grid.rows; row += 1) {
      for (let column = 0; column < grid.columns; column += 1) {
        const at = (below(grid) * grid.rows + row) * columns + beside(grid) * grid.columns + column;
        places[at] = tokens[grid.first + row * length + column];
      }
    }
  }
  const size = { width: (columns / grids[0].columns) * width, height: (rows / grids[0].rows) * height };
  return { name, rows, columns, left, top, ...size, places };
}

/** The area of a cell that is on the picture, as shares of its sides: [left, top, width, height]. */
export function areaOf(drawing, row, column) {
  const [wide, high] = [drawing.width / drawing.columns, drawing.height / drawing.rows];
  const clamp = (share) => Math.min(1, Math.max(0, share));
  const left = clamp(drawing.left + column * wide);
  const top = clamp(drawing.top + row * high);
  const right = clamp(drawing.left + (column + 1) * wide);
  const bottom = clamp(drawing.top + (row + 1) * high);
  return [left, top, right - left, bottom - top];
}

/** The sum of the weights of all cells. */
export const shareOf = (drawing, weights) => (
  drawing.places.reduce((sum, place) => sum + (weights[place] ?? 0), 0));
