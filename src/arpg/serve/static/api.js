// The server's API: what the model offers, and jobs as streams of events.

import { readEvents } from "./event_stream.js";

/** An error response: `message`, `param`, `code`, `nearest`, and the status and headers of HTTP. */
export class ApiError extends Error {
  constructor(status, error = {}, retryAfter = null) {
    super(error.message || `The server answered with status ${status}.`);
    Object.assign(this, { status, retryAfter, param: error.param, code: error.code, nearest: error.nearest || [] });
  }
}

/** There was no response, or the connection was lost. */
export class ConnectionLost extends Error {}

// An error may come after the stream has begun; its type then replaces the status.
const STATUS = { invalid_request_error: 400, authentication_error: 401, rate_limit_error: 429 };
const KEY = "arpg.key";

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

async function call(path, { body, signal } = {}) {
  const headers = {};
  if (hasKey()) headers.Authorization = `Bearer ${sessionStorage.getItem(KEY)}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: body ? "no-store" : "default",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ConnectionLost("The server does not respond.");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  const retryAfter = response.headers.get("Retry-After");
  throw new ApiError(response.status, answer.error, retryAfter === null ? null : Number(retryAfter));
}

/** One of several models; null is the server's default. */
const about = (what, model) => `/v1/arpg/${what}${model === null ? "" : `?model=${encodeURIComponent(model)}`}`;
export const info = async (model = null) => (await call(about("info", model))).json();
export const classes = async (model = null) => (await call(about("classes", model))).json();

/** Extract a condition image from an image; returns {png, kind, width, height}. */
export const condition = async (body) => (await call("/v1/arpg/condition", { body })).json();

/** Four times as large, by the server's super-resolution network; returns {png, width, height}. */
export const upscale = async (body) => (await call("/v1/arpg/upscale", { body })).json();

/** Fetched with the key, which an image element could not send. */
export const blobUrl = async (path) => URL.createObjectURL(await (await call(path)).blob());

/** Whether the server accepts requests. */
export async function ready() {
  try {
    return (await fetch("/readyz", { cache: "no-store" })).ok;
  } catch {
    return false;
  }
}

/** Run a job; yields {event: "queued" | "step" | "done", data}. Aborting the signal cancels it on the server too. */
export async function* run(task, body, signal) {
  const response = await call(`/v1/arpg/${task}`, { body: { ...body, stream: true }, signal });
  let done = false;
  try {
    for await (const { event, data } of readEvents(response.body)) {
      if (event === "error") throw new ApiError(STATUS[data.error.type] ?? 500, data.error);
      done ||= event === "done";
      yield { event, data };
    }
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    if (!done) throw new ConnectionLost("The connection to the server was lost.");
  }
  if (!done) throw new ConnectionLost("The server stopped before the image was finished.");
}
