// The sketch: a condition image that is drawn by hand, opened, or extracted from an image; what is shown is what is sent.

import * as api from "./api.js";
import { byId, describeSlider, make, paintSlider, radio } from "./dom.js";
import { canvasBase64, fromBytes, toBlob } from "./loaded_image.js";

const MOST_UNDO = 40;

export class Sketch {
  /** `on` has change(), called after the user changed something, fail(error), and image(): what the stage shows. */
  constructor(on) {
    Object.assign(this, { control: null, on, empty: true, undone: [], last: null, down: false });
    this.canvas = byId("sketch");
    this.context = this.canvas.getContext("2d", { willReadFrequently: true });
    this.#tools();
    this.#pointer();
    this.#keys();
  }

  /** Take the kinds of condition images of a model; one that takes none has no sketch. What was drawn stays. */
  use(info) {
    const first = !this.control;
    byId("control-field").hidden = !info.control;
    this.control = info.control;
    this.model = info.models?.length > 1 ? { model: info.model } : {};
    if (!info.control) return;
    const { kind } = this;
    byId("control-kind").replaceChildren(...this.control.kinds.map(({ name }) => make("option", { value: name }, name)));
    if (this.control.kinds.some(({ name }) => name === kind)) byId("control-kind").value = kind;
    this.resize(info.image_size);
    byId("sketch-size").max = Math.max(8, Math.round(this.canvas.width / 8));
    for (const id of ["sketch-size", "sketch-shade"]) paintSlider(byId(id));
    describeSlider("control-strength", info, "strength", first);
    this.#strength();
    this.#kind();
  }

  get active() {
    return Boolean(this.control) && !this.empty;
  }

  get kind() {
    return byId("control-kind").value;
  }

  /** Whether the kind is white lines on black and nothing between. */
  get isBinary() {
    return this.control.binary_kinds.includes(this.kind);
  }

  get strength() {
    return Number(byId("control-strength").value);
  }

  /** The `control` field of the request, without the image; null: the sketch is empty. */
  read() {
    return this.active ? { image: "", kind: this.kind, strength: this.strength } : null;
  }

  async toBase64() {
    const copy = new OffscreenCanvas(this.canvas.width, this.canvas.height);
    copy.getContext("2d").drawImage(this.canvas, 0, 0);
    return canvasBase64(copy);
  }

  /** Set the size: that of the model, of the image, or of the image with its new sides. */
  resize([width, height]) {
    if (this.canvas.width === width && this.canvas.height === height && this.ready) return;
    const before = this.ready && !this.empty ? this.context.getImageData(0, 0, this.canvas.width, this.canvas.height) : null;
    Object.assign(this.canvas, { width, height });
    this.ready = true;
    this.undone = [];
    this.#fill();
    if (!before) return;
    const old = new OffscreenCanvas(before.width, before.height);
    old.getContext("2d").putImageData(before, 0, 0);
    this.context.drawImage(old, 0, 0, width, height);
    if (this.isBinary) this.#sharpen(40); // scaling down makes lines grey
  }

  /** From a past request. */
  restore(bitmap, { kind, strength }) {
    if (this.control.kinds.some(({ name }) => name === kind)) byId("control-kind").value = kind;
    byId("control-strength").value = strength ?? 1;
    this.#kind();
    this.#strength();
    if (bitmap) this.show(bitmap);
  }

  clear() {
    this.#keep();
    this.#fill();
    this.empty = true;
    this.#changed();
  }

  show(bitmap) {
    this.#keep();
    this.#fill();
    this.context.drawImage(bitmap, 0, 0, this.canvas.width, this.canvas.height);
    this.empty = false;
    this.#changed();
  }

  /** A file: a condition image as it is, or an image whose edges or depth the server extracts. */
  async open(file) {
    try {
      if (!byId("control-extract").checked) return this.show(await createImageBitmap(file));
      await this.extract(fromBytes(new Uint8Array(await file.arrayBuffer())));
    } catch (error) {
      this.on.fail(error instanceof DOMException ? new Error(`${file.name} is not an image that this browser can open.`) : error);
    }
  }

  async extract(image) {
    const { width, height } = this.canvas;
    byId("control-busy").textContent = `Extracting ${this.kind} from the image…`;
    try {
      const made = await api.condition({ ...this.model, image, kind: this.kind, size: [width, height] });
      this.show(await createImageBitmap(toBlob(made.png)));
    } finally {
      this.#showState();
    }
  }

  #fill() {
    this.context.fillStyle = "black";
    this.context.fillRect(0, 0, this.canvas.width, this.canvas.height);
  }

  #keep() {
    const { width, height } = this.canvas;
    this.undone.push([this.context.getImageData(0, 0, width, height), this.empty]);
    if (this.undone.length > MOST_UNDO) this.undone.shift();
  }

  /** Remove the grey borders of lines: binary kinds are black and white, as in training. */
  #sharpen(least = 96) {
    const pixels = this.context.getImageData(0, 0, this.canvas.width, this.canvas.height);
    const { data } = pixels;
    for (let i = 0; i < data.length; i += 4) data[i] = data[i + 1] = data[i + 2] = data[i] >= least ? 255 : 0;
    this.context.putImageData(pixels, 0, 0);
  }

  #changed() {
    if (this.isBinary) this.#sharpen();
    byId("sketch-undo").disabled = !this.undone.length;
    byId("control-clear").disabled = this.empty;
    this.#showState();
    this.on.change();
  }

  #showState() {
    byId("sketch-frame").toggleAttribute("data-empty", this.empty);
    byId("control-busy").textContent = this.empty ? "The sketch is empty and has no effect." : `The result follows this ${this.kind} image.`;
  }

  #line(from, to) {
    const erase = radio("sketch-tool") === "eraser";
    const grey = this.isBinary ? 255 : Number(byId("sketch-shade").value);
    const lineWidth = Number(byId("sketch-size").value) * (erase ? 3 : 1);
    Object.assign(this.context, { strokeStyle: erase ? "black" : `rgb(${grey} ${grey} ${grey})`, lineWidth, lineCap: "round" });
    this.context.beginPath();
    this.context.moveTo(...from);
    this.context.lineTo(to[0] + 0.001, to[1]); // a line without length would not be drawn
    this.context.stroke();
    if (!erase) this.empty = false;
  }

  #tools() {
    byId("control-kind").addEventListener("change", () => {
      this.#kind();
      this.#changed();
    });
    byId("control-strength").addEventListener("input", () => {
      this.#strength();
      this.on.change();
    });
    for (const id of ["sketch-size", "sketch-shade"]) byId(id).addEventListener("input", () => paintSlider(byId(id)));
    byId("sketch-undo").addEventListener("click", () => {
      if (!this.undone.length) return;
      const [pixels, empty] = this.undone.pop();
      this.context.putImageData(pixels, 0, 0);
      this.empty = empty;
      this.#changed();
    });
    byId("control-clear").addEventListener("click", () => this.clear());
    byId("control-file").addEventListener("change", () => {
      if (byId("control-file").files[0]) this.open(byId("control-file").files[0]);
      byId("control-file").value = "";
    });
    byId("control-seen").addEventListener("click", () => {
      const image = this.on.image();
      if (!image) return this.on.fail(new Error("There is no image yet: generate one, or open one of yours."));
      this.extract(image.base64).catch((error) => this.on.fail(error));
    });
  }

  #strength() {
    byId("control-strength-out").textContent = this.strength.toFixed(2);
    paintSlider(byId("control-strength"));
  }

  #kind() {
    byId("control-kind-about").textContent = this.control.kinds.find(({ name }) => name === this.kind)?.about ?? "";
    byId("shade-field").hidden = this.isBinary;
    const can = this.control.extracts.includes(this.kind);
    byId("control-extract-field").hidden = byId("control-seen").hidden = !can;
    byId("control-extract").checked = can;
    this.#showState();
  }

  #at(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const x = ((event.clientX - bounds.left) / bounds.width) * this.canvas.width;
    return [x, ((event.clientY - bounds.top) / bounds.height) * this.canvas.height];
  }

  #pointer() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      canvas.setPointerCapture(event.pointerId);
      this.#keep();
      this.last = this.#at(event);
      this.#line(this.last, this.last);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.last) return;
      const between = event.getCoalescedEvents?.() || [];
      for (const one of between.length ? between : [event]) {
        const point = this.#at(one);
        this.#line(this.last, point);
        this.last = point;
      }
    });
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, () => {
        if (this.last) this.#changed();
        this.last = null;
      });
    }
  }

  /** Arrow keys move the pen, space starts or ends a line. */
  #keys() {
    const { canvas } = this;
    const pen = byId("sketch-pen");
    let at = null;
    const show = () => {
      pen.hidden = !at;
      if (!at) return;
      pen.style.left = `${(100 * at[0]) / canvas.width}%`;
      pen.style.top = `${(100 * at[1]) / canvas.height}%`;
      pen.classList.toggle("down", this.down);
    };
    canvas.addEventListener("keydown", (event) => {
      const [x, y] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] || [0, 0];
      at ??= [canvas.width / 2, canvas.height / 2];
      if (event.key === " ") {
        this.down = !this.down;
        if (this.down) {
          this.#keep();
          this.#line(at, at);
        }
        byId("live").textContent = this.down ? "Pen down" : "Pen up";
      } else if (x || y) {
        const step = event.shiftKey ? 1 : Math.max(2, Math.round(canvas.width / 24));
        const to = [Math.min(Math.max(0, at[0] + x * step), canvas.width), Math.min(Math.max(0, at[1] + y * step), canvas.height)];
        if (this.down) this.#line(at, to);
        at = to;
      } else if ((event.ctrlKey || event.metaKey) && event.key === "z") byId("sketch-undo").click();
      else return;
      event.preventDefault();
      event.stopPropagation();
      show();
      this.#changed();
    });
    canvas.addEventListener("blur", () => {
      this.down = false;
      at = null;
      show();
    });
  }
}
