// The page's entry point: fetches /info, builds the parts and runs the jobs.

import * as api from "./api.js";
import { ClassPicker } from "./class_picker.js";
import { Compare } from "./compare.js";
import { byId, radio } from "./dom.js";
import { Form } from "./form.js";
import { History } from "./history.js";
import * as notices from "./notices.js";
import { LoadedImage, onIncoming, save, toBlob } from "./loaded_image.js";
import { check, makeBody, MissingInput, takesImage } from "./request.js";
import { howLong, Settings } from "./settings.js";
import { Sketch } from "./sketch.js";
import { SNIPPETS } from "./snippets.js";
import { Stage } from "./stage.js";

let info, form, settings, picker, stage, sketch, compare, history;
const SMALL = matchMedia("(max-width: 960px)"); // as in style.css
let job = null; // the AbortController of the running job

async function boot() {
  let classes;
  try {
    info = await api.info();
    classes = info.takes === "class" ? await api.classes() : { classes: [], thumbnails: null };
  } catch (error) {
    return fail(error, boot);
  }
  notices.clear();
  const [width, height] = info.image_size;
  document.title = `ARPG · ${info.model}`;
  const count = info.takes === "class" ? ` · ${info.classes} classes` : "";
  byId("model").textContent = `${info.model}${count} · ${width} × ${height}`;
  const sprite = classes.thumbnails && { ...classes.thumbnails };
  if (sprite) sprite.url = await api.blobUrl(sprite.url).catch(() => sprite.url);
  picker = new ClassPicker(classes.classes, sprite, update);
  settings = new Settings(info, update);
  stage = new Stage(info, {
    box: (box) => ((form.box = box), update()),
    sides: (sides) => ((form.sides = sides), update()),
    change: update,
  });
  compare = new Compare();
  sketch = new Sketch(info, { change: () => (form?.fit(), update()), fail: (error) => fail(error), image: () => stage.image });
  form = new Form(info, sketch, changed);
  history = new History(restore);
  if (SMALL.matches) byId("settings").open = byId("box-field").open = byId("control-field").open = false;
  byId("go").disabled = false;
  byId("go-key").textContent = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘ ↵" : "Ctrl ↵";
  changed("task");
  listen();
  await history.load();
}

function listen() {
  byId("controls").addEventListener("submit", (event) => {
    event.preventDefault();
    generate();
  });
  byId("cancel").addEventListener("click", () => job?.abort());
  addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      generate();
    } else if (event.key === "Escape") job?.abort();
  });
  byId("box-fill").addEventListener("click", () => {
    if (!stage.mask || !form.box) return;
    if (stage.state === "result") stage.back();
    stage.mask.addBox(form.box);
    update();
  });
  byId("file").addEventListener("change", () => {
    if (byId("file").files[0]) openFile(byId("file").files[0]);
    byId("file").value = "";
  });
  onIncoming(openFile, byId("drop"));
  document.querySelectorAll("input[name=snippet]").forEach((input) => input.addEventListener("change", update));
  byId("snippet-copy").addEventListener("click", copySnippet);
  byId("save-image").addEventListener("click", () => {
    const image = stage.source || stage.image;
    if (image) save(toBlob(image.base64), "image.png");
  });
  byId("save-mask").addEventListener("click", () => stage.mask && stage.saveMask());
  byId("save-control").addEventListener("click", async () => save(toBlob(await sketch.toBase64()), "condition.png"));
}

// The current state of the form.

function read(variant = settings.current) {
  const subject = info.takes === "text" ? byId("prompt").value.trim() : picker.value;
  return { ...form.read(), subject: picker.find(subject)?.name ?? subject, settings: settings.given(variant) };
}

function changed(what) {
  if (!form || !stage) return;
  if (what === "task") stage.setTask(form.task);
  if (what === "box") stage.setBox(form.box);
  if (what === "sides") stage.setSides(form.sides);
  update();
}

function update() {
  if (!form) return;
  const image = form.task === "expand" && form.from === "image" && (stage.source || stage.image);
  form.setBase(image ? [image.width, image.height] : info.image_size);
  if (info.control) sketch.resize(covered());
  const now = read();
  byId("single").hidden = settings.comparing && !takesImage(now);
  byId("compare").hidden = !settings.comparing;
  byId("mask-undo").disabled = !stage.mask?.undone.length;
  const make = SNIPPETS[radio("snippet")];
  const body = makeBody(now);
  byId("snippet").textContent = make({ task: now.task, body, model: info.model, names: settings.names, origin: location.origin, key: api.hasKey() });
  byId("snippet-files").hidden = !takesImage(now) && !now.control;
  byId("snippet-image").hidden = !takesImage(now);
  byId("snippet-mask").hidden = now.task !== "inpaint";
  byId("snippet-control").hidden = !now.control;
}

/** The size of the condition image: that of the image with its new sides, or of a new image. */
function covered() {
  const image = takesImage(form.read()) && form.task !== "expand" && (stage.source || stage.image);
  if (!image) return info.image_size;
  const { left, top, right, bottom } = form.task === "outpaint" ? form.sides : { left: 0, top: 0, right: 0, bottom: 0 };
  return [image.width + left + right, image.height + top + bottom];
}

async function copySnippet() {
  const label = byId("snippet-copy").querySelector("span");
  try {
    await navigator.clipboard.writeText(byId("snippet").textContent);
    label.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(byId("snippet")); // no access to the clipboard: select the text for copying by hand
    label.textContent = "Press Ctrl C";
  }
  setTimeout(() => (label.textContent = "Copy"), 2000);
}

// Running jobs.

async function generate() {
  if (job) return;
  if (!form) return boot();
  notices.clear();
  form.roll();
  update();
  const now = read();
  try {
    check(now, { hasImage: Boolean(stage.image), maskShare: stage.mask?.share });
  } catch (error) {
    return fail(error);
  }
  if (takesImage(now) && !stage.source) stage.setSource(stage.image);
  job = new AbortController();
  running(true);
  const { signal } = job;
  if (SMALL.matches) byId("stage").scrollIntoView({ block: "start" });
  try {
    if (settings.comparing) await runBoth(now, signal);
    else await runOne(now, signal);
  } catch (error) {
    if (!settings.comparing) stage.cancelled();
    if (error.name !== "AbortError") fail(error, generate);
  } finally {
    job = null;
    running(false);
  }
}

function running(yes) {
  byId("go").hidden = yes;
  byId("cancel").hidden = !yes;
  document.body.classList.toggle("running", yes);
  if (yes) byId("cancel").focus({ preventScroll: true });
  else if (document.activeElement === document.body) byId("go").focus({ preventScroll: true });
}

/** The body with its images. */
async function whole(now) {
  const body = makeBody(now);
  if ("image" in body) body.image = stage.source.base64;
  if ("mask" in body) body.mask = await stage.mask.toBase64();
  if (body.control) body.control.image = await sketch.toBase64();
  return body;
}

/** Run one job to its end; a busy server is called again after its Retry-After. */
async function follow(task, body, signal, { queued, step }) {
  while (true) {
    try {
      let answer;
      for await (const { event, data } of api.run(task, body, signal)) {
        if (event === "queued") queued(data.position);
        else if (event === "step") step(data);
        else if (event === "done") answer = data;
      }
      return answer;
    } catch (error) {
      const wait = error.status === 429 || (error.status === 503 && error.retryAfter !== null);
      if (!wait) throw error;
      const why = error.status === 429 ? "The server is busy." : "The server is starting or about to stop.";
      await notices.busy(why, error.retryAfter ?? 2, signal);
    }
  }
}

const titleOf = (now, body) => body.class ?? body.prompt ?? stage.source?.name ?? now.task;
const fileName = (text) => String(text).toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 40) || "image";

function aboutOf(body, answer) {
  const { width, height, seed } = answer.images[0];
  return `seed ${seed} · ${howLong({ ...info.defaults, ...answer.settings, ...body })} · ${width} × ${height}`;
}

async function runOne(now, signal) {
  const body = await whole(now);
  const title = String(titleOf(now, body));
  stage.start(title);
  const answer = await follow(now.task, body, signal, {
    queued: (position) => stage.queued(position),
    step: (event) => stage.step(event),
  });
  const about = aboutOf(body, answer);
  const name = `${fileName(title)}-${answer.images[0].seed}`;
  const last = await stage.done(answer, { title, about, name });
  remember({ label: title, about, task: now.task, body, answer, last });
}

async function runBoth(now, signal) {
  compare.start(info.grid, [settings.resolved(0), settings.resolved(1)]);
  byId("stage-title").textContent = String(titleOf(now, makeBody(now)));
  byId("stage-about").textContent = `two settings, seed ${now.seed}`;
  byId("live").textContent = "Generating with both settings";
  await Promise.all(
    compare.sides.map(async (side, variant) => {
      const body = await whole({ ...read(variant), num: 1 });
      let last = null;
      const answer = await follow(now.task, body, signal, { queued: () => {}, step: (event) => side.step((last = event)) });
      const title = String(titleOf(now, body));
      await side.done(answer, fileName(title));
      remember({ label: `${title} (${side.name})`, about: aboutOf(body, answer), task: now.task, body, answer, last });
    }),
  );
  byId("live").textContent = "Both are done";
}

// Past runs, and images with settings in them.

function remember({ last, ...entry }) {
  const map = last && { grid: last.grid, decoded_at: last.decoded_at, steps: last.steps, step: last.step };
  history.add({ ...entry, map });
}

async function restore({ task, body, answer, map, label, about }) {
  if (job) return;
  notices.clear();
  const source = body.image ? await LoadedImage.fromBase64(body.image) : null;
  settings.restore(body);
  setSubject(body);
  stage.state = "empty"; // the image shown now is not used
  form.restore(task, body);
  if (source) {
    stage.setSource(source);
    if (body.mask) stage.mask.load(await createImageBitmap(toBlob(body.mask)));
    if (body.box) (form.box = body.box), stage.setBox(body.box);
    if (task === "outpaint") (form.sides = body), stage.setSides(form.sides);
  }
  update();
  if (info.control && body.control) sketch.restore(await createImageBitmap(toBlob(body.control.image)), body.control);
  else if (sketch.active) sketch.clear();
  form.fit();
  if (body.size) form.size = body.size;
  stage.restore(map);
  await stage.done({ ...answer }, { title: label, about, name: `${fileName(label)}-${answer.images[0].seed}`, source });
  update();
}

function setSubject(body) {
  if (info.takes === "text") form.texts = body;
  else if (body.class != null) picker.choose(picker.find(body.class)?.name ?? String(body.class));
}

async function openFile(file, target = null) {
  if (job || !stage) return;
  if (target?.closest?.("#control-field")) return sketch.open(file);
  let opened;
  try {
    opened = await LoadedImage.fromFile(file, info.limits);
  } catch (error) {
    return notices.show("error", error.message);
  }
  notices.clear();
  const { image, about, scaled } = opened;
  const size = `${image.width} × ${image.height}`;
  let made = null;
  try {
    made = about && JSON.parse(about);
  } catch {
    made = null; // written by another program
  }
  if (made) {
    settings.restore({ ...made.settings, ...Object.fromEntries(settings.names.map((name) => [name, made.settings?.[name] ?? made[name]])) });
    setSubject(made);
    if (info.control && made.control) sketch.restore(null, made.control);
    if (Number.isInteger(made.seed)) form.setSeed(made.seed, true);
    notices.show("info", `The image contains its settings: its ${info.takes === "text" ? "prompt" : "class"}, seed and settings are set.`);
  } else if (scaled) {
    notices.show("info", `The image was scaled from ${scaled.join(" × ")} to ${size}, the most this server takes.`);
  }
  stage.setSource(image, size);
  if (!made && form.task === "generate") form.task = "inpaint";
  if (form.task === "expand") document.querySelector("input[name=from][value=image]").click();
  update();
}

// Errors, and what to do about them.

const FIELDS = { control: "control-kind", class: "class-input", prompt: "prompt", negative: "negative", mask: "board", box: "box-l", size: "size-w", num: "num", seed: "seed", feather: "feather" };

function fail(error, again = () => {}) {
  if (error instanceof api.ConnectionLost) {
    const back = () => (info ? notices.show("info", "The server is back.", [["Try again", again]]) : again());
    return notices.gone(error.message, back);
  }
  if (error.status === 401) return notices.askKey(error.message, again);
  if (error.status === 503) return notices.gone("The server is starting or about to stop.", again);
  const nearest = (error.nearest || []).map((name) => [name, () => (picker.choose(name), generate())]);
  const retry = error.status >= 500 ? [["Try again", again]] : [];
  notices.show("error", error.message, [...nearest, ...retry]);
  const field = byId(error instanceof MissingInput ? error.field : FIELDS[error.param] || `set-${error.param}`);
  if (!field) return;
  if (error.param && field.matches("input, textarea")) field.setAttribute("aria-invalid", "true");
  const fold = field.closest("details");
  if (fold) fold.open = true;
  field.focus();
}

boot();
