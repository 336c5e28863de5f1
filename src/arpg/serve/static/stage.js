// The stage: the image to work on, the previews of the running job, and its results.

import { Board } from "./board.js";
import { byId, make, paintSlider, radio } from "./dom.js";
import { Mask } from "./mask.js";
import { drawEmptyMap, drawOrderMap, shareOf, stepText } from "./order_map.js";
import { LoadedImage, save, toBlob } from "./loaded_image.js";
import { Replay } from "./replay.js";

const MODES = { inpaint: "paint", edit: "box", outpaint: "edges" };
const NO_SIDES = { left: 0, top: 0, right: 0, bottom: 0 };

export class Stage {
  /** `on` has box(box), sides(sides) and change(), called after the user changed something on the image. */
  constructor(info, on) {
    Object.assign(this, { info, on, task: "generate", source: null, mask: null, results: [], selected: 0 });
    this.state = "empty"; // empty, source (being worked on), running, result
    this.board = new Board(byId("board"), {
      press: () => this.state === "result" && (this.task === "inpaint" || this.task === "edit") && this.adopt(),
      stroke: () => on.change(),
      box: () => on.box(this.board.box),
      sides: () => on.sides(this.board.sides),
    });
    this.replay = new Replay((bitmap, frame, image) => this.#frame(bitmap, frame, image));
    this.#tools();
    byId("keep").addEventListener("click", () => this.adopt());
    byId("back").addEventListener("click", () => this.back());
    byId("before").addEventListener("change", () => this.#showResult());
    document.addEventListener("themechange", () => this.#redrawMap());
    drawEmptyMap(byId("order-map"), info.grid);
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

  start(title) {
    const [heading, about] = [byId("stage-title").textContent, byId("stage-about").textContent];
    this.before = { state: this.state, heading, about, frames: this.replay.frames }; // for when the run is cancelled
    this.#state("running");
    this.replay.reset();
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
    this.selected = 0;
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
    this.#state("result");
    this.select(0);
    return last;
  }

  /** Show a past run: its result, and its last map if there is one. */
  restore(map) {
    this.replay.reset();
    this.last = map || null;
  }

  /** Restore the state before the run. */
  cancelled() {
    const { state, heading, about, frames } = this.before;
    this.replay.reset();
    this.replay.frames = frames;
    this.last = this.lastMap = null;
    this.#title(heading, about);
    byId("live").textContent = "Cancelled";
    byId("fact-step").textContent = byId("fact-tokens").textContent = byId("fact-time").textContent = "–";
    drawEmptyMap(byId("order-map"), this.info.grid);
    if (state === "result") {
      this.#state("result");
      this.select(this.selected);
    } else if (this.source) this.#edit();
    else {
      this.#state("empty");
      this.board.show(null, "No image yet");
    }
  }

  select(at) {
    this.selected = at;
    byId("before").checked = false;
    this.replay.select(at);
    [...byId("results").children].forEach((button, i) => button.setAttribute("aria-pressed", i === at));
    const { name } = this.results[at];
    const link = byId("download");
    URL.revokeObjectURL(link.href);
    link.href = URL.createObjectURL(toBlob(this.results[at].base64));
    link.download = `${name}${this.results.length > 1 ? `-${at}` : ""}.png`;
    this.#showResult();
    this.on.change();
  }

  async saveMask() {
    save(toBlob(await this.mask.toBase64()), "mask.png");
  }

  #showResult() {
    const before = byId("before").checked && this.source;
    const image = before ? this.source : this.results[this.selected];
    this.board.setMode("view");
    this.board.show(image.bitmap, before ? "The original" : byId("stage-title").textContent);
    this.board.canvas.dataset.paint = this.task === "inpaint" || this.task === "edit";
  }

  #edit() {
    this.#state("source");
    const { limits, stride } = this.info;
    this.board.mask = this.mask;
    this.board.setMode(MODES[this.task] || "view", { most: limits.side, stride });
    this.board.show(this.source.bitmap, `${this.source.name}, ${this.source.width} by ${this.source.height} pixels`);
    this.on.change();
  }

  #frame(bitmap, frame, image) {
    const at = Math.min(image, frame.decoded_at.length - 1);
    this.lastMap = { grid: frame.grid, decodedAt: frame.decoded_at[at], steps: frame.steps };
    const { decoded, total } = drawOrderMap(byId("order-map"), this.lastMap);
    byId("fact-step").textContent = frame.steps ? `${frame.step} / ${frame.steps}` : frame.step;
    byId("fact-tokens").textContent = `${decoded} / ${total}`;
    if (this.state === "running") byId("fact-time").textContent = `${((performance.now() - this.began) / 1000).toFixed(1)} s`;
    if (bitmap && (this.state === "running" || !byId("before").checked)) {
      this.board.show(bitmap, `The image after ${stepText(frame)}`);
    }
  }

  #redrawMap() {
    if (this.lastMap) drawOrderMap(byId("order-map"), this.lastMap);
    else drawEmptyMap(byId("order-map"), this.info.grid);
  }

  #strip() {
    const buttons = this.results.map((result, i) => {
      const img = make("img", { alt: `Image ${i + 1}`, src: URL.createObjectURL(toBlob(result.base64)) });
      return make("button", { type: "button", "aria-pressed": "false", on: { click: () => this.select(i) } }, img);
    });
    byId("results").replaceChildren(...buttons);
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
    byId("results").hidden = !result || this.results.length < 2;
    byId("replay").hidden = !result || this.replay.frames.length < 3;
    for (const id of ["keep", "back", "before-field"]) byId(id).hidden = !result || this.task === "generate";
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
