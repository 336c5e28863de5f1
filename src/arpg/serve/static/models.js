// The model switch: one button for each model of the server, with what it takes.

import { byId, make, setRadio } from "./dom.js";

/** What a model takes, in two words. */
const takes = ({ takes, control }) => (control ? `${takes}, sketch` : takes);

export class Models {
  /** `choose(name)` is called when the user picks another model. */
  constructor(choose) {
    this.place = byId("models");
    this.place.addEventListener("change", (event) => choose(event.target.value));
  }

  /** Show the `models` of /v1/arpg/info with one of them chosen; a single one needs no switch. */
  show(models, chosen) {
    const radio = ({ name, ...model }) =>
      make(
        "label",
        {},
        make("input", { type: "radio", name: "model", value: name }),
        make("span", {}, make("b", {}, name), make("small", {}, takes(model))),
      );
    if (models.length !== this.place.querySelectorAll("input").length) {
      this.place.replaceChildren(this.place.firstElementChild, ...models.map(radio));
    }
    this.place.hidden = models.length < 2;
    if (models.length) setRadio("model", chosen);
  }

  set disabled(yes) {
    this.place.disabled = yes;
  }
}
