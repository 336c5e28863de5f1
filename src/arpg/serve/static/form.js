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
  constructor(sketch, onchange) {
    Object.assign(this, { info: null, sketch, onchange, locked: false });
    document.querySelectorAll("input[name=task]").forEach((input) => input.addEventListener("change", () => this.#task()));
    document.querySelectorAll("input[name=from]").forEach((input) => input.addEventListener("change", () => this.#task()));
    byId("fits").addEventListener("change", () => this.#task());
    for (const corner of CORNERS) byId(`box-${corner}`).addEventListener("input", () => onchange("box"));
    for (const side of SIDES) byId(`side-${side}`).addEventListener("input", () => onchange("sides"));
    for (const id of ["prompt", "negative"]) {
      byId(id).addEventListener("input", () => {
        byId(id).removeAttribute("aria-invalid");
        onchange("subject");
      });
    }
    byId("feather").addEventListener("input", () => {
      this.#showFeather();
      onchange("feather");
    });
    byId("method").addEventListener("change", () => {
      this.#showMethod();
      onchange("method");
    });
    for (const id of ["num", "size-w", "size-h"]) this.#number(id);
    this.#seed();
    this.#sizes();
    this.roll();
  }

  /** Take the limits, texts and choices of a model; what was entered stays. */
  use(info) {
    const first = !this.info;
    this.info = info;
    byId("num").max = info.limits.images;
    for (const id of ["size-w", "size-h"]) byId(id).max = info.limits.side;
    for (const id of ["prompt", "negative"]) byId(id).maxLength = info.limits.prompt;
    for (const side of SIDES) byId(`side-${side}`).step = info.stride;
    describeSlider("feather", info, "feather", first);
    this.#showFeather();
    this.#subject();
    this.#methods();
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
      model: this.info.models?.length > 1 ? this.info.model : null,
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
    this.#showFeather();
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

  #sizes() {
    for (const [at, id, other] of [[0, "size-w", "size-h"], [1, "size-h", "size-w"]]) {
      byId(id).addEventListener("input", () => {
        byId(other).value = Math.round((number(id) * this.base[1 - at]) / this.base[at]) || "";
      });
    }
  }

  #methods() {
    const { value } = byId("method");
    const names = ["", ...this.info.choices.method.map(({ name }) => name)];
    byId("method").replaceChildren(...names.map((name) => make("option", { value: name }, name || "default")));
    byId("method").value = names.includes(value) ? value : "";
    this.#showMethod();
  }

  #showMethod() {
    const chosen = this.info.choices.method.find(({ name }) => name === byId("method").value);
    byId("method-about").textContent = chosen?.about ?? "The server's default.";
  }

  #showFeather() {
    byId("feather-out").textContent = `${byId("feather").value} px`;
    paintSlider(byId("feather"));
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
    byId("class-chips").hidden = byId("prompt-chips").hidden = free || form.task !== "generate";
  }

  /** Show the field for classes, or that for prompts with examples and what the model knows. */
  #subject() {
    const { takes, prompt_tokens: tokens, about, examples = [] } = this.info;
    const text = takes === "text";
    byId("prompt-field").hidden = !text;
    byId("class-field").hidden = text;
    byId("from-class").nextElementSibling.textContent = text ? "From the prompt" : "From the class";
    if (!text) return;
    byId("prompt-about").textContent = `The first ${tokens} tokens count; a word is one or two.`;
    byId("known-field").hidden = !about;
    byId("known").textContent = about ?? "";
    const chips = examples.map((prompt) => {
      const click = () => {
        byId("prompt").value = prompt;
        this.onchange("subject");
      };
      return make("button", { type: "button", className: "chip", on: { click } }, prompt);
    });
    byId("prompt-chips").replaceChildren(...chips);
    if (!byId("prompt").value && examples.length) byId("prompt").value = examples[0]; // so that Generate works at once
  }

  #number(id) {
    byId(id).addEventListener("input", () => this.onchange(id));
    byId(id).addEventListener("change", (event) => {
      event.target.value = Math.min(Math.max(1, number(id)), byId(id).max);
      this.onchange(id);
    });
  }
}
