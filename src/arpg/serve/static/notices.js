// Messages above the page: errors, what happens next, and buttons to continue.

import { byId, make } from "./dom.js";
import { ready, setKey } from "./api.js";

const PROBE = 1500; // milliseconds between two checks whether the server is back

const place = byId("notice");
let stopped = () => {}; // stops the countdown or the polling of the notice that is shown

export function clear() {
  stopped();
  stopped = () => {};
  place.hidden = true;
  place.replaceChildren();
}

/** `actions`: [[label, call]], each of which also closes the notice; `more` are elements beside the text. */
export function show(kind, text, actions = [], { more = [], away = ["Dismiss", clear] } = {}) {
  clear();
  const buttons = actions.map(([label, call]) => {
    const click = () => {
      clear();
      call();
    };
    return make("button", { type: "button", on: { click } }, label);
  });
  const close = make("button", { type: "button", className: "link", on: { click: away[1] } }, away[0]);
  place.className = `notice ${kind}`;
  place.replaceChildren(make("p", {}, text), ...more, make("div", { className: "row" }, ...buttons, close));
  place.hidden = false;
}

/** Counts down and resolves; several jobs that wait at once share one countdown. Rejects if the signal aborts. */
export function busy(message, seconds, signal) {
  if (busy.now) return busy.now;
  busy.now = new Promise((resolve, reject) => {
    let left = Math.max(1, Math.ceil(seconds));
    const clock = make("strong", { "aria-hidden": "true" });
    const showClock = () => (clock.textContent = `Trying again in ${left} s`);
    const end = (call, value) => () => {
      clearInterval(timer);
      signal.removeEventListener("abort", abort);
      busy.now = null;
      call(value);
    };
    const abort = () => {
      stopped = end(reject, new DOMException("cancelled", "AbortError"));
      clear();
    };
    const timer = setInterval(() => {
      left -= 1;
      showClock();
      if (left <= 0) clear();
    }, 1000);
    const away = ["Cancel", () => byId("cancel").click()];
    show("busy", `${message} It will be tried again by itself.`, [["Try now", () => {}]], { more: [clock], away });
    showClock();
    stopped = end(resolve);
    signal.addEventListener("abort", abort);
  });
  return busy.now;
}

/** Polls the server until it is ready, then calls `back`. */
export function gone(message, back) {
  show("gone", `${message} Looking for it …`);
  let over = false;
  let timer = setTimeout(probe, PROBE);
  async function probe() {
    const there = await ready();
    if (over) return;
    if (there) back();
    else timer = setTimeout(probe, PROBE);
  }
  stopped = () => {
    over = true;
    clearTimeout(timer);
  };
}

/** Asks for the key; it is kept for this tab only. */
export function askKey(message, again) {
  const input = make("input", { type: "password", id: "key", autocomplete: "off", required: true });
  const submit = (event) => {
    event.preventDefault();
    setKey(input.value.trim());
    clear();
    again();
  };
  const form = make(
    "form",
    { className: "row", on: { submit } },
    make("label", { htmlFor: "key" }, "Key"),
    input,
    make("button", { type: "submit", className: "primary" }, "Use this key"),
  );
  show("key", message, [], { more: [form] });
  input.focus();
}
