// The settings: sliders and selects built from what the model offers, in two variants for comparing.

import { byId, icon, make, paintSlider, radio, setRadio } from "./dom.js";

const NUMBERS = [
  ["steps", "Steps", "Rounds of drawing. Fewer is faster: each then fills more tokens at once."],
  ["guidance", "Guidance", "How closely what was asked for is followed. 1 turns it off."],
  ["temperature", "Temperature", "How freely tokens are drawn. 0 always takes the likeliest."],
  ["order", "Order", ""],
  ["schedule", "Schedule", ""],
  ["guidance_schedule", "Guidance schedule", ""],
  ["attention", "Attention", ""],
  ["decode", "Decoding", ""],
  ["draft", "Draft size", "Tokens guessed ahead in each round."],
  ["top_k", "Top-k", "Only the k likeliest codes; 0 is all of them."],
  ["top_p", "Top-p", "Only the likeliest codes that reach this share."],
  ["best_of", "Best of", "Draws this many and keeps the likeliest."],
];
const RARE = new Set(["top_k", "top_p", "best_of"]);
export const NAMES = NUMBERS.map(([name]) => name);

export class Settings {
  /** `onchange` is called whenever a value, the variant or comparing changes. */
  constructor(info, onchange) {
    this.info = info;
    this.onchange = onchange;
    this.variants = [{}, {}]; // only what differs from the model's own recommendation
    this.current = 0;
    this.rows = new Map();
    this.#build();
    this.refresh();
  }

  get comparing() {
    return byId("comparing").checked;
  }

  /** What the model does when nothing is said; guidance follows the number of steps. */
  defaultOf(name, values) {
    if (name === "best_of") return 1;
    if (name === "top_k") return this.info.defaults.top_k ?? 0;
    if (name === "guidance") return guidanceFor(this.info, inSteps(values) ? (values.steps ?? this.info.defaults.steps) : Infinity);
    if (name === "attention" && !inSteps(values)) return "causal";
    return this.info.defaults[name];
  }

  /** The values of a variant that differ from the defaults and matter: what a request has to say. */
  given(variant = this.current) {
    const values = { ...this.variants[variant] };
    for (const name of inSteps(values) ? ["draft"] : ["steps", "schedule", "attention"]) delete values[name];
    return values;
  }

  resolved(variant = this.current) {
    const values = this.variants[variant];
    const unused = new Set(inSteps(values) ? ["draft"] : ["steps", "schedule"]);
    const names = NAMES.filter((name) => !unused.has(name));
    const given = this.given(variant);
    return Object.fromEntries(names.map((name) => [name, given[name] ?? this.defaultOf(name, values)]));
  }

  set(name, value) {
    const values = this.variants[this.current];
    if (value === this.defaultOf(name, values)) delete values[name];
    else values[name] = value;
    this.refresh();
    this.onchange();
  }

  /** Take over what a picture or a past request says, into the first variant. Unknown names are left out. */
  restore(values) {
    byId("comparing").checked = false;
    this.current = 0;
    this.variants[0] = {};
    for (const name of ["decode", "steps", ...NAMES]) {
      const value = values[name];
      if (value === undefined || value === null) continue;
      if (JSON.stringify(value) !== JSON.stringify(this.defaultOf(name, this.variants[0]))) this.variants[0][name] = value;
    }
    this.refresh();
    this.onchange();
  }

  refresh() {
    byId("variants").hidden = !this.comparing;
    setRadio("variant", this.current);
    const values = this.variants[this.current];
    const resolved = this.resolved();
    for (const [name, row] of this.rows) row.show(resolved[name] ?? this.defaultOf(name, {}), name in values);
    for (const name of ["steps", "schedule", "attention"]) this.rows.get(name).element.hidden = !inSteps(values);
    this.rows.get("draft").element.hidden = inSteps(values);
    byId("settings-reset").hidden = Object.keys(values).length === 0;
    const first = this.resolved(0);
    byId("settings-brief").textContent = `${howLong(first)}, guidance ${first.guidance}, ${first.order}`;
  }

  #build() {
    const rows = byId("settings-rows");
    const more = make("details", { className: "more" }, make("summary", {}, "More"));
    for (const [name, label, about] of NUMBERS) {
      const row = this.info.choices[name] ? this.#select(name, label) : this.#number(name, label, about);
      this.rows.set(name, row);
      (RARE.has(name) ? more : rows).append(row.element);
    }
    rows.append(more);
    byId("settings-reset").addEventListener("click", () => {
      this.variants[this.current] = {};
      this.refresh();
      this.onchange();
    });
    byId("comparing").addEventListener("change", () => {
      if (this.comparing && !Object.keys(this.variants[1]).length) this.variants[1] = this.given(0);
      this.current = this.comparing ? 1 : 0; // the second is the one to change now
      this.refresh();
      this.onchange();
    });
    byId("variants").addEventListener("change", () => {
      this.current = Number(radio("variant"));
      this.refresh();
      this.onchange();
    });
  }

  #range(name) {
    const { limits, grid } = this.info;
    const tokens = grid[0] * grid[1];
    return {
      steps: [1, Math.min(limits.steps, tokens), 1],
      guidance: [0, 12, 0.1],
      temperature: [0, 2, 0.05],
      draft: [2, Math.min(64, tokens), 1],
      top_k: [0, 2000, 1],
      top_p: [0.05, 1, 0.05],
      best_of: [1, limits.best_of, 1],
    }[name];
  }

  #reset(name, label) {
    const call = () => {
      delete this.variants[this.current][name];
      this.refresh();
      this.onchange();
    };
    const title = `Reset ${label.toLowerCase()}`;
    return make("button", { type: "button", className: "reset", "aria-label": title, title, on: { click: call } }, icon("reset"));
  }

  #number(name, label, about) {
    const [min, max, step] = this.#range(name);
    const slider = make("input", { type: "range", id: `set-${name}`, min, max, step, "aria-describedby": `about-${name}` });
    const exact = make("input", { type: "number", min, max, step: "any", "aria-label": `${label}, exact value` });
    const reset = this.#reset(name, label);
    const take = (text) => {
      if (text === "" || !Number.isFinite(Number(text))) return this.refresh();
      const whole = Number.isInteger(step) ? Math.round(Number(text)) : Number(text);
      this.set(name, Math.min(Math.max(whole, min), name === "steps" ? this.info.limits.steps : Math.max(max, whole)));
    };
    slider.addEventListener("input", () => take(slider.value));
    exact.addEventListener("change", () => take(exact.value));
    const element = make(
      "div",
      { className: "slider" },
      make("label", { htmlFor: slider.id }, label),
      reset,
      exact,
      slider,
      make("p", { className: "about", id: `about-${name}` }, about),
    );
    const show = (value, changed) => {
      slider.value = value;
      if (document.activeElement !== exact || Number(exact.value) !== value) exact.value = value;
      reset.hidden = !changed;
      paintSlider(slider);
    };
    return { element, show };
  }

  #select(name, label) {
    const select = make("select", { id: `set-${name}`, "aria-describedby": `about-${name}` });
    const choices = this.info.choices[name];
    select.append(...choices.map((choice) => make("option", { value: choice.name }, choice.name)));
    const about = make("p", { className: "about", id: `about-${name}` });
    const reset = this.#reset(name, label);
    select.addEventListener("change", () => this.set(name, parseChoice(select.value)));
    const element = make("div", { className: "select" }, make("label", { htmlFor: select.id }, label), reset, select, about);
    const show = (value, changed) => {
      const text = String(value);
      if (![...select.options].some((option) => option.value === text)) select.append(make("option", { value: text }, text));
      select.value = text;
      about.textContent = choices.find((choice) => choice.name === text)?.about || "The tokens of each step.";
      reset.hidden = !changed;
    };
    return { element, show };
  }
}

/** Exact and speculative decoding find their own steps, and are causal. */
const inSteps = ({ decode }) => (decode ?? "steps") === "steps";

export const howLong = (settings) => (inSteps(settings) ? `${settings.steps} steps` : `${settings.decode} decoding`);

/** A schedule may be a list of sizes, shown as 16,48,80. */
const parseChoice = (text) => (/^\d+(,\d+)*$/.test(text) ? text.split(",").map(Number) : text);

/** The listed guidance; between two entries interpolated over log(steps), outside the nearest: as SamplingDefaults does. */
export function guidanceFor(info, steps) {
  const table = info.guidance_by_steps;
  if (!table?.length) return info.defaults.guidance;
  if (steps <= table[0][0]) return table[0][1];
  for (let i = 1; i < table.length; i++) {
    const [[low, from], [high, to]] = [table[i - 1], table[i]];
    if (steps <= high) return Number((from + (Math.log(steps / low) / Math.log(high / low)) * (to - from)).toFixed(3));
  }
  return table.at(-1)[1];
}
