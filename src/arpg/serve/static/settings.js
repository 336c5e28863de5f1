// The settings: sliders and selects built from the `settings` of /v1/arpg/info, in two variants for comparing.

import { byId, icon, make, paintSlider, radio, setRadio } from "./dom.js";

export class Settings {
  /** `onchange` is called whenever a value, the variant or comparing changes. */
  constructor(onchange) {
    this.onchange = onchange;
    this.variants = [{}, {}]; // only what differs from the model's own recommendation
    this.current = 0;
    this.#listen();
  }

  /** Build the rows of a model; values that were set stay, and the others follow its recommendation. */
  use(info) {
    this.info = info;
    this.names = info.settings.map(({ name }) => name);
    this.rows = new Map();
    const more = make("details", { className: "more" }, make("summary", {}, "More"));
    byId("settings-rows").replaceChildren(more);
    for (const setting of info.settings) {
      const row = setting.choices ? this.#select(setting) : this.#number(setting);
      this.rows.set(setting.name, row);
      if (setting.advanced) more.append(row.element);
      else more.before(row.element);
    }
    this.refresh();
  }

  get comparing() {
    return byId("comparing").checked;
  }

  /** The model's recommendation; guidance follows the number of steps. A setting that is off by default shows 0. */
  defaultOf(name, values) {
    const steps = values.steps ?? this.info.defaults.steps;
    if (name === "guidance") return guidanceFor(this.info, inSteps(values) ? steps : Infinity);
    if (name === "attention" && !inSteps(values)) return "causal";
    return this.info.settings.find((setting) => setting.name === name).default ?? 0;
  }

  /** The values of a variant that differ from the defaults and have an effect: the settings of a request. */
  given(variant = this.current) {
    const values = { ...this.variants[variant] };
    for (const name of inSteps(values) ? ["draft"] : ["steps", "schedule", "attention"]) delete values[name];
    return values;
  }

  resolved(variant = this.current) {
    const values = this.variants[variant];
    const unused = new Set(inSteps(values) ? ["draft"] : ["steps", "schedule"]);
    const names = this.names.filter((name) => !unused.has(name));
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

  /** Set the first variant to the settings of an image or a past request. Unknown names are left out. */
  restore(values) {
    byId("comparing").checked = false;
    this.current = 0;
    this.variants[0] = {};
    for (const name of ["decode", "steps", ...this.names]) {
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

  #listen() {
    byId("settings-reset").addEventListener("click", () => {
      this.variants[this.current] = {};
      this.refresh();
      this.onchange();
    });
    byId("comparing").addEventListener("change", () => {
      if (this.comparing && sameValues(this.resolved(0), this.resolved(1))) this.variants[1] = this.#alternative();
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

  /** Settings to compare the first with: a third of its steps; where it finds its own steps, the recommended ones. */
  #alternative() {
    const { decode, ...given } = this.given(0);
    if (Array.isArray(given.schedule)) delete given.schedule; // it is a number of steps, too
    if (decode) return given;
    const { steps } = this.resolved(0);
    return { ...given, steps: steps > 2 ? Math.round(steps / 3) : 3 * steps };
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

  #number({ name, type, help, maximum, slider: [min, high, step], default: recommended }) {
    const label = labelOf(name);
    const tokens = this.info.grid[0] * this.info.grid[1];
    const max = Math.min(high, maximum, ["steps", "draft"].includes(name) ? tokens : Infinity);
    const slider = make("input", { type: "range", id: `set-${name}`, min, max, step, "aria-describedby": `about-${name}` });
    const exact = make("input", { type: "number", min, max: maximum, step: "any", "aria-label": `${label}, exact value` });
    const reset = this.#reset(name, label);
    const take = (text) => {
      if (text === "" || !Number.isFinite(Number(text))) return this.refresh();
      const value = type === "int" ? Math.round(Number(text)) : Number(text);
      this.set(name, Math.min(Math.max(value, min), maximum));
    };
    const about = recommended === null ? `${help} 0 turns it off.` : help;
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

  #select({ name, choices }) {
    const label = labelOf(name);
    const select = make("select", { id: `set-${name}`, "aria-describedby": `about-${name}` });
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

/** "guidance_schedule" as "Guidance schedule". */
const labelOf = (name) => name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

const sameValues = (a, b) => JSON.stringify(a) === JSON.stringify(b);

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
