// Two settings side by side: each with its image, its order map and the settings that differ.

import { byId, make } from "./dom.js";
import { drawScaled, sharpen } from "./display.js";
import { drawEmptyMap, drawOrderMap, stepText } from "./order_map.js";
import { toBlob } from "./loaded_image.js";

export class Compare {
  constructor() {
    this.place = byId("compare");
    this.sides = ["A", "B"].map((name) => new Side(name));
    this.place.replaceChildren(...this.sides.map((side) => side.element));
  }

  start(grid, resolved) {
    const differing = Object.keys(resolved[0]).filter((name) => String(resolved[0][name]) !== String(resolved[1][name]));
    this.sides.forEach((side, i) => side.start(grid, describe(resolved[i], differing)));
  }
}

const describe = (values, names) =>
  names.length ? names.map((name) => `${name.replaceAll("_", " ")} ${values[name]}`).join(", ") : "the same settings as the other";

class Side {
  constructor(name) {
    this.name = name;
    this.image = make("canvas", { className: "compare-image", role: "img", "aria-label": `${name}: no image yet`, width: 96, height: 96 });
    this.map = make("canvas", { className: "order-map", role: "img", "aria-label": `${name}: no tokens yet` });
    this.about = make("p", { className: "compare-about" });
    this.state = make("p", { className: "muted" });
    this.link = make("a", { className: "button quiet", hidden: true }, "Download");
    const caption = make("figcaption", {}, make("h3", {}, name), this.about, this.state, this.link);
    this.element = make("figure", {}, this.image, make("div", { className: "compare-side" }, this.map, caption));
    this.turn = 0;
  }

  start(grid, about) {
    this.about.textContent = about;
    this.state.textContent = "waiting";
    this.link.hidden = true;
    this.turn += 1;
    this.image.getContext("2d").clearRect(0, 0, this.image.width, this.image.height);
    drawEmptyMap(this.map, grid);
  }

  async step(event) {
    this.state.textContent = stepText(event);
    drawOrderMap(this.map, { ...event, decodedAt: event.decoded_at[0] });
    if (event.previews.length) await this.#draw(event.previews[0], `${this.name} after ${stepText(event)}`);
  }

  async done({ images, seconds }, name) {
    this.state.textContent = `${seconds.toFixed(1)} s · ${images[0].width} × ${images[0].height}, upscaled for display`;
    this.link.href = URL.createObjectURL(toBlob(images[0].png));
    this.link.download = `${name}-${this.name.toLowerCase()}.png`;
    this.link.hidden = false;
    const bitmap = await this.#draw(images[0].png, `${this.name}: ${this.about.textContent}`);
    if (bitmap) sharpen([{ bitmap, base64: images[0].png }], () => bitmap === this.bitmap && this.#paint());
  }

  async #draw(base64, label) {
    const turn = (this.turn += 1);
    const bitmap = await createImageBitmap(toBlob(base64));
    if (turn !== this.turn) return null;
    this.bitmap = bitmap;
    this.image.setAttribute("aria-label", label);
    this.#paint();
    return bitmap;
  }

  #paint() {
    const { bitmap } = this;
    const side = Math.max(bitmap.width, bitmap.height);
    const sharp = Math.max(1, Math.round(640 / side)); // enough pixels for the canvas to stay smooth when enlarged
    this.image.width = bitmap.width * sharp;
    this.image.height = bitmap.height * sharp;
    drawScaled(this.image.getContext("2d"), bitmap, [0, 0, this.image.width, this.image.height]);
  }
}
