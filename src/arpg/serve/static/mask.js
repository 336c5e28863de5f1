// The mask: which pixels of an image are to be filled; strokes, boxes, undo, and the PNG for the server.

import { canvasBase64 } from "./loaded_image.js";

const COLOUR = "#e5387d"; // how the mask is tinted over the image; the server gets white
const MOST_UNDO = 40;

export class Mask {
  constructor(width, height) {
    this.canvas = new OffscreenCanvas(width, height);
    this.context = this.canvas.getContext("2d", { willReadFrequently: true });
    this.undone = [];
    this.onchange = () => {};
  }

  get width() {
    return this.canvas.width;
  }

  get height() {
    return this.canvas.height;
  }

  /** The share of pixels that are masked; half covered counts, as on the server. */
  get share() {
    return this.#alpha().reduce((sum, alpha) => sum + (alpha >= 128), 0) / (this.width * this.height);
  }

  /** Save the state for undo; called once before each change. */
  begin() {
    this.undone.push(this.#alpha());
    if (this.undone.length > MOST_UNDO) this.undone.shift();
  }

  line(from, to, size, erase) {
    const { context } = this;
    context.globalCompositeOperation = erase ? "destination-out" : "source-over";
    Object.assign(context, { strokeStyle: COLOUR, lineWidth: size, lineCap: "round", lineJoin: "round" });
    context.beginPath();
    context.moveTo(...from);
    context.lineTo(to[0] + 0.001, to[1]); // a line without length would not be drawn
    context.stroke();
    context.globalCompositeOperation = "source-over";
    this.onchange();
  }

  addBox([left, top, right, bottom]) {
    this.begin();
    this.context.fillStyle = COLOUR;
    this.context.fillRect(left, top, right - left, bottom - top);
    this.onchange();
  }

  invert() {
    this.begin();
    this.#set(this.#alpha().map((alpha) => (alpha >= 128 ? 0 : 255)));
  }

  clear() {
    this.begin();
    this.#set(new Uint8Array(this.width * this.height));
  }

  undo() {
    if (this.undone.length) this.#set(this.undone.pop());
  }

  async toBase64() {
    const out = new OffscreenCanvas(this.width, this.height);
    const pixels = new ImageData(this.width, this.height);
    this.#alpha().forEach((alpha, i) => pixels.data.set(alpha >= 128 ? [255, 255, 255, 255] : [0, 0, 0, 255], 4 * i));
    out.getContext("2d").putImageData(pixels, 0, 0);
    return canvasBase64(out);
  }

  /** From the mask of a past request: white is masked. */
  load(bitmap) {
    const { context } = this;
    context.drawImage(bitmap, 0, 0);
    const pixels = context.getImageData(0, 0, this.width, this.height).data;
    this.#set(Uint8Array.from({ length: this.width * this.height }, (_, i) => (pixels[4 * i] >= 128 ? 255 : 0)));
  }

  #alpha() {
    const pixels = this.context.getImageData(0, 0, this.width, this.height).data;
    const alpha = new Uint8Array(this.width * this.height);
    for (let i = 0; i < alpha.length; i++) alpha[i] = pixels[4 * i + 3];
    return alpha;
  }

  #set(alpha) {
    const pixels = new ImageData(this.width, this.height);
    const tint = [1, 3, 5].map((at) => parseInt(COLOUR.slice(at, at + 2), 16));
    alpha.forEach((value, i) => pixels.data.set([...tint, value], 4 * i));
    this.context.putImageData(pixels, 0, 0);
    this.onchange();
  }
}
