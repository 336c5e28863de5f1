// The steps of the last run, kept for replay: a slider and a play button.

import { byId, paintSlider, setIcon } from "./dom.js";
import { stepText } from "./order_map.js";
import { toBlob } from "./loaded_image.js";

const MOST_FRAMES = 160; // of a long run every second one is dropped, then every second of those
const PACE = 90; // milliseconds per frame

export class Replay {
  /** `show(bitmaps, frame)` draws one frame; `bitmaps` has all of its images. */
  constructor(show) {
    this.show = show;
    this.slider = byId("replay-step");
    this.button = byId("replay-play");
    this.turn = 0;
    this.reset();
    this.slider.addEventListener("input", () => {
      this.stop();
      this.seek(Number(this.slider.value));
    });
    this.button.addEventListener("click", () => (this.timer ? this.stop() : this.play()));
  }

  reset() {
    this.stop();
    Object.assign(this, { frames: [], every: 1, seen: 0 });
    this.turn += 1; // frames that are still being decoded are out of date
    byId("replay").hidden = true;
  }

  /** A step event; shown at once. */
  add(frame) {
    if (!frame.previews.length) return this.show(null, frame); // the server leaves previews out for slow readers
    if (this.seen++ % this.every === 0) this.frames.push(frame);
    if (this.frames.length > MOST_FRAMES) {
      this.frames = this.frames.filter((_, i) => i % 2 === 0);
      this.every *= 2;
    }
    return this.#draw(frame);
  }

  /** Append the finished image as the last frame. */
  finish(last) {
    this.frames.push(last);
    this.slider.max = this.frames.length - 1;
    byId("replay").hidden = this.frames.length < 3;
    this.#mark(this.frames.length - 1);
  }

  seek(at) {
    this.#mark(at);
    return this.#draw(this.frames[at]);
  }

  play() {
    setIcon(this.button, "pause");
    this.button.querySelector("span").textContent = "Pause";
    let at = Number(this.slider.value);
    if (at >= this.frames.length - 1) at = -1;
    const tick = async () => {
      at += 1;
      await this.seek(at);
      if (!this.timer) return;
      if (at >= this.frames.length - 1) return this.stop();
      this.timer = setTimeout(tick, PACE);
    };
    this.timer = setTimeout(tick, 0);
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = null;
    setIcon(this.button, "play");
    this.button.querySelector("span").textContent = "Play the steps";
  }

  #mark(at) {
    this.slider.value = at;
    const frame = this.frames[at];
    byId("replay-out").textContent = frame.steps ? `${frame.step} / ${frame.steps}` : frame.step;
    const where = frame.windows > 1 ? `, window ${frame.window + 1} of ${frame.windows}` : "";
    this.slider.setAttribute("aria-valuetext", `${stepText(frame)}${where}`);
    paintSlider(this.slider);
  }

  async #draw(frame) {
    const turn = (this.turn += 1);
    const bitmaps = await Promise.all(frame.previews.map((preview) => createImageBitmap(toBlob(preview))));
    if (turn === this.turn) this.show(bitmaps, frame); // unless a later one has overtaken it
  }
}
