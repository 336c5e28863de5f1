// The history: past runs with images and settings, kept in the browser's own database.

import { byId, icon, make } from "./dom.js";
import { fileName, save, toBlob, toBytes } from "./loaded_image.js";
import { makeZip } from "./zip.js";

const MOST = 60;

export class History {
  /** `pick(entry)` is called when one is chosen. */
  constructor(pick) {
    Object.assign(this, { pick, list: byId("history"), entries: new Map(), database: null, next: 1 });
    byId("history-clear").addEventListener("click", () => this.clear());
    byId("history-save").addEventListener("click", () => this.saveAll());
  }

  /** Load the entries of earlier visits. Without a database (private windows) the history ends with the page. */
  async load() {
    try {
      this.database = await open();
      const store = this.database.transaction("runs").objectStore("runs");
      for (const entry of await answer(store.getAll())) this.#add(entry);
    } catch {
      this.database = null;
    }
  }

  /** An entry: {label, about, task, body, answer, map}. It is shown once it is stored. */
  async add(entry) {
    const kept = { ...entry, id: this.next++ };
    const surplus = [...this.list.children].slice(MOST - 1);
    await this.#write((store) => {
      store.put(kept);
      for (const item of surplus) store.delete(Number(item.dataset.id));
    });
    surplus.forEach((item) => this.#drop(item));
    this.#add(kept);
  }

  async clear() {
    await this.#write((store) => store.clear());
    for (const item of [...this.list.children]) this.#drop(item);
    this.#showEmpty();
  }

  /** Delete one entry; the focus moves to the next. */
  async delete(item) {
    await this.#write((store) => store.delete(Number(item.dataset.id)));
    (item.nextElementSibling ?? item.previousElementSibling)?.querySelector(".delete").focus();
    this.#drop(item);
    this.#showEmpty();
  }

  /** Download every image, the newest first, as a ZIP archive. */
  saveAll() {
    const newest = [...this.entries.values()].reverse();
    const files = newest.flatMap(({ label, answer }) =>
      answer.images.map(({ png, seed }) => ({ name: `${fileName(label)}-${seed}.png`, bytes: toBytes(png) })),
    );
    save(makeZip(files), "arpg-images.zip");
  }

  /** Where the database is full or broken, the history is kept in memory only. */
  #write(change) {
    if (!this.database) return Promise.resolve();
    return new Promise((resolve) => {
      const transaction = this.database.transaction("runs", "readwrite");
      transaction.oncomplete = transaction.onabort = transaction.onerror = () => resolve();
      change(transaction.objectStore("runs"));
    });
  }

  #add(entry) {
    this.next = Math.max(this.next, entry.id + 1);
    this.entries.set(entry.id, entry);
    const count = entry.answer.images.length;
    const img = make("img", { alt: "", loading: "lazy", src: URL.createObjectURL(toBlob(entry.answer.images[0].png)) });
    const button = make(
      "button",
      { type: "button", className: "pick", title: `${entry.label}: ${entry.about}`, on: { click: () => this.pick(entry) } },
      img,
      ...(count > 1 ? [make("span", { className: "count", "aria-hidden": "true" }, String(count))] : []),
      make("span", { className: "name" }, entry.label),
      make("span", { className: "hidden" }, `, ${entry.about}`),
    );
    const title = `Delete ${entry.label}`;
    const cross = make("button", { type: "button", className: "delete", title, "aria-label": title }, icon("close"));
    const item = make("li", {}, button, cross);
    cross.addEventListener("click", () => this.delete(item));
    item.dataset.id = entry.id;
    this.list.prepend(item);
    this.#showEmpty();
  }

  #drop(item) {
    URL.revokeObjectURL(item.querySelector("img").src);
    this.entries.delete(Number(item.dataset.id));
    item.remove();
  }

  #showEmpty() {
    const some = this.list.children.length > 0;
    byId("history-empty").hidden = some;
    byId("history-clear").hidden = byId("history-save").hidden = !some;
  }
}

function open() {
  const request = indexedDB.open("arpg", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("runs", { keyPath: "id" });
  return answer(request);
}

const answer = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
