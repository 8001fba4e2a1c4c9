/**
 * One connection after another: reading server-sent events and WebSocket messages, and coming back after a cut.
 *
 * @typedef {{firstMs?: number, mostMs?: number, patienceMs?: number, heartbeatMs?: number, connectMs?: number}} Pace
 *   Waits `firstMs` (or what the server's `retry:` says), then twice as long each time, `mostMs` at most, and gives up
 *   after `patienceMs` without a sign of life. Three heartbeats that did not come are a cut.
 */

const PACE = { firstMs: 1000, mostMs: 30_000, patienceMs: 120_000, heartbeatMs: 15_000, connectMs: 10_000 };
const MAX_EVENT_CHARACTERS = 8 * 1024 * 1024;
const MAY_PASS = [429, 500, 502, 503, 504];
const HOPELESS = [1002, 1003, 1007, 1008, 1009];

/** What the server refused, or that it was away for too long. `status` is 0 if there was none. */
export class StreamError extends Error {
  constructor(message, status = 0, code = "stream_unavailable") {
    super(message);
    this.name = "StreamError";
    this.status = status;
    this.code = code;
  }
}

/** The connection is gone, or could not be made, and that may pass. */
export class Cut extends Error {
  constructor(message, { waitMs = 0, clean = false } = {}) {
    super(message);
    this.waitMs = waitMs;
    this.clean = clean;
  }
}

/** Takes bytes, gives `{event, data, id}`; `id` is null if the event had none of its own. What was cut off before its
 * blank line never was an event. */
export class FrameParser {
  #decoder = new TextDecoder();
  #pending = [];
  #pendingSize = 0;
  #afterReturn = false;
  #event = "";
  #data = [];
  #id = null;
  #size = 0;

  constructor(maxEventCharacters = MAX_EVENT_CHARACTERS) {
    this.max = maxEventCharacters;
    /** @type {?number} */
    this.retryMs = null;
  }

  /** @param {Uint8Array} chunk */
  feed(chunk) {
    const text = this.#decoder.decode(chunk, { stream: true });
    if (!text) return [];
    // A carriage return ends a line at once; the line feed that comes with the next piece belongs to it.
    const lines = (this.#afterReturn && text.startsWith("\n") ? text.slice(1) : text).split(/\r\n|\n|\r/);
    this.#afterReturn = text.endsWith("\r");
    const rest = lines.pop();
    const frames = [];
    for (const end of lines) {
      const line = this.#pending.length ? this.#pending.join("") + end : end;
      [this.#pending, this.#pendingSize] = [[], 0];
      // Comments are not kept, however many there are.
      this.#grow(line.startsWith(":") ? 0 : line.length);
      if (line) this.#line(line);
      else {
        if (this.#data.length) frames.push({ event: this.#event || "message", data: this.#data.join("\n"), id: this.#id });
        [this.#event, this.#data, this.#id, this.#size] = ["", [], null, 0];
      }
    }
    if (rest) this.#pending.push(rest);
    this.#pendingSize += rest.length;
    this.#grow(0);
    return frames;
  }

  #grow(size) {
    this.#size += size;
    if (this.#size + this.#pendingSize > this.max)
      throw new StreamError("The stream holds an event that is too long.", 0, "upstream_error");
  }

  #line(line) {
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#event = value;
    else if (field === "id" && !value.includes("\0")) this.#id = value;
    else if (field === "retry" && /^[0-9]{1,9}$/.test(value)) this.retryMs = Number(value);
  }
}

/** How long to wait after a cut, how often, and when to give up. One who is `eager` comes back at once from a clean
 * end: it may be the end of all, and only asking shows it. */
export class Comeback {
  #failures = 0;
  #since = null;

  constructor(pace, signal, eager = false) {
    this.pace = { ...PACE, ...pace };
    this.signal = signal;
    this.eager = eager;
    this.firstMs = this.pace.firstMs;
  }

  heard() {
    this.#failures = 0;
    this.#since = null;
  }

  told(retryMs) {
    if (retryMs !== null) this.firstMs = retryMs;
  }

  /** Never shorter than the server asks, and not at the same moment as everybody else. */
  async wait(cut) {
    const atOnce = this.eager && cut.clean && !this.#failures;
    const backoff = atOnce ? 0 : Math.min(this.firstMs * 2 ** this.#failures, this.pace.mostMs);
    const waitMs = Math.max(backoff * (1 + Math.random() / 2), cut.waitMs);
    this.#failures = Math.min(this.#failures + 1, 16);
    this.#since ??= performance.now();
    if (performance.now() + waitMs > this.#since + this.pace.patienceMs)
      throw new StreamError(`The server could not be reached for too long: ${cut.message}`);
    await new Promise((resolve) => {
      const done = () => {
        clearTimeout(timer);
        this.signal?.removeEventListener("abort", done);
        resolve();
      };
      const timer = setTimeout(done, waitMs);
      this.signal?.addEventListener("abort", done);
    });
  }
}

/** The frames of one connection after another, until one of them ends without a cut. */
export async function* again(connect, comeback) {
  while (!comeback.signal?.aborted) {
    try {
      for await (const frame of connect()) {
        comeback.heard();
        yield frame;
      }
      return;
    } catch (error) {
      if (comeback.signal?.aborted) return;
      if (!(error instanceof Cut)) throw error;
      await comeback.wait(error);
    }
  }
}

export async function refusal(response) {
  const said = await response.json().catch(() => ({}));
  const message = said?.message ?? `The server answered with status ${response.status}.`;
  const after = response.headers.get("Retry-After") ?? "";
  if (MAY_PASS.includes(response.status))
    return new Cut(message, { waitMs: /^[0-9]{1,4}$/.test(after) ? Number(after) * 1000 : 0 });
  return new StreamError(message, response.status, said?.error ?? "refused");
}

/** What comes over one connection. It ends only when the stream is over (204). The clock of silence runs only while
 * nothing is there to be read: whoever reads may take its time. */
export async function* listened(url, request, comeback, opened = () => {}) {
  const { connectMs, heartbeatMs } = comeback.pace;
  const abort = new AbortController();
  const leave = () => abort.abort();
  comeback.signal?.addEventListener("abort", leave);
  const within = async (promise, limitMs) => {
    const timer = setTimeout(leave, limitMs);
    try {
      return await promise;
    } catch (error) {
      throw new Cut(abort.signal.aborted ? "nothing came for too long" : String(error?.message ?? error));
    } finally {
      clearTimeout(timer);
    }
  };
  try {
    const options = { cache: "no-store", redirect: "error", ...request, signal: abort.signal };
    const response = await within(fetch(url, options), connectMs + 3 * heartbeatMs);
    if (response.status === 204) return;
    if (response.status !== 200) throw await refusal(response);
    if (!response.headers.get("Content-Type")?.startsWith("text/event-stream"))
      throw new StreamError("The server did not answer with a stream.", 200, "upstream_error");
    opened(response);
    const reader = response.body.getReader();
    const parser = new FrameParser();
    for (;;) {
      const { done, value } = await within(reader.read(), 3 * heartbeatMs);
      if (done) break;
      yield* parser.feed(value);
      comeback.told(parser.retryMs);
    }
  } finally {
    comeback.signal?.removeEventListener("abort", leave);
    leave();
  }
  throw new Cut("the server ended the connection", { clean: true });
}

/** The same over a WebSocket. It ends only when the stream is over (1000). A browser does not say why a handshake
 * failed, so `probe` asks in the ordinary way. */
export async function* socketed(url, key, comeback, probe) {
  const socket = new WebSocket(url, ["anabranch.planner", ...(key ? [`bearer.${key}`] : [])]);
  const waiting = [];
  let [size, opened, closed, bell] = [0, false, null, () => {}];
  const leave = (code) => {
    closed ??= code;
    bell();
    socket.close();
  };
  const aborted = () => leave(1001);
  socket.onopen = () => (opened = true);
  socket.onclose = (event) => leave(event.code);
  socket.onmessage = ({ data }) => {
    waiting.push(data);
    size += data.length;
    // There is no way to ask for less; the cursor brings the rest.
    if (size > MAX_EVENT_CHARACTERS) leave(1013);
    bell();
  };
  comeback.signal?.addEventListener("abort", aborted);
  try {
    for (;;) {
      if (waiting.length) {
        const data = waiting.shift();
        size -= data.length;
        yield { event: "message", data, id: null };
      } else if (closed !== null) break;
      else {
        const timer = setTimeout(() => leave(1006), 3 * comeback.pace.heartbeatMs);
        await new Promise((resolve) => (bell = resolve));
        clearTimeout(timer);
      }
    }
  } finally {
    comeback.signal?.removeEventListener("abort", aborted);
    leave(1001);
  }
  if (closed === 1000) return;
  if (!opened) await probe();
  if (HOPELESS.includes(closed))
    throw new StreamError(`The server closed the connection with ${closed}.`, 0, "upstream_error");
  throw new Cut(`the connection was closed with ${closed}`);
}
