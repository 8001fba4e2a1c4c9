// Runs scenarios for the tests: one JSON object a line in, one a line out, many at a time in one process.
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";
import { createRequire } from "node:module";

const [streamModule, packages] = process.argv.slice(2);
const { followStep, followAnswer, askResumable, FrameParser, StepView } = await import(pathToFileURL(streamModule));
const { EventSource } = await import(pathToFileURL(createRequire(`${packages}/`).resolve("eventsource")));

/** What was heard, in order, with null for each reset; and the state that it amounts to. */
class Heard {
  constructor() {
    this.events = [];
    this.streams = [];
    this.view = new StepView();
  }
  onStream = (streamId) => this.streams.push(streamId);
  onReset = () => {
    this.events.push(null);
    this.view.reset();
  };
  onEvent = (event) => {
    this.events.push(event);
    if (event.content) this.view.apply(event);
  };
  told(end) {
    const state = [...this.view.latest.values()].sort((a, b) => a.sequence - b.sequence);
    return { heard: this.events, streams: this.streams, state, end };
  }
}

async function followed(follow, options) {
  const heard = new Heard();
  const abort = new AbortController();
  const onEvent = (event) => {
    heard.onEvent(event);
    if (heard.events.length === options.abortAfter) abort.abort();
    if (heard.events.length === options.throwAfter) throw new Error("the page's own mistake");
  };
  return heard.told(await follow({ ...options, ...heard, onEvent, signal: abort.signal }));
}

// The docs show this loop; an EventSource comes back by itself from a cut, but not from a refusal.
function eventSource({ url, key, pauseMs = 2 }) {
  return new Promise((resolve, reject) => {
    const heard = new Heard();
    let [cursor, opened] = [0, 0];
    const open = () => {
      opened += 1;
      const address = cursor ? `${url}?last_event_id=${cursor}` : url;
      const headers = key ? { Authorization: `Bearer ${key}` } : {};
      const source = new EventSource(address, {
        fetch: (input, init) => fetch(input, { ...init, headers: { ...init.headers, ...headers } }),
      });
      source.addEventListener("reset", () => {
        cursor = 0;
        heard.onReset();
      });
      source.addEventListener("planner_stream", ({ data }) => {
        for (const event of JSON.parse(data).events) {
          if (event.sequence <= cursor) continue;
          cursor = event.sequence;
          heard.onEvent(event);
        }
      });
      source.onerror = ({ code }) => {
        if (source.readyState !== EventSource.CLOSED) return;
        if (code === 204) resolve(heard.told({ sequence: cursor, opened }));
        else if (code >= 500) setTimeout(open, pauseMs);
        else reject(Object.assign(new Error(`refused with ${code}`), { status: code }));
      };
    };
    open();
  });
}

function parse({ cases }) {
  return cases.map((pieces) => {
    const parser = new FrameParser();
    const frames = pieces.flatMap((piece) => parser.feed(Buffer.from(piece, "base64")));
    return { frames: frames.map(({ event, data, id }) => [event, data, id]), retry: parser.retryMs };
  });
}

function tooLong({ piece, count }) {
  const parser = new FrameParser(1000);
  for (let fed = 0; fed < count; fed++) parser.feed(Buffer.from(piece));
}

const KINDS = {
  step: (options) => followed(followStep, options),
  answer: (options) => followed(followAnswer, options),
  ask: (options) => followed(askResumable, options),
  eventSource,
  parse,
  tooLong,
};

for await (const line of createInterface({ input: process.stdin })) {
  const { id, kind, options } = JSON.parse(line);
  (async () => KINDS[kind](options))()
    .then((result) => ({ id, result }))
    .catch((error) => ({ id, error: { name: error.name, message: error.message, status: error.status ?? null, code: error.code ?? null } }))
    .then((reply) => process.stdout.write(JSON.stringify(reply) + "\n"));
}
