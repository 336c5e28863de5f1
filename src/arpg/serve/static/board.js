// The board: the canvas with the image, for drawing a mask or a box and dragging the edges.

import { drawScaled } from "./display.js";

const PAD = 0.5; // space around the image for dragging the edges, as a share of its size

export class Board {
  /** Modes: view, paint, box, edges. `on` has stroke(), box() and sides(), called after the user changed them. */
  constructor(canvas, on) {
    Object.assign(this, { canvas, on, image: null, mode: "view", mask: null, box: null, erase: false, brush: 18 });
    this.sides = { left: 0, top: 0, right: 0, bottom: 0 };
    this.context = canvas.getContext("2d");
    this.pointer = null;
    this.held = null; // the view is fixed during a drag
    this.handles = [...canvas.parentElement.querySelectorAll(".handle")];
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    document.addEventListener("themechange", () => this.draw());
    canvas.addEventListener("pointerdown", (event) => this.#down(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => this.#up());
    canvas.addEventListener("pointerleave", () => this.#hover(null));
    for (const handle of this.handles) this.#pull(handle);
  }

  show(image, label) {
    this.image = image;
    this.canvas.setAttribute("aria-label", label);
    this.draw();
  }

  setMode(mode, { most = Infinity, stride = 8 } = {}) {
    Object.assign(this, { mode, most, stride, pointer: null });
    this.canvas.dataset.mode = mode;
    this.draw();
  }

  /** The most pixels that a side may add within the limit. */
  room(side) {
    const across = side === "left" || side === "right";
    const other = { left: "right", right: "left", top: "bottom", bottom: "top" }[side];
    return Math.max(0, this.most - (across ? this.image.width : this.image.height) - this.sides[other]);
  }

  draw() {
    const { canvas, context, image } = this;
    const { width, height } = canvas.parentElement.getBoundingClientRect();
    const dense = window.devicePixelRatio || 1;
    const size = [Math.round(width * dense), Math.round(height * dense)];
    if (canvas.width !== size[0]) canvas.width = size[0];
    if (canvas.height !== size[1]) canvas.height = size[1];
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, ...size);
    if (!image) return this.#placeHandles(null);
    const view = (this.view = this.held || this.#fit(width, height));
    const place = (x, y) => [x * view.scale + view.x, y * view.scale + view.y].map((value) => Math.round(value * dense));
    drawScaled(context, image, [...place(0, 0), ...place(image.width, image.height)]);
    context.setTransform(dense * view.scale, 0, 0, dense * view.scale, dense * view.x, dense * view.y);
    const line = 1 / view.scale;
    if (this.mode === "paint") this.#drawMask(line);
    if (this.mode === "box" && this.box) this.#drawBox(line);
    if (this.mode === "edges") this.#drawEdges(line);
    this.#placeHandles(this.mode === "edges" ? view : null);
    this.on.drawn?.(view.scale);
  }

  /** The frame around the image and what is added to it. */
  #outer() {
    const { image, sides } = this;
    const around = this.mode === "edges" ? sides : { left: 0, top: 0, right: 0, bottom: 0 };
    return [-around.left, -around.top, image.width + around.right, image.height + around.bottom];
  }

  #fit(width, height) {
    const [left, top, right, bottom] = this.#outer();
    const pad = this.mode === "edges" ? PAD * Math.max(this.image.width, this.image.height) : 0;
    const scale = Math.min(width / (right - left + 2 * pad), height / (bottom - top + 2 * pad));
    return { scale, x: (width - (right + left) * scale) / 2, y: (height - (bottom + top) * scale) / 2 };
  }

  #drawMask(line) {
    const { context, mask, pointer } = this;
    context.globalAlpha = 0.62;
    context.drawImage(mask.canvas, 0, 0);
    context.globalAlpha = 1;
    if (!pointer) return;
    for (const [colour, width] of [["rgb(0 0 0 / 60%)", 3], ["white", 1.4]]) {
      context.beginPath();
      context.arc(...pointer, this.brush / 2, 0, 2 * Math.PI);
      Object.assign(context, { strokeStyle: colour, lineWidth: width * line });
      context.stroke();
    }
  }

  #drawBox(line) {
    const { context, image } = this;
    const [left, top, right, bottom] = this.box;
    context.fillStyle = "rgb(15 10 25 / 45%)";
    context.beginPath();
    context.rect(0, 0, image.width, image.height);
    context.rect(left, top, right - left, bottom - top);
    context.fill("evenodd");
    this.#frame(left, top, right, bottom, line);
  }

  #drawEdges(line) {
    const { context, image } = this;
    const [left, top, right, bottom] = this.#outer();
    const style = getComputedStyle(this.canvas);
    context.fillStyle = style.getPropertyValue("--added");
    context.beginPath();
    context.rect(left, top, right - left, bottom - top);
    context.rect(0, 0, image.width, image.height);
    context.fill("evenodd");
    this.#frame(left, top, right, bottom, line);
  }

  #frame(left, top, right, bottom, line) {
    const { context } = this;
    context.lineWidth = 1.5 * line;
    for (const [colour, dash] of [["rgb(20 10 30 / 70%)", []], ["white", [6 * line, 5 * line]]]) {
      context.strokeStyle = colour;
      context.setLineDash(dash);
      context.strokeRect(left, top, right - left, bottom - top);
    }
    context.setLineDash([]);
  }

  // Pointers on the canvas: strokes and boxes.

  #at(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const { view } = this;
    return [(event.clientX - bounds.left - view.x) / view.scale, (event.clientY - bounds.top - view.y) / view.scale];
  }

  #down(event) {
    if (!this.image || event.button !== 0) return;
    this.on.press?.(); // a result that is drawn on becomes the image to work on
    if (this.mode !== "paint" && this.mode !== "box") return;
    event.preventDefault();
    this.canvas.setPointerCapture(event.pointerId);
    this.start = this.last = this.#at(event);
    if (this.mode !== "paint") return;
    this.mask.begin();
    this.#stroke(this.last);
  }

  #move(event) {
    if (!this.image || !this.view) return;
    const point = this.#at(event);
    if (this.start && this.mode === "paint") {
      // A fast pen reports more points than there are frames.
      const between = event.getCoalescedEvents?.() || [];
      for (const one of between.length ? between : [event]) this.#stroke(this.#at(one));
    } else if (this.start && this.mode === "box") {
      const clamp = (value, most) => Math.min(Math.max(Math.round(value), 0), most);
      const xs = [this.start[0], point[0]].map((x) => clamp(x, this.image.width)).sort((a, b) => a - b);
      const ys = [this.start[1], point[1]].map((y) => clamp(y, this.image.height)).sort((a, b) => a - b);
      if (xs[1] > xs[0] && ys[1] > ys[0]) this.box = [xs[0], ys[0], xs[1], ys[1]];
    }
    this.#hover(event.pointerType === "touch" && !this.start ? null : point);
  }

  #stroke(point) {
    this.mask.line(this.last, point, this.brush, this.erase);
    this.last = point;
  }

  #up() {
    if (!this.start) return;
    this.start = null;
    if (this.mode === "paint") this.on.stroke();
    if (this.mode === "box") this.on.box();
  }

  #hover(point) {
    this.pointer = point;
    if (this.mode === "paint" || this.start) this.draw();
  }

  // The handles of the four edges: dragged, or moved by arrow keys.

  #pull(handle) {
    const { side } = handle.dataset;
    const across = side === "left" || side === "right";
    const sign = side === "left" || side === "top" ? -1 : 1;
    const set = (pixels) => {
      this.sides[side] = Math.min(Math.max(0, pixels), this.room(side));
      this.draw();
      this.on.sides();
    };
    handle.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      handle.focus();
      handle.setPointerCapture(event.pointerId);
      this.held = this.view;
      const from = across ? event.clientX : event.clientY;
      const before = this.sides[side];
      const move = (now) => {
        const moved = (sign * ((across ? now.clientX : now.clientY) - from)) / this.view.scale;
        set(Math.round((before + moved) / this.stride) * this.stride);
      };
      const up = () => {
        handle.removeEventListener("pointermove", move);
        this.held = null;
        this.draw();
      };
      handle.addEventListener("pointermove", move);
      handle.addEventListener("lostpointercapture", up, { once: true });
    });
    handle.addEventListener("keydown", (event) => {
      const outward = { left: "ArrowLeft", right: "ArrowRight", top: "ArrowUp", bottom: "ArrowDown" }[side];
      const inward = { left: "ArrowRight", right: "ArrowLeft", top: "ArrowDown", bottom: "ArrowUp" }[side];
      if (event.key !== outward && event.key !== inward) return;
      event.preventDefault();
      set(this.sides[side] + (event.key === outward ? this.stride : -this.stride));
    });
  }

  #placeHandles(view) {
    for (const handle of this.handles) handle.hidden = !view;
    if (!view) return;
    const [left, top, right, bottom] = this.#outer();
    const x = (value) => view.x + value * view.scale;
    const y = (value) => view.y + value * view.scale;
    const places = {
      left: [x(left), y((top + bottom) / 2)],
      right: [x(right), y((top + bottom) / 2)],
      top: [x((left + right) / 2), y(top)],
      bottom: [x((left + right) / 2), y(bottom)],
    };
    for (const handle of this.handles) {
      const { side } = handle.dataset;
      [handle.style.left, handle.style.top] = places[side].map((value) => `${value}px`);
      handle.setAttribute("aria-valuenow", this.sides[side]);
      handle.setAttribute("aria-valuemax", Math.min(this.room(side), 100000));
      handle.setAttribute("aria-valuetext", `${this.sides[side]} pixels`);
    }
  }
}
