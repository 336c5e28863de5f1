// The form: task, seed, number of images, and the numbers of each task, synchronised with the board.

import { byId, describeSlider, make, paintSlider, radio, setIcon, setRadio } from "./dom.js";
import { canFit } from "./request.js";

const TASKS = {
  generate: ["Generate", "Generate a new image."],
  inpaint: ["Fill", "Brush over the part to fill. Everything else stays as it is."],
  edit: ["Replace", "Draw a box on the image to replace its content."],
  outpaint: ["Extend", "Drag the edges outwards: the image is continued into the new area."],
  expand: ["Enlarge", "Make an image larger than the model was trained for."],
};
const SIDES = ["left", "top", "right", "bottom"];
const CORNERS = ["l", "t", "r", "b"];
const number = (id) => Math.max(0, Math.round(Number(byId(id).value) || 0));

export class Form {
  /** `onchange(what)` reports what the user changed: task, box, sides, or anything else. */
  constructor(info, sketch, onchange) {
    Object.assign(this, { info, sketch, onchange, locked: false });
    this.#number("num", 1, info.limits.images);
    this.#subject(info);
    document.querySelectorAll("input[name=task]").forEach((input) => input.addEventListener("change", () => this.#task()));
    document.querySelectorAll("input[name=from]").forEach((input) => input.addEventListener("change", () => this.#task()));
    byId("fits").addEventListener("change", () => this.#task());
    for (const corner of CORNERS) byId(`box-${corner}`).addEventListener("input", () => onchange("box"));
    for (const side of SIDES) {
      byId(`side-${side}`).step = info.stride;
      byId(`side-${side}`).addEventListener("input", () => onchange("sides"));
    }
    describeSlider("feather", info, "feather");
    this.#slider("feather", (value) => `${value} px`, () => onchange("feather"));
    this.#seed();
    this.#expand();
    this.roll();
    this.#task();
  }

  get task() {
    return radio("task");
  }

  /** The texts of a past request; none is an empty field. */
  set texts({ prompt, negative }) {
    byId("prompt").value = prompt ?? "";
    byId("negative").value = negative ?? "";
    byId("negative-field").open = Boolean(negative);
  }

  set task(name) {
    setRadio("task", name);
    this.#task();
  }

  get from() {
    return radio("from");
  }

  get seed() {
    return number("seed");
  }

  get box() {
    const box = CORNERS.map((corner) => number(`box-${corner}`));
    return box[2] > box[0] && box[3] > box[1] ? box : null;
  }

  set box(box) {
    CORNERS.forEach((corner, i) => (byId(`box-${corner}`).value = box ? box[i] : ""));
  }

  get sides() {
    return Object.fromEntries(SIDES.map((side) => [side, number(`side-${side}`)]));
  }

  set sides(sides) {
    for (const side of SIDES) byId(`side-${side}`).value = sides[side] || 0;
  }

  set size([width, height]) {
    byId("size-w").value = width;
    byId("size-h").value = height;
  }

  /** All inputs of the request except class, prompt and settings. */
  read() {
    return {
      task: this.task,
      takes: this.info.takes,
      from: radio("from"),
      fits: byId("fits").checked,
      negative: byId("negative").value.trim(),
      seed: this.seed,
      num: Math.max(1, number("num")),
      feather: number("feather"),
      box: this.box,
      sides: this.sides,
      size: [number("size-w"), number("size-h")],
      method: byId("method").value,
      control: this.sketch.read(),
    };
  }

  /** Take over a past request. */
  restore(task, body) {
    this.task = task;
    this.setSeed(body.seed ?? 0, true);
    if (body.num) byId("num").value = body.num;
    if (body.feather !== undefined) byId("feather").value = body.feather;
    paintSlider(byId("feather"));
    byId("fits").checked = (task !== "generate" || Boolean(body.control)) && task !== "edit" && (body.class ?? body.prompt ?? null) === null;
    if (body.box) this.box = body.box;
    if (task === "outpaint") this.sides = body;
    if (task === "expand") setRadio("from", body.image ? "image" : "class");
    byId("method").value = body.method ?? body.way ?? ""; // entries of the history may have the old name
    this.#task();
  }

  /** A new seed, unless this one is to be kept. */
  roll() {
    if (!this.locked) this.setSeed(crypto.getRandomValues(new Uint32Array(1))[0] % 1000000, false);
  }

  setSeed(seed, locked) {
    byId("seed").value = seed;
    this.locked = locked;
    const button = byId("seed-lock");
    button.setAttribute("aria-pressed", locked);
    setIcon(button, locked ? "lock" : "unlock");
  }

  #seed() {
    byId("seed").addEventListener("input", () => {
      this.setSeed(byId("seed").value, true); // a seed that is typed in is kept
      this.onchange("seed");
    });
    byId("seed-lock").addEventListener("click", () => this.setSeed(this.seed, !this.locked));
    byId("seed-roll").addEventListener("click", () => {
      const { locked } = this;
      this.locked = false;
      this.roll();
      this.setSeed(this.seed, locked);
      this.onchange("seed");
    });
  }

  /** Set the size of the image to enlarge; the new size has the same aspect ratio. */
  setBase(base) {
    if (String(base) === String(this.base)) return;
    this.base = base;
    const most = this.info.limits.side / Math.max(...base);
    const times = (factor) => base.map((side) => Math.round(side * factor));
    this.size = times(Math.min(2, Math.max(1, most)));
    const chips = [2, 3, 4].filter((factor) => factor <= most).map((factor) => {
      const click = () => {
        this.size = times(factor);
        this.onchange("size");
      };
      return make("button", { type: "button", className: "chip", on: { click } }, `${factor} ×`);
    });
    byId("size-chips").replaceChildren(...chips);
  }

  #expand() {
    this.setBase(this.info.image_size);
    const most = this.info.limits.side;
    for (const [at, id, other] of [[0, "size-w", "size-h"], [1, "size-h", "size-w"]]) {
      byId(id).addEventListener("input", () => {
        byId(other).value = Math.round((number(id) * this.base[1 - at]) / this.base[at]) || "";
      });
      this.#number(id, 1, most);
    }
    const methods = [{ name: "", about: "The server's default." }, ...this.info.choices.method];
    byId("method").replaceChildren(...methods.map(({ name }) => make("option", { value: name }, name || "default")));
    const describe = () => (byId("method-about").textContent = methods.find(({ name }) => name === byId("method").value)?.about || "");
    byId("method").addEventListener("change", () => {
      describe();
      this.onchange("method");
    });
    describe();
  }

  #task() {
    const form = this.read();
    const [label, about] = TASKS[form.task];
    byId("go-label").textContent = label;
    byId("task-about").textContent = about;
    for (const part of document.querySelectorAll("[data-task]")) part.hidden = part.dataset.task !== form.task;
    byId("box-field").hidden = form.task !== "edit" && form.task !== "inpaint";
    byId("box-fill").hidden = form.task !== "inpaint";
    this.fit();
    this.onchange("task");
  }

  /** Show the option to give no class or prompt where the task allows it. */
  fit() {
    const form = this.read();
    byId("fits-field").hidden = !canFit(form);
    const free = canFit(form) && form.fits;
    byId("class-input").disabled = byId("prompt").disabled = byId("negative").disabled = free;
    byId("class-chips").hidden = free || form.task !== "generate";
  }

  /** Show the field for classes or for prompts, whichever the model takes. */
  #subject(info) {
    const text = info.takes === "text";
    byId("prompt-field").hidden = !text;
    byId("class-field").hidden = text;
    if (!text) return;
    byId("from-class").nextElementSibling.textContent = "From the prompt";
    byId("prompt-about").textContent = `The first ${info.prompt_tokens} tokens count; a word is one or two.`;
    for (const id of ["prompt", "negative"]) {
      byId(id).maxLength = info.limits.prompt;
      byId(id).addEventListener("input", () => {
        byId(id).removeAttribute("aria-invalid");
        this.onchange("subject");
      });
    }
  }

  #number(id, min, max) {
    Object.assign(byId(id), { min, max });
    byId(id).addEventListener("input", () => this.onchange(id));
    byId(id).addEventListener("change", (event) => {
      event.target.value = Math.min(Math.max(min, number(id)), max);
      this.onchange(id);
    });
  }

  #slider(id, text, call) {
    const input = byId(id);
    const show = () => {
      byId(`${id}-out`).textContent = text(input.value);
      paintSlider(input);
    };
    input.addEventListener("input", () => {
      show();
      call();
    });
    show();
  }
}
