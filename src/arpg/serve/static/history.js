// The history: past runs with pictures and settings, kept in the browser's own database.

import { byId, make } from "./dom.js";
import { toBlob } from "./picture.js";

const MOST = 60;

export class History {
  /** `pick(entry)` is called when one is chosen. */
  constructor(pick) {
    Object.assign(this, { pick, list: byId("history"), database: null, next: 1 });
    byId("history-clear").addEventListener("click", () => this.clear());
  }

  /** What earlier visits left. Without a database (private windows) the history lasts as long as the page. */
  async load() {
    try {
      this.database = await open();
      for (const entry of await ask(this.#store("readonly").getAll())) this.#add(entry);
    } catch {
      this.database = null;
    }
  }

  /** An entry: {label, about, task, body, answer, map}. */
  add(entry) {
    const kept = { ...entry, id: this.next };
    this.#add(kept);
    this.database && this.#store("readwrite").put(kept);
    while (this.list.children.length > MOST) {
      const oldest = this.list.lastElementChild;
      this.database && this.#store("readwrite").delete(Number(oldest.dataset.id));
      this.#drop(oldest);
    }
  }

  clear() {
    for (const item of [...this.list.children]) this.#drop(item);
    this.database && this.#store("readwrite").clear();
    this.#tell();
  }

  #add(entry) {
    this.next = Math.max(this.next, entry.id + 1);
    const count = entry.answer.images.length;
    const img = make("img", { alt: "", loading: "lazy", src: URL.createObjectURL(toBlob(entry.answer.images[0].png)) });
    const button = make(
      "button",
      { type: "button", title: `${entry.label}: ${entry.about}`, on: { click: () => this.pick(entry) } },
      img,
      ...(count > 1 ? [make("span", { className: "count", "aria-hidden": "true" }, String(count))] : []),
      make("span", { className: "name" }, entry.label),
      make("span", { className: "hidden" }, `, ${entry.about}`),
    );
    const item = make("li", {}, button);
    item.dataset.id = entry.id;
    this.list.prepend(item);
    this.#tell();
  }

  #drop(item) {
    URL.revokeObjectURL(item.querySelector("img").src);
    item.remove();
  }

  #tell() {
    const some = this.list.children.length > 0;
    byId("history-empty").hidden = some;
    byId("history-clear").hidden = !some;
  }

  #store(mode) {
    return this.database.transaction("runs", mode).objectStore("runs");
  }
}

function open() {
  const request = indexedDB.open("arpg", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("runs", { keyPath: "id" });
  return ask(request);
}

const ask = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
