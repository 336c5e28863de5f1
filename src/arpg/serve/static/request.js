// From the form to the body of a request, with the checks that the page can make.

/** An input is missing; `field` is the id of its element. */
export class MissingInput extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

/** The body without images; `image`, `mask` and `control.image` are there as "" where the job has them. */
export function makeBody(form) {
  const { task, takes, settings } = form;
  const subject = form.fits && canFit(form) ? null : form.subject;
  const body = form.model ? { model: form.model } : {};
  if (takesImage(form)) body.image = "";
  if (task === "inpaint") body.mask = "";
  if (task === "edit") body.box = form.box;
  if (task === "outpaint") Object.assign(body, form.sides);
  if (task === "expand") Object.assign(body, { size: form.size, ...(form.method ? { method: form.method } : {}) });
  body[takes === "text" ? "prompt" : "class"] = subject;
  if (takes === "text" && subject !== null && form.negative) body.negative = form.negative;
  if (form.control) body.control = { ...form.control };
  if (task === "inpaint" || task === "edit") body.feather = form.feather;
  const given = { ...settings };
  if (given.top_k === 0) delete given.top_k;
  return { ...body, ...given, num: form.num, seed: form.seed };
}

export const takesImage = ({ task, from }) =>
  task === "inpaint" || task === "edit" || task === "outpaint" || (task === "expand" && from === "image");

/** Whether the class or prompt is optional: an image or a condition image determines the content. */
export const canFit = ({ task, from, control }) =>
  task === "inpaint" || task === "outpaint" || (task === "expand" && from === "image") || (task === "generate" && Boolean(control));

export function check(form, { hasImage, maskShare }) {
  if (takesImage(form) && !hasImage) throw new MissingInput("There is no image yet: generate one, or open one of yours.", "file");
  if (!form.subject && !(form.fits && canFit(form))) {
    if (form.takes === "text") throw new MissingInput("Write a prompt first.", "prompt");
    throw new MissingInput("Choose a class first.", "class-input");
  }
  if (form.task === "inpaint" && !maskShare) throw new MissingInput("Brush over the part to fill first.", "board");
  if (form.task === "edit" && !form.box) throw new MissingInput("Draw a box on the image first.", "box-l");
  if (form.task === "outpaint" && !Object.values(form.sides).some(Boolean)) {
    throw new MissingInput("Drag an edge of the image outwards first.", "side-right");
  }
  if (form.task === "expand" && !form.size.every((side) => side >= 1)) throw new MissingInput("Enter the new size first.", "size-w");
}
