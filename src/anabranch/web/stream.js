/**
 * The reference client for browsers and Node: follows a step or an answer, gives every event exactly once, and comes
 * back where it left off. Plain modules, this and connection.js: no build step, and nothing that they depend on.
 *
 * @typedef {{stage: string, status: string, payload: Object<string, any>, revision: number, result_key: ?string}} Content
 * @typedef {{sequence: number, session_id: string, plan_step_id: string, type: string, timestamp: string,
 *   content: Content, telemetry: Object<string, any>}} PlannerEvent
 * @typedef {{sequence: number, epoch: number}} Reset  What was built so far is void: it comes again from the beginning.
 * @typedef {{event: string, data: string, id: number}} AnswerFrame
 * @typedef {{sequence: number, aborted: boolean}} End  Where the client stands; `aborted` if its own signal ended it.
 * @typedef {import("./connection.js").Pace} Pace
 * @typedef {{baseUrl?: string, key?: string, after?: number, signal?: AbortSignal, pace?: Pace,
 *   onReset?: (reset: Reset) => any, onEnd?: (end: End) => any}} Following
 */

import { again, Comeback, Cut, FrameParser, listened, refusal, socketed, StreamError } from "./connection.js";

export { FrameParser, StreamError };

// A step that ended in one of these goes on in the next one, if it names one.
const GOES_ON = ["success", "partial_failure", "failed"];
// The events that a step's stream consists of, and how a message without a name is called.
const SPOKEN = ["planner_stream", "heartbeat", "reset", "message"];
const LAST_OF_ANSWER = ["done", "error"];

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
  const { baseUrl = "", sessionId, planStepId, key, after = 0, transport = "sse", signal, pace } = options;
  const step = `${baseUrl}/planner/sessions/${encodeURIComponent(sessionId)}/steps/${encodeURIComponent(planStepId)}`;
  const comeback = new Comeback(pace, signal);
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
  const { baseUrl = "", streamId, key, after = 0, signal, pace } = options;
  const comeback = new Comeback(pace, signal, true);
  const trail = { sequence: after };
  const url = `${baseUrl}/v1/streams/${encodeURIComponent(streamId)}`;
  return heardOut(() => listened(url, reading(key, trail.sequence), comeback), comeback, trail, options);
}

/**
 * Asks (`path` is that of a streaming surface, such as /api/v1/chat/stream) and follows the answer to its end. The
 * question is sent once. `onStream` gets the stream's id as soon as there is one, for `followAnswer` after a reload.
 * Where the server does not keep the answer, there is none, and a cut is the end.
 * @param {Following & {path: string, question: Object<string, any>, onEvent: (frame: AnswerFrame) => any,
 *   onStream?: (streamId: string) => any}} options
 * @returns {Promise<End>}
 */
export function askResumable(options) {
  const { baseUrl = "", path, question, key, signal, pace } = options;
  const comeback = new Comeback(pace, signal, true);
  const trail = { sequence: 0 };
  let [asked, opened, streamId] = [false, false, null];
  const begun = (response) => {
    opened = true;
    streamId = response.headers.get("Stream-Id");
    if (streamId) options.onStream?.(streamId);
  };
  async function* first() {
    const headers = { "Content-Type": "application/json", Prefer: "resumable", ...reading(key, 0).headers };
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
