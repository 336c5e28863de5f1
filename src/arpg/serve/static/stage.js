// The stage: the image to work on, the previews of the running job, and its results.

import { Board } from "./board.js";
import { isSharp, setView, sharpen } from "./display.js";
import { byId, icon, make, paintSlider, radio, setRadio } from "./dom.js";
import { Gallery } from "./gallery.js";
import { Mask } from "./mask.js";
import { drawEmptyMap, drawOrderMap, shareOf, stepText } from "./order_map.js";
import { LoadedImage, save, toBlob, toBytes } from "./loaded_image.js";
import { Replay } from "./replay.js";
import { makeZip } from "./zip.js";

const MODES = { inpaint: "paint", edit: "box", outpaint: "edges" };
const NO_SIDES = { left: 0, top: 0, right: 0, bottom: 0 };

export class Stage {
  /** `on` has box(box), sides(sides) and change(), called after the user changed something on the image. */
  constructor(on) {
    Object.assign(this, { info: null, on, task: "generate", source: null, mask: null, results: [], selected: 0 });
    this.state = "empty"; // empty, source (being worked on), running, result
    this.together = false; // all images of the run as a grid
    this.board = new Board(byId("board"), {
      press: () => this.state === "result" && (this.task === "inpaint" || this.task === "edit") && this.adopt(),
      stroke: () => on.change(),
      box: () => on.box(this.board.box),
      sides: () => on.sides(this.board.sides),
      drawn: (scale) => this.gallery.hidden && this.#scaled(scale),
    });
    this.gallery = new Gallery(byId("gallery"), {
      pick: (at) => this.state === "result" && this.select(at),
      drawn: (scale) => this.#scaled(scale),
    });
    this.replay = new Replay((bitmaps, frame) => this.#frame(bitmaps, frame));
    this.#tools();
    byId("keep").addEventListener("click", () => this.adopt());
    byId("back").addEventListener("click", () => this.back());
    byId("before").addEventListener("change", () => this.#showResult());
    byId("download-all").addEventListener("click", () => this.saveAll());
    byId("scaled").addEventListener("change", () => this.#view());
    document.addEventListener("themechange", () => this.#redrawMap());
  }

  /** Take the grid and the limits of a model; the image stays. */
  use(info) {
    if (!this.info && info.upscales) setRadio("view", "sharp");
    this.info = info;
    byId("view-sharp").hidden = !info.upscales;
    this.#view();
    if (this.state === "source") this.#edit();
    if (this.state !== "result") this.lastMap = null;
    this.#redrawMap();
  }

  get image() {
    return this.state === "result" ? this.results[this.selected] : this.source;
  }

  /** Another task starts from the image that is shown. */
  setTask(task) {
    if (task === this.task) return;
    this.task = task;
    if (this.state === "result") this.setSource(this.results[this.selected]);
    else if (this.state === "source") this.#edit();
  }

  setSource(image, about = "") {
    this.source = image;
    this.mask = new Mask(image.width, image.height);
    this.mask.onchange = () => this.board.draw();
    const [w, h] = [image.width, image.height];
    this.board.box = [w / 4, h / 4, (3 * w) / 4, (3 * h) / 4].map(Math.round);
    this.board.sides = { ...NO_SIDES };
    if (about) this.#title(image.name, about);
    this.#edit();
    this.on.box(this.board.box);
    this.on.sides(this.board.sides);
    byId("brush-size").max = Math.max(24, Math.round(Math.max(w, h) / 2));
    paintSlider(byId("brush-size"));
  }

  /** The result becomes the image to work on. */
  adopt() {
    this.setSource(this.results[this.selected]);
  }

  /** Back to the image as it was before the run, with its mask, box or edges. */
  back() {
    if (this.source) this.#edit();
  }

  setBox(box) {
    if (box) this.board.box = box;
    this.board.draw();
  }

  setSides(sides) {
    this.board.sides = { ...sides };
    this.board.draw();
  }

  start(title, count) {
    const [heading, about] = [byId("stage-title").textContent, byId("stage-about").textContent];
    const { state, selected, together } = this;
    this.before = { state, selected, together, heading, about, frames: this.replay.frames }; // for when the run is cancelled
    Object.assign(this, { selected: 0, together: count > 1 });
    this.#state("running");
    this.replay.reset();
    this.gallery.start(count);
    this.gallery.hidden = !this.together;
    this.board.setMode("view");
    this.#title(title, "waiting for its turn");
    byId("progress").firstElementChild.style.inlineSize = "0%";
    byId("fact-step").textContent = byId("fact-tokens").textContent = byId("fact-time").textContent = "–";
    this.began = performance.now();
    this.announced = -1;
    this.last = null;
  }

  queued(position) {
    byId("stage-about").textContent = position > 1 ? `number ${position} in the queue` : "starting";
  }

  step(event) {
    const share = ((event.window || 0) + shareOf(event)) / (event.windows || 1);
    const percent = Math.round(100 * share);
    byId("progress").setAttribute("aria-valuenow", percent);
    byId("progress").firstElementChild.style.inlineSize = `${percent}%`;
    const where = event.windows > 1 ? `, window ${event.window + 1} of ${event.windows}` : "";
    byId("stage-about").textContent = `${stepText(event)}${where}`;
    if (Math.floor(4 * share) > this.announced) {
      this.announced = Math.floor(4 * share); // screen readers announce quarters, not every step
      byId("live").textContent = `${stepText(event)}${where}`;
    }
    this.replay.add(event);
    this.last = event;
  }

  async done(answer, { title, about, name, source = null }) {
    this.results = await Promise.all(answer.images.map((image) => LoadedImage.fromBase64(image.png, name)));
    if (source) this.source = source;
    Object.assign(this, { selected: 0, together: this.results.length > 1 });
    this.gallery.start(this.results.length);
    this.#title(title, about);
    byId("live").textContent = `Done: ${title}, ${about}`;
    const last = this.last && { ...this.last, previews: answer.images.map((image) => image.png) };
    if (last) {
      // The number of steps of exact decoding is known only now.
      last.step = last.steps = Math.max(1, ...last.decoded_at.flat().map((at) => at + 1));
      if (!(last.windows > 1)) for (const frame of this.replay.frames) frame.steps = last.steps;
      this.replay.finish(last);
    }
    byId("fact-time").textContent = answer.seconds ? `${answer.seconds.toFixed(1)} s` : "–";
    if (!last) drawEmptyMap(byId("order-map"), this.info.grid);
    this.#strip();
    this.#present();
    return last;
  }

  /** Show a past run: its result, and its last map if there is one. */
  restore(map) {
    this.replay.reset();
    this.last = map || null;
  }

  /** Restore the state before the run. */
  cancelled() {
    const { state, selected, together, heading, about, frames } = this.before;
    Object.assign(this, { selected, together });
    this.gallery.start(this.results.length);
    this.replay.reset();
    this.replay.frames = frames;
    this.last = this.lastMap = null;
    this.#title(heading, about);
    byId("live").textContent = "Cancelled";
    byId("fact-step").textContent = byId("fact-tokens").textContent = byId("fact-time").textContent = "–";
    drawEmptyMap(byId("order-map"), this.info.grid);
    if (state === "result") this.#present();
    else if (this.source) this.#edit();
    else {
      this.#state("empty");
      this.gallery.hidden = true;
      byId("scaled").toggleAttribute("data-off", true);
      this.board.show(null, "No image yet");
    }
  }

  /** Show one image of the run alone. */
  select(at) {
    Object.assign(this, { selected: at, together: false });
    this.#present();
    byId("results").querySelector("[aria-pressed=true]")?.focus({ preventScroll: true });
  }

  /** Download all images of the run as a ZIP archive. */
  saveAll() {
    const files = this.results.map(({ base64, name }, i) => ({ name: `${name}-${i}.png`, bytes: toBytes(base64) }));
    save(makeZip(files), `${this.results[0].name}.zip`);
  }

  #present() {
    const { name, base64 } = this.results[this.selected];
    byId("before").checked = false;
    this.#state("result");
    [...byId("results").querySelectorAll("[aria-pressed]")].forEach((button, i) => button.setAttribute("aria-pressed", i === this.selected));
    const link = byId("download");
    URL.revokeObjectURL(link.href);
    link.href = URL.createObjectURL(toBlob(base64));
    link.download = `${name}${this.results.length > 1 ? `-${this.selected}` : ""}.png`;
    this.#showResult();
    if (this.replay.frames.length) this.replay.seek(this.replay.frames.length - 1);
    this.on.change();
  }

  async saveMask() {
    save(toBlob(await this.mask.toBase64()), "mask.png");
  }

  #showResult() {
    const before = byId("before").checked && this.source;
    const image = before ? this.source : this.results[this.selected];
    this.gallery.hidden = !this.together || Boolean(before);
    this.gallery.show(this.results.map(({ bitmap }) => bitmap));
    this.board.setMode("view");
    this.board.show(image.bitmap, before ? "The original" : byId("stage-title").textContent);
    this.#sharpen();
    this.board.canvas.dataset.paint = this.task === "inpaint" || this.task === "edit";
  }

  #edit() {
    this.#state("source");
    this.gallery.hidden = true;
    const { limits, stride } = this.info;
    this.board.mask = this.mask;
    this.board.setMode(MODES[this.task] || "view", { most: limits.side, stride });
    this.#sharpen();
    this.board.show(this.source.bitmap, `${this.source.name}, ${this.source.width} by ${this.source.height} pixels`);
    this.on.change();
  }

  #frame(bitmaps, frame) {
    const at = Math.min(this.selected, frame.decoded_at.length - 1);
    this.lastMap = { ...frame, decodedAt: frame.decoded_at[at] };
    const { decoded, total } = drawOrderMap(byId("order-map"), this.lastMap);
    byId("fact-step").textContent = frame.steps ? `${frame.step} / ${frame.steps}` : frame.step;
    byId("fact-tokens").textContent = `${decoded} / ${total}`;
    if (this.state === "running") byId("fact-time").textContent = `${((performance.now() - this.began) / 1000).toFixed(1)} s`;
    if (!bitmaps || (this.state !== "running" && byId("before").checked)) return;
    if (this.state === "result" && frame === this.replay.frames.at(-1)) bitmaps = this.results.map(({ bitmap }) => bitmap);
    if (this.together) this.gallery.show(bitmaps);
    else this.board.show(bitmaps[Math.min(at, bitmaps.length - 1)], `The image after ${stepText(frame)}`);
  }

  /** Say that what is shown is not the image pixel by pixel. */
  #scaled(scale) {
    byId("scaled").toggleAttribute("data-off", scale < 1.02);
    const shown = this.gallery.hidden ? this.board.image : this.gallery.bitmaps[0];
    const how = radio("view") === "pixels" ? `Each pixel enlarged ${scale.toFixed(1)} ×` : "Upscaled for display";
    byId("scaled").firstElementChild.textContent = isSharp(shown) ? `${how} by Real-ESRGAN` : how;
  }

  #view() {
    setView(radio("view"));
    this.#sharpen();
    this.#redraw();
  }

  /** Have the images that are shown now sharpened. */
  #sharpen() {
    const shown = this.state === "result" ? (this.together ? this.results : [this.results[this.selected]]) : [];
    sharpen([...shown, ...(this.source ? [this.source] : [])], () => this.#redraw());
  }

  #redraw() {
    this.board.draw();
    this.gallery.draw();
  }

  #redrawMap() {
    if (this.lastMap) drawOrderMap(byId("order-map"), this.lastMap);
    else if (this.info) drawEmptyMap(byId("order-map"), this.info.grid);
  }

  #strip() {
    const buttons = this.results.map((result, i) => {
      const img = make("img", { alt: `Image ${i + 1}`, src: URL.createObjectURL(toBlob(result.base64)) });
      return make("button", { type: "button", "aria-pressed": "false", on: { click: () => this.select(i) } }, img);
    });
    const all = () => {
      this.together = true;
      this.#present();
    };
    const back = make("button", { type: "button", className: "all", title: "Show all images", "aria-label": "Show all images", on: { click: all } }, icon("grid"));
    byId("results").replaceChildren(back, ...buttons);
  }

  #title(title, about) {
    byId("stage-title").textContent = title;
    byId("stage-about").textContent = about;
  }

  #state(state) {
    this.state = state;
    const result = state === "result";
    byId("empty").hidden = state !== "empty";
    byId("progress").hidden = state !== "running";
    byId("actions").hidden = !result;
    const several = this.results.length > 1;
    byId("results").hidden = !result || !several || this.together;
    byId("download").hidden = result && this.together;
    byId("download-all").hidden = !several;
    byId("order-title").textContent = `Token order${result && several ? `, image ${this.selected + 1}` : ""}`;
    byId("replay").hidden = !result || this.replay.frames.length < 3;
    for (const id of ["keep", "back", "before-field"]) byId(id).hidden = !result || this.task === "generate";
    if (this.together) byId("keep").hidden = true;
    if (!this.source) byId("back").hidden = byId("before-field").hidden = true;
  }

  #tools() {
    const size = byId("brush-size");
    const setSize = () => {
      this.board.brush = Number(size.value);
      byId("brush-out").textContent = `${size.value} px`;
      paintSlider(size);
    };
    size.addEventListener("input", setSize);
    setSize();
    document.querySelectorAll("input[name=tool]").forEach((input) =>
      input.addEventListener("change", () => (this.board.erase = radio("tool") === "eraser")),
    );
    const change = (id, call) =>
      byId(id).addEventListener("click", () => {
        if (!this.mask) return;
        if (this.state === "result") this.back();
        call();
        this.on.change();
      });
    change("mask-undo", () => this.mask.undo());
    change("mask-invert", () => this.mask.invert());
    change("mask-clear", () => this.mask.clear());
    addEventListener("keydown", (event) => {
      if (this.task !== "inpaint" || /^(INPUT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "range") return;
      if ((event.ctrlKey || event.metaKey) && event.key === "z") byId("mask-undo").click();
      else if (event.key === "[" || event.key === "]") {
        size.value = Number(size.value) + (event.key === "]" ? 4 : -4);
        setSize();
      } else return;
      event.preventDefault();
    });
  }
}
