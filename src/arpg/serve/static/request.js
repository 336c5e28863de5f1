// From what the page shows to what the server is asked: the body of a job, checked for what only the page can know.

/** Something has to be done on the page first; `field` is the id of what to look at. */
export class NotYet extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

/** The body without pictures; `image`, `mask` and `control.image` are there as "" where the job has them. */
export function makeBody(form) {
  const { task, takes, settings } = form;
  const subject = form.fits && canFit(form) ? null : form.subject;
  const body = {};
  if (takesPicture(form)) body.image = "";
  if (task === "inpaint") body.mask = "";
  if (task === "edit") body.box = form.box;
  if (task === "outpaint") Object.assign(body, form.sides);
  if (task === "expand") Object.assign(body, { size: form.size, ...(form.way ? { way: form.way } : {}) });
  body[takes === "text" ? "prompt" : "class"] = subject;
  if (takes === "text" && subject !== null && form.negative) body.negative = form.negative;
  if (form.control) body.control = { ...form.control };
  if ((task === "inpaint" || task === "edit") && form.feather) body.feather = form.feather;
  const given = { ...settings };
  if (given.top_k === 0) delete given.top_k;
  return { ...body, ...given, num: form.num, seed: form.seed };
}

export const takesPicture = ({ task, from }) =>
  task === "inpaint" || task === "edit" || task === "outpaint" || (task === "expand" && from === "picture");

/** Where the picture or a condition image may decide what fits, no class is needed. */
export const canFit = ({ task, from, control }) =>
  task === "inpaint" || task === "outpaint" || (task === "expand" && from === "picture") || (task === "generate" && Boolean(control));

export function check(form, { hasPicture, maskShare }) {
  if (takesPicture(form) && !hasPicture) throw new NotYet("There is no picture yet: generate one, or open one of yours.", "file");
  if (!form.subject && !(form.fits && canFit(form))) {
    if (form.takes === "text") throw new NotYet("Write a prompt first.", "prompt");
    throw new NotYet("Choose a class first.", "class-input");
  }
  if (form.task === "inpaint" && !maskShare) throw new NotYet("Paint over the part that should be drawn anew first.", "board");
  if (form.task === "edit" && !form.box) throw new NotYet("Draw a box on the picture first.", "box-l");
  if (form.task === "outpaint" && !Object.values(form.sides).some(Boolean)) {
    throw new NotYet("Pull an edge of the picture outwards first.", "side-right");
  }
  if (form.task === "expand" && !form.size.every((side) => side >= 1)) throw new NotYet("Say how large it should be first.", "size-w");
}
