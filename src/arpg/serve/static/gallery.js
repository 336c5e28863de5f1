// The gallery: all images of a run as a grid on the stage; choosing one shows it alone.

import { make } from "./dom.js";
import { drawScaled } from "./display.js";

export class Gallery {
  /** `on` has pick(i), called when an image is chosen, and drawn(scale). */
  constructor(place, on) {
    Object.assign(this, { place, on, cells: [], bitmaps: [] });
    new ResizeObserver(() => this.draw()).observe(place);
  }

  get hidden() {
    return this.place.hidden;
  }

  set hidden(yes) {
    this.place.hidden = yes;
  }

  /** Make `count` empty cells, in as many columns as rows. */
  start(count) {
    this.bitmaps = [];
    this.cells = Array.from({ length: count }, () => make("canvas"));
    const columns = Math.ceil(Math.sqrt(count));
    this.place.style.setProperty("--columns", columns);
    this.place.style.setProperty("--rows", Math.ceil(count / columns));
    const button = (canvas, i) =>
      make("button", { type: "button", "aria-label": `Image ${i + 1} of ${count}`, on: { click: () => this.on.pick(i) } }, canvas);
    this.place.replaceChildren(...this.cells.map(button));
  }

  show(bitmaps) {
    this.bitmaps = bitmaps;
    this.draw();
  }

  draw() {
    if (this.hidden || !this.bitmaps.length) return;
    const dense = window.devicePixelRatio || 1;
    let shown = 1;
    this.bitmaps.forEach((bitmap, i) => {
      const canvas = this.cells[i];
      const { width, height } = canvas.parentElement.getBoundingClientRect();
      shown = Math.min(width / bitmap.width, height / bitmap.height) || 1;
      canvas.width = Math.max(1, Math.round(bitmap.width * shown * dense));
      canvas.height = Math.max(1, Math.round(bitmap.height * shown * dense));
      canvas.style.inlineSize = `${canvas.width / dense}px`;
      drawScaled(canvas.getContext("2d"), bitmap, [0, 0, canvas.width, canvas.height]);
    });
    this.on.drawn(shown);
  }
}
