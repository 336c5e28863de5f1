// The page's entry point: fetches /info, builds the parts and runs the jobs.

import * as api from "./api.js";
import { ClassPicker } from "./class_picker.js";
import { Compare } from "./compare.js";
import { byId, radio, setRadio } from "./dom.js";
import { Form } from "./form.js";
import { History } from "./history.js";
import * as notices from "./notices.js";
import { fileName, LoadedImage, onIncoming, save, toBlob } from "./loaded_image.js";
import { Models } from "./models.js";
import { check, makeBody, MissingInput, takesImage } from "./request.js";
import { howLong, Settings } from "./settings.js";
import { Sketch } from "./sketch.js";
import { SNIPPETS } from "./snippets.js";
import { Stage } from "./stage.js";

const SMALL = matchMedia("(max-width: 960px)"); // as in style.css
const TALL = matchMedia("(min-height: 900px)"); // there is room for the settings below the form
let info = null; // of the model in use
let job = null; // the AbortController of the running job

const models = new Models(switchTo);
const picker = new ClassPicker(update);
const settings = new Settings(update);
const stage = new Stage({
  box: (box) => ((form.box = box), update()),
  sides: (sides) => ((form.sides = sides), update()),
  change: update,
});
const compare = new Compare();
const sketch = new Sketch({ change: () => (form.fit(), update()), fail: (error) => fail(error), image: () => stage.image });
const form = new Form(sketch, changed);
const history = new History(restore);

async function boot() {
  try {
    await useModel(new URLSearchParams(location.search).get("model"));
  } catch (error) {
    if (error.status === 400 || error.status === 404) return useModel(null).then(start, (other) => fail(other, boot)); // a stale address
    return fail(error, boot);
  }
  return start();
}

async function start() {
  byId("settings").open = TALL.matches && !SMALL.matches;
  if (SMALL.matches) byId("box-field").open = false;
  document.querySelector("main").inert = false; // nothing there works before the model is known
  byId("go").disabled = false;
  byId("go-key").textContent = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘ ↵" : "Ctrl ↵";
  listen();
  await history.load();
}

/** Fetch what the page needs to know of a model (null: the server's default), and set every part up for it. */
async function useModel(name) {
  const described = await api.info(name);
  const classes = described.takes === "class" ? await api.classes(name) : { classes: [], thumbnails: null };
  const sprite = classes.thumbnails && { ...classes.thumbnails };
  if (sprite) sprite.url = await api.blobUrl(sprite.url).catch(() => sprite.url);
  notices.clear();
  info = described;
  const [width, height] = info.image_size;
  const several = info.models?.length > 1;
  const count = info.takes === "class" ? [`${info.classes} classes`] : [];
  document.title = `ARPG · ${info.model}`;
  byId("model").textContent = [...(several ? [] : [info.model]), ...count, `${width} × ${height}`].join(" · ");
  models.show(info.models ?? [], info.model);
  picker.use(classes.classes, sprite, info.examples ?? []);
  settings.use(info);
  stage.use(info);
  sketch.use(info);
  form.use(info);
}

/** Another model of this server. What was entered and the image on the stage stay. */
async function switchTo(name) {
  models.disabled = true;
  try {
    await useModel(name);
    window.history.replaceState(null, "", `?model=${encodeURIComponent(name)}`);
    byId("live").textContent = `Model: ${name}`;
  } catch (error) {
    models.show(info.models, info.model);
    fail(error, () => switchTo(name));
  } finally {
    models.disabled = false;
    document.querySelector("input[name=model]:checked").focus();
  }
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
  const subject = info.takes === "text" ? byId("prompt").value.trim() : (picker.find(picker.value)?.name ?? picker.value);
  return { ...form.read(), subject, settings: settings.given(variant) };
}

function changed(what) {
  if (what === "task") {
    // The image on the stage is the one to enlarge, also where it was generated from a class.
    if (form.task === "expand" && stage.task !== "expand" && stage.image) setRadio("from", "image"), form.fit();
    stage.setTask(form.task);
  }
  if (what === "box") stage.setBox(form.box);
  if (what === "sides") stage.setSides(form.sides);
  update();
}

function update() {
  if (!form.info) return;
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
  if (job || !info) return;
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
  models.disabled = yes;
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

function aboutOf(body, answer) {
  const { width, height, seed } = answer.images[0];
  const how = howLong({ ...info.defaults, ...answer.settings, ...body });
  return [...(body.model ? [body.model] : []), `seed ${seed}`, how, `${width} × ${height}`].join(" · ");
}

async function runOne(now, signal) {
  const body = await whole(now);
  const title = String(titleOf(now, body));
  stage.start(title, now.num);
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
  if (!(await serves(body.model))) return;
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

/** Switch to the model of a past request, if it is another; say so where the server does not have it. */
async function serves(model) {
  if (!model || model === info.model) return true;
  if (info.models?.some(({ name }) => name === model)) await switchTo(model);
  else notices.show("error", `This image is of the model ${model}, which the server does not have.`);
  return info.model === model;
}

function setSubject(body) {
  if (info.takes === "text") form.texts = body;
  else if (body.class != null) picker.choose(picker.find(body.class)?.name ?? String(body.class));
}

async function openFile(file, target = null) {
  if (job || !info) return;
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
  if (made && info.models?.some(({ name }) => name === made.model && name !== info.model)) await switchTo(made.model);
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
