// The current request as a command line, as Python and as curl: pure functions from the request to text.
// `names` are those of the settings.

import { fileName } from "./loaded_image.js";

const FILE_NAMES = { inpaint: "filled", edit: "edited", outpaint: "wide", expand: "large" };

const target = ({ task, body }) => FILE_NAMES[task] || fileName(body.class ?? body.prompt ?? "", "out");

/** In single quotes where the text has characters that are special in a shell. */
export const shellQuote = (text) =>
  /^[\w@%+=:,./-]+$/.test(text) ? text : `'${String(text).replaceAll("'", "'\\''")}'`;

export function commandLine({ task, body, model, names }) {
  const parts = ["arpg", task === "generate" && body.control ? "control" : task];
  const add = (flag, value) => parts.push(`--${flag}`, shellQuote(String(value)));
  if ("image" in body && body.image !== null) parts.push("image.png");
  if ("mask" in body) parts.push("--mask", "mask.png");
  if (body.box) add("box", body.box.join(","));
  for (const side of ["left", "top", "right", "bottom"]) if (body[side]) add(side, body[side]);
  if (body.size) add("size", body.size.join("x"));
  if (body.method) add("method", body.method);
  if (body.prompt != null) add("prompt", body.prompt);
  if (body.negative != null) add("negative", body.negative);
  if (body.class != null) add("class", body.class);
  if (body.control) {
    parts.push("--condition", "condition.png");
    add("kind", body.control.kind);
    if (body.control.strength !== 1) add("strength", body.control.strength);
  }
  if (body.feather !== undefined) add("feather", body.feather);
  add("model", model);
  for (const name of names) if (body[name] != null) add(name.replaceAll("_", "-"), body[name]);
  parts.push("--num", body.num, "--seed", body.seed, "--output", shellQuote(target({ task, body }) + (body.num > 1 ? "/" : ".png")));
  return parts.join(" ");
}

export function python({ task, body, model, names }) {
  const literal = (value) => (Array.isArray(value) ? `(${value.join(", ")}${value.length === 1 ? "," : ""})` : JSON.stringify(value));
  const positional = [];
  const named = [];
  if (body.image != null) positional.push('Image.open("image.png")');
  if (task === "inpaint") positional.push('Image.open("mask.png")');
  if (task === "edit") named.push(`box=${literal(body.box)}`);
  if (body.class != null) task === "generate" ? positional.push(literal(body.class)) : named.push(`class_=${literal(body.class)}`);
  for (const name of ["prompt", "negative"]) if (body[name] != null) named.push(`${name}=${literal(body[name])}`);
  for (const side of ["left", "top", "right", "bottom"]) if (body[side]) named.push(`${side}=${body[side]}`);
  if (body.size) named.push(`size=${literal(body.size)}`);
  if (body.method) named.push(`method=${literal(body.method)}`);
  if (body.feather !== undefined) named.push(`feather=${body.feather}`);
  if (body.control) {
    const { kind, strength } = body.control;
    named.push(`control=ControlInput(Image.open("condition.png"), ${literal(kind)}, ${strength})`);
  }
  named.push(`num_images=${body.num}`, `seed=${body.seed}`);
  for (const name of names) if (body[name] != null) named.push(`${name}=${literal(body[name])}`);
  const name = target({ task, body });
  return [
    ...(body.image != null || body.control ? ["from PIL import Image", ""] : []),
    `from arpg import ${body.control ? "ControlInput, " : ""}Pipeline`,
    "",
    `pipe = Pipeline.from_pretrained(${JSON.stringify(model)})`,
    `images = pipe.${task}(${[...positional, ...named].join(", ")})`,
    ...(body.num > 1
      ? ["for i, image in enumerate(images):", `    image.save(f"${name}-{i}.png")`]
      : [`images[0].save("${name}.png")`]),
  ].join("\n");
}

export function curl({ task, body, origin, key }) {
  const name = target({ task, body });
  const head = [`curl -s ${origin}/v1/arpg/${task} -H 'Content-Type: application/json'`];
  if (key) head.push(`-H "Authorization: Bearer $ARPG_KEY"`);
  const write =
    body.num > 1
      ? `jq -r '.images[].png' | (i=0; while read -r png; do echo "$png" | base64 -d > ${name}-$i.png; i=$((i+1)); done)`
      : `jq -r '.images[0].png' | base64 -d > ${name}.png`;
  if (body.image == null && !body.control) return `${head.join(" ")} -d ${shellQuote(JSON.stringify(body))} | ${write}`;
  // Images are too long for an argument; a here-document is not, and the shell fills them in.
  const files = {
    ...(body.image != null ? { image: "@image" } : {}),
    ...("mask" in body ? { mask: "@mask" } : {}),
    ...(body.control ? { control: { ...body.control, image: "@control" } } : {}),
  };
  const text = JSON.stringify({ ...body, ...files })
    .replace(/[\\$`]/g, "\\$&")
    .replace('"@image"', '"$(base64 < image.png | tr -d \'\\n\')"')
    .replace('"@control"', '"$(base64 < condition.png | tr -d \'\\n\')"')
    .replace('"@mask"', '"$(base64 < mask.png | tr -d \'\\n\')"');
  return `${head.join(" ")} -d @- <<END | ${write}\n${text}\nEND`;
}

export const SNIPPETS = { cli: commandLine, python, curl };
