/** Calls to the server: JSON in and out, errors as sentences, and the session of this browser. */

export class ApiError extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// The body was cut off, or a login page of the network came instead.
const NOT_OURS = "The answer did not come from this server, or not completely. Check the connection, then try again.";

/** Sent with everything that changes something: a page of another site cannot send it. */
export const PAGE_HEADERS = { "X-Anabranch-CSRF": "1" };

export const events = new EventTarget();

async function failure(response) {
  let message = "";
  let code = "";
  try {
    const body = await response.json();
    message = body.message ?? body.error?.message ?? body.detail ?? "";
    code = body.code ?? body.error?.code ?? body.error ?? "";
  } catch {
    // Not JSON: a proxy's page, or nothing.
  }
  if (response.status === 401) events.dispatchEvent(new Event("needs-key"));
  return new ApiError(message || `The server answered with status ${response.status}.`, response.status, code);
}

async function call(method, path, { body, form, headers = {}, keepalive = false, signal } = {}) {
  const request = { method, headers: { Accept: "application/json", ...headers }, keepalive, signal, credentials: "same-origin" };
  if (method !== "GET") Object.assign(request.headers, PAGE_HEADERS);
  if (form) request.body = form;
  else if (body !== undefined) {
    request.body = JSON.stringify(body);
    request.headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, request);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it running?", 0, "unreachable");
  }
  if (!response.ok) throw await failure(response);
  if (response.status === 204) return null;
  return response.json().catch(() => {
    throw new ApiError(NOT_OURS, 0, "unreachable");
  });
}

export const get = (path, options) => call("GET", path, options);
export const post = (path, body, options) => call("POST", path, { body, ...options });
export const put = (path, body) => call("PUT", path, { body });
export const patch = (path, body) => call("PATCH", path, { body });
export const remove = (path, options) => call("DELETE", path, options);

/** A form with files, with progress: fetch cannot tell how much was sent. */
export function upload(path, form, onProgress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    request.setRequestHeader("Accept", "application/json");
    for (const [name, value] of Object.entries(PAGE_HEADERS)) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", (event) => event.lengthComputable && onProgress(event.loaded / event.total));
    request.addEventListener("error", () => reject(new ApiError("The upload was cut off. Is the server running?")));
    request.addEventListener("load", () => {
      let body = null;
      try {
        body = JSON.parse(request.responseText);
      } catch {
        // Not JSON.
      }
      if (request.status < 300) body ? resolve(body) : reject(new ApiError(NOT_OURS));
      else reject(new ApiError(body?.message || `The server answered with status ${request.status}.`, request.status, body?.code));
    });
    request.send(form);
  });
}

/** Who is signed in, and what they may do. */
export const session = { user: null, operator: false, signed_in: false, needs_key: false };

export async function loadSession() {
  Object.assign(session, await get("/v1/session"));
  return session;
}

/** The collections that this user sees. `called` is what names each in a request: its name, or its address if several
    have that name. */
export async function collections() {
  const { collections: found } = await get("/v1/collections");
  const times = new Map();
  for (const { name } of found) times.set(name, (times.get(name) ?? 0) + 1);
  return found.map((one) => ({ ...one, called: times.get(one.name) > 1 ? one.address : one.name }));
}

export const path = (...segments) => segments.map(encodeURIComponent).join("/");
