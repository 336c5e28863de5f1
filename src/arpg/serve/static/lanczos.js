// Lanczos resampling, smoother than that of the canvas; the result is that of Pillow.

const LOBES = 3;
/** Enlarge an ImageData to width by height: columns first, then rows. */
export function lanczos({ data, width: from, height: rows }, width, height) {
  const wide = new Uint8ClampedArray(width * rows * 4);
  const across = taps(from, width);
  for (let y = 0; y < rows; y++) {
    for (let x = 0; x < width; x++) mix(data, 4 * y * from, 4, across, x, wide, 4 * (y * width + x));
  }
  const made = new ImageData(width, height);
  const down = taps(rows, height);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) mix(wide, 4 * x, 4 * width, down, y, made.data, 4 * (y * width + x));
  }
  return made;
}

/** The source positions of each of `to` samples and their weights, whose sum is 1. */
function taps(from, to) {
  const count = 2 * LOBES;
  const [at, weight] = [new Int32Array(to * count), new Float32Array(to * count)];
  for (let i = 0; i < to; i++) {
    const centre = ((i + 0.5) * from) / to - 0.5;
    const first = Math.floor(centre) - LOBES + 1;
    let sum = 0;
    for (let k = 0; k < count; k++) {
      const inside = first + k >= 0 && first + k < from;
      at[i * count + k] = inside ? first + k : 0;
      sum += weight[i * count + k] = inside ? kernel(first + k - centre) : 0;
    }
    for (let k = 0; k < count; k++) weight[i * count + k] /= sum;
  }
  return { at, weight };
}

const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));
const kernel = (x) => (Math.abs(x) < LOBES ? sinc(x) * sinc(x / LOBES) : 0);

function mix(source, start, stride, { at, weight }, i, target, to) {
  let [red, green, blue, alpha] = [0, 0, 0, 0];
  for (let k = i * 2 * LOBES; k < (i + 1) * 2 * LOBES; k++) {
    const from = start + at[k] * stride;
    red += weight[k] * source[from];
    green += weight[k] * source[from + 1];
    blue += weight[k] * source[from + 2];
    alpha += weight[k] * source[from + 3];
  }
  target[to] = red;
  target[to + 1] = green;
  target[to + 2] = blue;
  target[to + 3] = alpha;
}
