// The order map: in which step each token was decoded, from dark (first) to light (last).

// The stops of the ramp, as in src/arpg/figures.py; stage.css has them again for the legend.
const RAMP = [[38, 22, 74], [104, 37, 119], [178, 54, 95], [232, 103, 62], [251, 178, 76], [252, 244, 190]];
const NOT_YET = -1;

export function rampColour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  const mix = RAMP[low].map((value, c) => Math.round(value + (at - low) * (RAMP[low + 1][c] - value)));
  return `rgb(${mix.join(" ")})`;
}

/** Draw one image's map. `decodedAt`: a step per token, counted over all windows; -1 not yet, -2 was known. */
export function drawOrderMap(canvas, { grid, decodedAt, step, steps }) {
  const [rows, columns] = grid;
  const cell = Math.max(4, Math.floor(432 / Math.max(rows, columns)));
  const gap = Math.max(1, Math.round(cell / 18));
  canvas.width = columns * cell;
  canvas.height = rows * cell;
  const context = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  const colours = { [NOT_YET]: style.getPropertyValue("--token-open"), [-2]: style.getPropertyValue("--token-known") };
  const newest = decodedAt.reduce((most, at) => Math.max(most, at), -1);
  const last = Math.max(newest + Math.max(0, (steps ?? 0) - step), 1); // of this window
  decodedAt.forEach((step, i) => {
    const [x, y] = [(i % columns) * cell, Math.floor(i / columns) * cell];
    context.fillStyle = step < 0 ? colours[step] : rampColour(step / last);
    context.beginPath();
    context.roundRect(x + gap / 2, y + gap / 2, cell - gap, cell - gap, cell / 9);
    context.fill();
  });
  const open = decodedAt.filter((step) => step === NOT_YET).length;
  const known = decodedAt.filter((step) => step < NOT_YET).length;
  const decoded = decodedAt.length - open - known;
  const label = `${decoded} of ${decodedAt.length - known} tokens decoded${known ? `, ${known} were known` : ""}`;
  canvas.setAttribute("aria-label", `Order map: ${label}`);
  return { decoded, total: decodedAt.length - known, known };
}

/** Exact decoding does not know beforehand how many steps there will be. */
export const stepText = ({ step, steps }) => (steps ? `step ${step} of ${steps}` : `step ${step}`);

/** The finished share of a window: by steps, or by tokens where the number of steps is not known. */
export function shareOf({ step, steps, decoded_at }) {
  const wanted = decoded_at[0].filter((at) => at > -2);
  const decoded = wanted.filter((at) => at >= 0).length / Math.max(1, wanted.length);
  return Math.max(decoded, steps ? step / steps : 0);
}

/** An empty map for a model's grid. */
export function drawEmptyMap(canvas, grid) {
  drawOrderMap(canvas, { grid, decodedAt: Array(grid[0] * grid[1]).fill(NOT_YET), step: 0, steps: 1 });
  canvas.setAttribute("aria-label", "No tokens yet");
}
