/**
 * The client for resumable streams, in web pages and in Node 22 or newer: follows a planner step or an answer, returns
 * every event exactly once, and reconnects with its cursor. One module, without a build step and without dependencies:
 * import it from the server (/web/stream.js), or copy this file (for Node as stream.mjs).
 *
 * @typedef {{stage: string, status: string, payload: Object<string, any>, revision: number, result_key: ?string}} Content
 * @typedef {{sequence: number, session_id: string, plan_step_id: string, type: string, timestamp: string,
 *   content: Content, telemetry: Object<string, any>}} PlannerEvent
 * @typedef {{sequence: number, epoch: number}} Reset  What was built so far is void: it comes again from the beginning.
 * @typedef {{event: string, data: string, id: number}} AnswerFrame
 * @typedef {{sequence: number, aborted: boolean}} End  Where the client stands; `aborted` if its own signal ended it.
 * @typedef {{firstMs?: number, mostMs?: number, patienceMs?: number, heartbeatMs?: number, connectMs?: number}} Pace
 *   Waits `firstMs` (or what the server's `retry:` says), then twice as long each time, `mostMs` at most, and gives up
 *   after `patienceMs` without a sign of life. Three heartbeats that did not come are a cut.
 * @typedef {{waitMs: number, message: string}} Retry  The connection is gone, why, and when it is tried again.
 * @typedef {{baseUrl?: string, key?: string, after?: number, signal?: AbortSignal, pace?: Pace,
 *   onReset?: (reset: Reset) => any, onEnd?: (end: End) => any, onRetry?: (retry: ?Retry) => any}} Following
 *   `onRetry` is called before each new try, and with null when the connection is there again.
 */

const PACE = { firstMs: 1000, mostMs: 30_000, patienceMs: 120_000, heartbeatMs: 15_000, connectMs: 10_000 };
const MAX_EVENT_CHARACTERS = 8 * 1024 * 1024;
const MAY_PASS = [429, 500, 502, 503, 504];
const HOPELESS = [1002, 1003, 1007, 1008, 1009];
// A step that ended in one of these goes on in the next one, if it names one.
const GOES_ON = ["success", "partial_failure", "failed"];
// The events that a step's stream consists of, and how a message without a name is called.
const SPOKEN = ["planner_stream", "heartbeat", "reset", "message"];
const LAST_OF_ANSWER = ["done", "error"];

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
class Cut extends Error {
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
class Comeback {
  #failures = 0;
  #since = null;
  #cut = false;

  constructor({ pace, signal, onRetry }, eager = false) {
    this.pace = { ...PACE, ...pace };
    this.signal = signal;
    this.eager = eager;
    this.onRetry = onRetry;
    this.firstMs = this.pace.firstMs;
  }

  opened() {
    if (this.#cut) this.onRetry?.(null);
    this.#cut = false;
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
    // A clean end that is followed up at once is none that anybody has to know of.
    if (!atOnce) {
      this.#cut = true;
      this.onRetry?.({ waitMs, message: cut.message });
    }
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
async function* again(connect, comeback) {
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

async function refusal(response) {
  const said = await response.json().catch(() => ({}));
  const message = said?.message ?? `The server answered with status ${response.status}.`;
  const after = response.headers.get("Retry-After") ?? "";
  if (MAY_PASS.includes(response.status))
    return new Cut(message, { waitMs: /^[0-9]{1,4}$/.test(after) ? Number(after) * 1000 : 0 });
  return new StreamError(message, response.status, said?.error ?? "refused");
}

/** What comes over one connection. It ends only when the stream is over (204). The clock of silence runs only while
 * nothing is there to be read: whoever reads may take its time. */
async function* listened(url, request, comeback, opened = () => {}) {
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
    comeback.opened();
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
async function* socketed(url, key, comeback, probe) {
  const socket = new WebSocket(url, ["anabranch.planner", ...(key ? [`bearer.${key}`] : [])]);
  const waiting = [];
  let [size, opened, closed, bell] = [0, false, null, () => {}];
  const leave = (code) => {
    closed ??= code;
    bell();
    socket.close();
  };
  const aborted = () => leave(1001);
  socket.onopen = () => {
    opened = true;
    comeback.opened();
  };
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

const authorized = (key) => (key ? { Authorization: `Bearer ${key}` } : {});
const reading = (key, after) => ({
  headers: { Accept: "text/event-stream", ...authorized(key), ...(after ? { "Last-Event-ID": String(after) } : {}) },
});

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new StreamError("The server sent what cannot be used.", 0, "upstream_error");
  }
}

function endsStream({ type, content }) {
  return type === "plan_step_completed" && !(GOES_ON.includes(content.status) && content.payload?.next_step_id);
}

/**
 * Every event of a step behind the cursor, exactly once, then those of the next step if the end names one. The promise
 * is kept at the end of the stream (or when the signal aborts it), and broken with a StreamError, or with what a
 * callback threw. Callbacks may return promises; the next event waits for them.
 * @param {Following & {sessionId: string, planStepId: string, transport?: "sse" | "ws",
 *   onEvent: (event: PlannerEvent) => any}} options
 * @returns {Promise<End>}
 */
export async function followStep(options) {
  const { baseUrl = "", sessionId, planStepId, key, after = 0, transport = "sse", signal } = options;
  const step = `${baseUrl}/planner/sessions/${encodeURIComponent(sessionId)}/steps/${encodeURIComponent(planStepId)}`;
  const comeback = new Comeback(options);
  let [sequence, ended] = [after, false];
  const probe = async () => {
    const request = { headers: authorized(key), signal, cache: "no-store" };
    const response = await fetch(`${step}/events?after=0&limit=1`, request).catch(() => null);
    if (response && !response.ok) throw await refusal(response);
  };
  const connect = () => {
    if (transport === "sse") return listened(`${step}/stream`, reading(key, sequence), comeback);
    const url = new URL(`${step}/ws${sequence ? `?last_event_id=${sequence}` : ""}`, globalThis.location?.href);
    return socketed(url.href.replace(/^http/, "ws"), key, comeback, probe);
  };
  try {
    stream: for await (const frame of again(connect, comeback)) {
      if (!SPOKEN.includes(frame.event)) continue;
      const message = parsed(frame.data);
      if (message.type === "reset") {
        [sequence, ended] = [0, false];
        await options.onReset?.({ sequence: message.sequence, epoch: message.epoch });
      }
      // A heartbeat tells of a sequence, too, but not that it was delivered.
      for (const event of message.type === "event_batch" ? message.events : []) {
        if (signal?.aborted) break stream;
        if (event.sequence <= sequence) continue;
        sequence = event.sequence;
        ended = event.type === "plan_step_completed";
        await options.onEvent(event);
        if (endsStream(event)) break stream;
      }
    }
  } catch (error) {
    // A step that has ended, and was forgotten before its next one came.
    if (!(ended && error instanceof StreamError && error.status === 404)) throw error;
  }
  const end = { sequence, aborted: Boolean(signal?.aborted) };
  await options.onEnd?.(end);
  return end;
}

/** Whether it is an answer's last one; all dialects call that the same, one of them inside its data. */
function endsAnswer(event, data) {
  if (event !== "message") return LAST_OF_ANSWER.includes(event);
  try {
    return LAST_OF_ANSWER.includes(JSON.parse(data)?.type);
  } catch {
    return false;
  }
}

/** @returns {Promise<End>} */
async function heardOut(connect, comeback, trail, { onEvent, onReset, onEnd, signal }) {
  for await (const { event, data, id } of again(connect, comeback)) {
    if (signal?.aborted) break;
    if (id === null && event === "reset") {
      trail.sequence = 0;
      await onReset?.(parsed(data));
      continue;
    }
    if (id !== null && !/^[0-9]+$/.test(id)) throw new StreamError("The server sent an event whose id is no number.");
    if (id !== null && Number(id) <= trail.sequence) continue;
    trail.sequence = id === null ? trail.sequence : Number(id);
    await onEvent({ event, data, id: Number(id) });
    if (endsAnswer(event, data)) break;
  }
  const end = { sequence: trail.sequence, aborted: Boolean(signal?.aborted) };
  await onEnd?.(end);
  return end;
}

/**
 * Every event of an answer behind the cursor, exactly once, in the dialect that it was asked in.
 * @param {Following & {streamId: string, onEvent: (frame: AnswerFrame) => any}} options
 * @returns {Promise<End>}
 */
export function followAnswer(options) {
  const { baseUrl = "", streamId, key, after = 0 } = options;
  const comeback = new Comeback(options, true);
  const trail = { sequence: after };
  const url = `${baseUrl}/v1/streams/${encodeURIComponent(streamId)}`;
  return heardOut(() => listened(url, reading(key, trail.sequence), comeback), comeback, trail, options);
}

/**
 * Asks (`path` is that of a streaming surface, such as /api/v1/chat/stream) and follows the answer to its end. The
 * question is sent once. `onStream` gets the stream's id as soon as there is one, for `followAnswer` after a reload.
 * Where the server does not keep the answer, there is none, and a cut is the end. `headers` go with the question.
 * @param {Following & {path: string, question: Object<string, any>, headers?: Object<string, string>, onEvent: (frame: AnswerFrame) => any,
 *   onStream?: (streamId: string) => any}} options
 * @returns {Promise<End>}
 */
export function askResumable(options) {
  const { baseUrl = "", path, question, key, headers: own } = options;
  const comeback = new Comeback(options, true);
  const trail = { sequence: 0 };
  let [asked, opened, streamId] = [false, false, null];
  const begun = (response) => {
    opened = true;
    streamId = response.headers.get("Stream-Id");
    if (streamId) options.onStream?.(streamId);
  };
  async function* first() {
    const headers = { "Content-Type": "application/json", Prefer: "resumable", ...reading(key, 0).headers, ...own };
    const request = { method: "POST", headers, body: JSON.stringify(question) };
    try {
      yield* listened(baseUrl + path, request, comeback, begun);
    } catch (error) {
      if (streamId || !(error instanceof Cut)) throw error;
      if (!opened) throw new StreamError(`The question did not get through: ${error.message}`);
      if (!error.clean) throw new StreamError("The answer was cut off, and the server had not kept it.");
    }
  }
  const connect = () => {
    const url = `${baseUrl}/v1/streams/${encodeURIComponent(streamId ?? "")}`;
    if (asked) return listened(url, reading(key, trail.sequence), comeback);
    asked = true;
    return first();
  };
  return heardOut(connect, comeback, trail, options);
}

/** The state of a step: the latest revision under every key, the same whether events came live, by replay, once or
 * twice. Keys carry their step, so a stream that goes on in the next one is held here too. */
export class StepView {
  constructor() {
    this.sequence = 0;
    /** @type {Map<string, PlannerEvent>} */
    this.latest = new Map();
  }

  reset() {
    this.sequence = 0;
    this.latest.clear();
  }

  /** @param {PlannerEvent} event */
  apply(event) {
    this.sequence = Math.max(this.sequence, event.sequence);
    const key = JSON.stringify([event.plan_step_id, event.type, event.content.result_key ?? null]);
    const known = this.latest.get(key);
    if (known && known.content.revision >= event.content.revision) return false;
    this.latest.set(key, event);
    return true;
  }

  /** The latest result, or part of one, by result key; of a later step where two use the same. */
  get results() {
    const results = [...this.latest.values()].filter((event) => event.type === "subagent_result");
    results.sort((a, b) => a.sequence - b.sequence);
    return Object.fromEntries(results.map((event) => [event.content.result_key, event]));
  }

  /** `in_progress`, or how the step ended; null if nothing has been heard of it. */
  status(planStepId) {
    const events = [...this.latest.values()].filter((event) => event.plan_step_id === planStepId);
    const end = events.find((event) => event.type === "plan_step_completed");
    return end?.content.status ?? (events.length ? "in_progress" : null);
  }
}
