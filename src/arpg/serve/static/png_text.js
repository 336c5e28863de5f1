// Text in PNG files: the settings of an image, written by the server and the command line.

const SIGNATURE = [137, 80, 78, 71, 13, 10, 26, 10];

/** The text stored under a keyword, or null. Reads tEXt, zTXt and iTXt chunks. */
export async function readText(bytes, keyword) {
  if (SIGNATURE.some((byte, i) => bytes[i] !== byte)) return null;
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  for (let at = 8; at + 12 <= bytes.length; ) {
    const length = view.getUint32(at);
    if (at + 12 + length > bytes.length) break; // truncated
    const kind = latin1(bytes.subarray(at + 4, at + 8));
    const data = bytes.subarray(at + 8, at + 8 + length);
    if (["tEXt", "zTXt", "iTXt"].includes(kind)) {
      const end = data.indexOf(0);
      if (latin1(data.subarray(0, end)) === keyword) return decode(kind, data.subarray(end + 1));
    }
    if (kind === "IEND") break;
    at += 12 + length;
  }
  return null;
}

const latin1 = (bytes) => Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
const utf8 = (bytes) => new TextDecoder().decode(bytes);

async function decode(kind, data) {
  if (kind === "tEXt") return latin1(data);
  if (kind === "zTXt") return latin1(await inflate(data.subarray(1)));
  const compressed = data[0] === 1;
  const language = data.indexOf(0, 2);
  const text = data.subarray(data.indexOf(0, language + 1) + 1);
  return utf8(compressed ? await inflate(text) : text);
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
