// An image: its pixels for the canvas and its PNG for the server; from base64, a file, a drop or the clipboard.

import { readText } from "./png_text.js";

export class LoadedImage {
  constructor(bitmap, base64, name) {
    Object.assign(this, { bitmap, base64, name, width: bitmap.width, height: bitmap.height });
  }

  static async fromBase64(base64, name = "image") {
    return new LoadedImage(await createImageBitmap(toBlob(base64)), base64, name);
  }

  /** Opens any image the browser can; one over the limits is scaled down. Returns the image and the settings in it. */
  static async fromFile(file, limits) {
    const bytes = new Uint8Array(await file.arrayBuffer());
    const name = file.name ? file.name.replace(/\.[^.]*$/, "") : "image";
    let bitmap;
    try {
      bitmap = await createImageBitmap(file);
    } catch {
      throw new Error(`${file.name || "What was pasted"} is not an image that this browser can open.`);
    }
    const about = await readText(bytes, "arpg");
    const scale = Math.min(
      1,
      limits.side / Math.max(bitmap.width, bitmap.height),
      Math.sqrt(limits.pixels / (bitmap.width * bitmap.height)),
    );
    const isPng = file.type === "image/png" && bytes.length * 1.4 < limits.bytes;
    if (scale === 1 && isPng) return { image: new LoadedImage(bitmap, fromBytes(bytes), name), about, scaled: null };
    const size = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
    const canvas = new OffscreenCanvas(...size);
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.fillStyle = "white";
    context.fillRect(0, 0, ...size); // transparent pixels become white, as on the page
    context.drawImage(bitmap, 0, 0, ...size);
    const image = new LoadedImage(await createImageBitmap(canvas), await canvasBase64(canvas), name);
    return { image, about, scaled: scale < 1 ? [bitmap.width, bitmap.height] : null };
  }
}

/** PNG for what we write, WebP for some previews: the browser looks at the bytes, not at the type. */
export const toBlob = (base64) => new Blob([toBytes(base64)], { type: base64.startsWith("UklGR") ? "image/webp" : "image/png" });

export function toBytes(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

export function fromBytes(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return btoa(text);
}

export async function canvasBase64(canvas) {
  const blob = await canvas.convertToBlob({ type: "image/png" });
  return fromBytes(new Uint8Array(await blob.arrayBuffer()));
}

/** A title as the name of a file, without its ending. */
export const fileName = (text, none = "image") =>
  String(text).toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 40) || none;

export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Calls `open(file)` for images dropped anywhere or pasted; `veil` is shown while one is over the page. */
export function onIncoming(open, veil) {
  const hasFiles = (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files");
  let depth = 0;
  const leave = () => {
    depth = 0;
    veil.hidden = true;
  };
  addEventListener("dragenter", (event) => {
    if (!hasFiles(event)) return;
    depth += 1;
    veil.hidden = false;
  });
  addEventListener("dragleave", () => (depth -= 1) <= 0 && leave());
  addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    leave();
    if (event.dataTransfer.files[0]) open(event.dataTransfer.files[0], event.target);
  });
  addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files || [])].find((item) => item.type.startsWith("image/"));
    if (file) open(file);
  });
}
