// How images are shown: sharpened by the server's super-resolution network, smooth (Lanczos), or pixel by pixel.

import * as api from "./api.js";
import { lanczos } from "./lanczos.js";
import { toBlob } from "./loaded_image.js";

const MOST_PIXELS = 4e6; // of a Lanczos result; larger ones are left to the canvas
const MOST_SIDE = 256; // of an image that the server sharpens

const view = { mode: "smooth" };
const sharp = new WeakMap(); // bitmap -> its sharpened bitmap, null while the server is at work
const enlarged = new WeakMap(); // bitmap -> its last Lanczos result

/** Set how images are drawn from now on: sharp, smooth or pixels. */
export function setView(mode) {
  view.mode = mode;
}

/** Whether a bitmap is drawn from its sharpened version. */
export const isSharp = (bitmap) => view.mode === "sharp" && Boolean(sharp.get(bitmap));

/** Have images ({bitmap, base64}) sharpened where they are to be shown so; calls `ready` after each that is new. */
export function sharpen(images, ready) {
  if (view.mode !== "sharp") return;
  for (const { bitmap, base64 } of images) {
    if (sharp.has(bitmap) || Math.max(bitmap.width, bitmap.height) > MOST_SIDE) continue;
    sharp.set(bitmap, null);
    api
      .upscale({ image: base64 })
      .then(({ png }) => createImageBitmap(toBlob(png)))
      .then((made) => {
        sharp.set(bitmap, made);
        ready();
      })
      .catch(() => sharp.delete(bitmap)); // a busy server: it stays smooth, and the next time is another chance
  }
}

/** Draw a bitmap into a rectangle of device pixels. */
export function drawScaled(context, bitmap, [left, top, right, bottom]) {
  const [width, height] = [right - left, bottom - top];
  const pixels = view.mode === "pixels";
  const source = isSharp(bitmap) ? sharp.get(bitmap) : bitmap;
  context.imageSmoothingEnabled = !pixels;
  context.imageSmoothingQuality = "high";
  const enlarges = width > source.width && height > source.height && width * height <= MOST_PIXELS;
  if (pixels || !enlarges) return context.drawImage(source, left, top, width, height);
  let last = enlarged.get(source);
  if (last?.width !== width || last?.height !== height) {
    last = new OffscreenCanvas(width, height);
    last.getContext("2d").putImageData(lanczos(pixelsOf(source), width, height), 0, 0);
    enlarged.set(source, last);
  }
  context.drawImage(last, left, top);
}

function pixelsOf(bitmap) {
  const context = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d");
  context.drawImage(bitmap, 0, 0);
  return context.getImageData(0, 0, bitmap.width, bitmap.height);
}
