// Elements: found by id, or made with properties and children.

export const byId = (id) => document.getElementById(id);

/** Make an element. Names with a dash are attributes, `on` holds listeners, everything else is a property. */
export function make(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "on") for (const [event, call] of Object.entries(value)) element.addEventListener(event, call);
    else if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `/static/icons.svg#${name}`);
  svg.append(use);
  return svg;
}

export function setIcon(button, name) {
  button.querySelector("use").setAttribute("href", `/static/icons.svg#${name}`);
}

export const radio = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

export function setRadio(name, value) {
  document.querySelector(`input[name="${name}"][value="${value}"]`).checked = true;
}

/** Give a slider the range and the help text that `task_settings` of /v1/arpg/info has for `name`, and its default. */
export function describeSlider(id, info, name, reset) {
  const { slider: [min, max, step], default: value, help } = info.task_settings.find((setting) => setting.name === name);
  Object.assign(byId(id), { min, max, step, ...(reset ? { value } : {}) });
  byId(`${id}-about`).textContent = help;
}

/** Set the number from which the style sheet fills a part of the slider's track. */
export function paintSlider(input) {
  const span = Number(input.max) - Number(input.min) || 1;
  input.style.setProperty("--fill", `${(100 * (Number(input.value) - Number(input.min))) / span}%`);
}
