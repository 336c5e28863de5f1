// The class picker: a search box with thumbnails, after the ARIA pattern of an editable combobox.

import { byId, make } from "./dom.js";

const MOST_SHOWN = 200;

export class ClassPicker {
  /** `onchange` gets no argument. */
  constructor(onchange) {
    Object.assign(this, { classes: [], sprite: null, onchange, active: -1, matches: [] });
    this.input = byId("class-input");
    this.list = byId("class-list");
    this.input.addEventListener("input", () => {
      this.open();
      this.#changed();
    });
    this.input.addEventListener("click", () => this.open(true));
    this.input.addEventListener("keydown", (event) => this.#key(event));
    this.input.addEventListener("blur", () => this.close());
    // The box keeps the focus: a press on the list must not take it away.
    this.list.addEventListener("pointerdown", (event) => event.preventDefault());
    this.list.addEventListener("click", (event) => {
      const option = event.target.closest("[role=option]");
      if (option) this.choose(this.matches[Number(option.dataset.at)].name);
    });
  }

  /** Take the classes of a model, [{id, name}], their `sprite`, {url, size, columns} or null, and names to try. */
  use(classes, sprite, examples) {
    if (!classes.length) return; // it takes prompts
    Object.assign(this, { classes, sprite });
    this.#chips(examples);
  }

  /** The text of the field; the server checks whether there is such a class. */
  get value() {
    return this.input.value.trim();
  }

  find(text) {
    const wanted = String(text).trim().toLowerCase();
    const exact = this.classes.find((one) => one.name.toLowerCase() === wanted || String(one.id) === wanted);
    return exact ?? this.classes.find((one) => singular(one.name) === singular(wanted));
  }

  choose(name) {
    this.input.value = name;
    this.close();
    this.#changed();
  }

  open(all = false) {
    const query = all ? "" : this.value.toLowerCase();
    // Names that start with the text first, then names with a word that does, then the rest; a plural finds its singular.
    const place = (name, text) => {
      const at = name.indexOf(text);
      return at === 0 ? 0 : at < 0 ? 3 : name.includes(` ${text}`) ? 1 : 2;
    };
    const rank = ({ id, name }) =>
      String(id) === query ? 0 : Math.min(place(name.toLowerCase(), query), place(singular(name), singular(query)));
    const ranked = [0, 1, 2].flatMap((at) => this.classes.filter((one) => rank(one) === at));
    this.matches = ranked.slice(0, MOST_SHOWN);
    this.list.replaceChildren(...this.matches.map((one, at) => this.#option(one, at)));
    if (!this.matches.length) this.list.append(make("li", { className: "none", role: "presentation" }, "No such class here"));
    const chosen = this.matches.findIndex((one) => one.name === this.value);
    this.#activate(chosen);
    this.list.hidden = false;
    this.list.scrollTop = 0; // the best match, wherever the list was before
    this.input.setAttribute("aria-expanded", "true");
    if (chosen >= 0) this.list.children[chosen].scrollIntoView({ block: "nearest" });
  }

  close() {
    this.list.hidden = true;
    this.input.setAttribute("aria-expanded", "false");
    this.input.removeAttribute("aria-activedescendant");
    this.active = -1;
  }

  /** An empty square where there is no sprite. */
  paintThumb(element, id) {
    const { sprite } = this;
    element.hidden = !sprite || id === undefined;
    if (element.hidden) return;
    const rows = Math.ceil(this.classes.length / sprite.columns);
    const side = 100 / (sprite.columns - 1 || 1);
    const rise = 100 / (rows - 1 || 1);
    element.style.backgroundImage = `url("${sprite.url}")`;
    element.style.backgroundSize = `${sprite.columns * 100}% ${rows * 100}%`;
    element.style.backgroundPosition = `${(id % sprite.columns) * side}% ${Math.floor(id / sprite.columns) * rise}%`;
  }

  #changed() {
    this.paintThumb(byId("class-thumb"), this.find(this.value)?.id);
    this.input.removeAttribute("aria-invalid");
    this.onchange();
  }

  #option(one, at) {
    const thumb = make("span", { className: "thumb" });
    this.paintThumb(thumb, one.id);
    const option = make("li", { id: `class-${at}`, role: "option", "aria-selected": "false" }, thumb, one.name);
    option.dataset.at = at;
    return option;
  }

  #activate(at) {
    this.list.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    this.active = at;
    const option = at >= 0 && this.list.children[at];
    if (!option) return this.input.removeAttribute("aria-activedescendant");
    option.setAttribute("aria-selected", "true");
    option.scrollIntoView({ block: "nearest" });
    this.input.setAttribute("aria-activedescendant", option.id);
  }

  #key(event) {
    const count = this.matches.length;
    const opened = !this.list.hidden;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (!opened) return this.open(Boolean(this.find(this.value)));
      const step = event.key === "ArrowDown" ? 1 : -1;
      if (count) this.#activate((this.active + step + count + (this.active < 0 && step < 0 ? 1 : 0)) % count);
    } else if (event.key === "Enter" && opened && !event.ctrlKey && !event.metaKey) {
      const taken = this.matches[this.active] || (this.find(this.value) ? null : this.matches[0]);
      event.preventDefault();
      if (taken) this.choose(taken.name);
      else this.close();
    } else if (event.key === "Escape" && opened) {
      event.stopPropagation();
      this.close();
    } else if (event.key === "Tab" && opened && this.active >= 0) {
      this.choose(this.matches[this.active].name);
    }
  }

  #chips(examples) {
    const known = examples.map((name) => this.find(name)).filter(Boolean);
    const spread = this.classes.filter((_, i) => i % Math.ceil(this.classes.length / 4) === 0);
    const chips = (known.length ? known : spread).slice(0, 6).map((one) => {
      const thumb = make("span", { className: "thumb" });
      this.paintThumb(thumb, one.id);
      const choose = () => this.choose(one.name);
      const text = make("span", {}, one.name);
      return make("button", { type: "button", className: "chip", on: { click: choose } }, thumb, text);
    });
    byId("class-chips").replaceChildren(...chips);
    if (!this.find(this.value)) this.input.value = (known[0] || this.classes[0])?.name ?? ""; // so that Generate works at once
    this.paintThumb(byId("class-thumb"), this.find(this.value)?.id);
  }
}

/** Every word in lower case and without the ending of an English plural: "Cherries red" as "cherry red". */
const singular = (text) =>
  text.toLowerCase().replace(/[a-z]{3,}/g, (word) =>
    word
      .replace(/ies$/, "y")
      .replace(/(ch|sh|ss|x|o)es$/, "$1")
      .replace(/([^s])s$/, "$1"),
  );
