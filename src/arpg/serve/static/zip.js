// ZIP archives without compression (PNG files are compressed already), after PKWARE's APPNOTE.

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let k = 0; k < 8; k++) n = n & 1 ? (n >>> 1) ^ 0xedb88320 : n >>> 1;
  return n;
});

function crc32(bytes) {
  let crc = -1;
  for (const byte of bytes) crc = (crc >>> 8) ^ TABLE[(crc ^ byte) & 255];
  return ~crc >>> 0;
}

/** Little-endian fields as bytes: [[size, value], ...]. */
function fields(...pairs) {
  const bytes = new Uint8Array(pairs.reduce((sum, [size]) => sum + size, 0));
  let at = 0;
  for (const [size, value] of pairs) for (let k = 0; k < size; k++) bytes[at++] = (value >>> (8 * k)) & 255;
  return bytes;
}

/** `files`: [{name, bytes}]; a name that occurs again gets a number. */
export function makeZip(files, date = new Date()) {
  const time = (date.getHours() << 11) | (date.getMinutes() << 5) | (date.getSeconds() >> 1);
  const day = ((date.getFullYear() - 1980) << 9) | ((date.getMonth() + 1) << 5) | date.getDate();
  const [parts, entries] = [[], []];
  let offset = 0;
  unique(files.map(({ name }) => name)).forEach((name, i) => {
    const { bytes } = files[i];
    const text = new TextEncoder().encode(name);
    const shared = fields([2, 20], [2, 0x0800], [2, 0], [2, time], [2, day], [4, crc32(bytes)], [4, bytes.length], [4, bytes.length], [2, text.length], [2, 0]);
    parts.push(fields([4, 0x04034b50]), shared, text, bytes);
    entries.push(fields([4, 0x02014b50], [2, 20]), shared, fields([2, 0], [2, 0], [2, 0], [4, 0], [4, offset]), text);
    offset += 4 + shared.length + text.length + bytes.length;
  });
  const size = entries.reduce((sum, part) => sum + part.length, 0);
  const end = fields([4, 0x06054b50], [2, 0], [2, 0], [2, files.length], [2, files.length], [4, size], [4, offset], [2, 0]);
  return new Blob([...parts, ...entries, end], { type: "application/zip" });
}

function unique(names) {
  const taken = new Set();
  return names.map((name) => {
    let free = name;
    for (let i = 2; taken.has(free); i++) free = name.replace(/(\.[^.]*)?$/, `-${i}$1`);
    taken.add(free);
    return free;
  });
}
