/** The screen that follows a planner step live, and replays what was received. */
import { StepView, followStep } from "/web/stream.js";
import { path } from "./api.js";
import { button, clear, copy, count, duration, field, h, icon } from "./dom.js";

const LAST = "anabranch.step";
const MOST_PAUSE_MS = 1500;
const LEAST_PAUSE_MS = 60;
const KINDS = { success: "good", allow: "good", error: "bad", failed: "bad", blocked: "bad", block: "bad", worker_lost: "bad", timeout: "bad", partial_failure: "fair", degraded: "fair", retrying: "fair", warn: "fair", cancelled: "fair", in_progress: "open", partial: "open", pending: "" };
const ENDS = {
  success: "All subagents succeeded.",
  partial_failure: "Some subagents did not succeed.",
  failed: "A required subagent did not succeed, or none delivered a result.",
  blocked: "A safety decision blocked the step.",
  cancelled: "The step was cancelled.",
  worker_lost: "The process that owned the step stopped. Submit it again under another id.",
};
const EXAMPLE = () => `curl -X POST ${location.origin}/planner/sessions/orders/steps \\
  -H 'content-type: application/json' -d '{
  "plan_step_id": "refund",
  "expected_subagents": [
    {"key": "documentation", "result_key": "doc",
     "input": {"question": "What is the refund policy?"}},
    {"key": "row_selection", "result_key": "rows", "deadline_ms": 60000}]}'`;

const words = (name) => name.replaceAll("_", " ");
const badge = (status) => h("span", { class: `badge ${KINDS[status] ?? ""}` }, words(status));
const time = (event) => new Date(event.timestamp).getTime();

export async function streamsScreen(main, ...rest) {
  const [session, step] = rest.slice(0, -1);
  const screen = new StreamsScreen(main, session, step);
  screen.draw();
  if (session && step) screen.follow();
  return () => screen.leave();
}

class StreamsScreen {
  constructor(main, session, step) {
    let last = {};
    try {
      last = JSON.parse(localStorage.getItem(LAST) ?? "{}");
    } catch {
      // Not kept by this page.
    }
    Object.assign(this, { main, session: session ?? last.session ?? "", step: step ?? last.step ?? "", events: [], at: null, lanes: new Map(), items: [], pending: false });
    this.leaving = new AbortController();
    this.status = h("div", { class: "stream-status", role: "status" });
    this.body = h("div");
  }

  leave() {
    this.leaving.abort();
    clearTimeout(this.player);
  }

  draw() {
    const session = h("input", { value: this.session, required: true, autocomplete: "off", spellcheck: "false", placeholder: "orders" });
    const step = h("input", { value: this.step, required: true, autocomplete: "off", spellcheck: "false", placeholder: "refund" });
    const submit = (event) => {
      event.preventDefault();
      const [to, here] = [`#/streams/${path(session.value.trim(), step.value.trim())}`, location.hash];
      if (to === here) dispatchEvent(new HashChangeEvent("hashchange"));
      else location.hash = to;
    };
    clear(
      this.main,
      h(
        "div",
        { class: "screen" },
        h("div", { class: "screen-head" }, h("div", null, h("h1", null, "Streams"), h("p", null, "Follow a planner step while its subagents work, and replay it."))),
        h("form", { class: "step-form", onSubmit: submit }, field("Session", session), field("Step", step), h("button", { type: "submit", class: "button primary" }, icon("play"), h("span", null, "Follow"))),
        this.status,
        this.body,
      ),
    );
    this.explain();
  }

  explain() {
    clear(
      this.body,
      h(
        "section",
        { class: "card explain" },
        h("h2", null, "What is a planner step?"),
        h("p", null, "A planner splits work among subagents: one searches documents, another selects rows, a third asks for a confirmation. It submits them as one step, and everybody who follows the step sees the same events in the same order, live or later, until half an hour after its end."),
        h("h3", null, "Start one"),
        h("p", { class: "hint" }, "This step asks your collections, and waits a minute for another program to send rows:"),
        h("pre", { class: "line", tabindex: 0 }, EXAMPLE()),
        h("div", { class: "row" }, button("Copy", () => copy(EXAMPLE()), { icon: "copy" }), h("span", { class: "hint" }, "Then follow session orders, step refund.")),
      ),
    );
  }

  async follow() {
    localStorage.setItem(LAST, JSON.stringify({ session: this.session, step: this.step }));
    this.say(h("p", null, "Connecting…"));
    try {
      await followStep({
        sessionId: this.session,
        planStepId: this.step,
        signal: this.leaving.signal,
        onEvent: (event) => this.received(event),
        onReset: () => this.restart(),
      });
      this.over = true;
      this.update();
    } catch (error) {
      if (this.leaving.signal.aborted) return;
      const text = error.status === 404 ? `There is no step “${this.step}” in the session “${this.session}”, or it belongs to someone else. Steps are kept until half an hour after their end.` : error.message;
      this.say(h("div", { class: "problem" }, h("p", null, text), error.status === 404 ? null : button("Try again", () => dispatchEvent(new HashChangeEvent("hashchange")), { icon: "again" })));
    }
  }

  say(...content) {
    clear(this.status, ...content);
  }

  /** The server begins the stream again: what was received is void. */
  restart() {
    if (this.player) this.pause();
    Object.assign(this, { events: [], at: null, items: [] });
    this.lanes.clear();
    this.explain();
    this.frame = null;
  }

  received(event) {
    this.events.push(event);
    this.update();
  }

  update() {
    if (this.pending || this.leaving.signal.aborted) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      if (this.events.length) this.show();
    });
  }

  drawFrame() {
    this.range = h("input", { type: "range", min: 0, "aria-label": "Replay up to this event", onInput: () => this.seek(Number(this.range.value)) });
    this.play = button("Play", () => this.toggle(), { icon: "play" });
    this.latest = button("Latest", () => this.seek(null), { kind: "quiet" });
    this.place = h("span", { class: "hint place" });
    this.laneList = h("ul", { class: "list lanes" });
    this.list = h("ol", { class: "list events" });
    this.frame = [
      h("section", { class: "section replay", "aria-labelledby": "replay-title" }, h("h2", { id: "replay-title" }, "Replay"), h("div", { class: "row" }, this.play, this.range, this.latest), this.place),
      h("section", { class: "section" }, h("h2", null, "Results"), this.laneList),
      h("section", { class: "section" }, h("h2", null, "Events"), this.list),
    ];
    clear(this.body, this.frame);
  }

  /** The state after the event at `at`, or after all of them. */
  show() {
    if (!this.frame) this.drawFrame();
    const last = this.events.length - 1;
    const at = Math.min(this.at ?? last, last);
    const view = new StepView();
    for (const event of this.events.slice(0, at + 1)) view.apply(event);
    const began = time(this.events[0]);
    this.drawStatus(view, began, at);
    Object.assign(this.range, { max: last, value: at });
    const now = this.events[at];
    const text = `Sequence ${now.sequence} of ${this.events[last].sequence}: ${words(now.type)}${now.content.result_key ? `, ${now.content.result_key}` : ""}, after ${duration(time(now) - began)}`;
    this.place.textContent = text;
    this.range.setAttribute("aria-valuetext", text);
    this.latest.hidden = this.at === null;
    this.drawLanes(view, at, began, Math.max(1, time(this.events[last]) - began));
    for (let index = this.items.length; index <= last; index += 1) {
      this.items.push(eventItem(this.events[index], began));
      this.list.append(this.items[index]);
    }
    this.items.forEach((item, index) => {
      item.classList.toggle("later", index > at);
      if (index === at) item.setAttribute("aria-current", "step");
      else item.removeAttribute("aria-current");
    });
  }

  drawStatus(view, began, at) {
    // A stream may go on in the next step: the newest one counts.
    const { plan_step_id } = this.events[at];
    const status = view.status(plan_step_id) ?? "in_progress";
    const end = this.events.slice(0, at + 1).findLast((event) => event.type === "plan_step_completed" && event.plan_step_id === plan_step_id);
    const key = `${plan_step_id} ${status} ${this.at === null} ${this.over}`;
    if (this.said === key) return;
    this.said = key;
    const text = end ? `${ENDS[status] ?? ""} It took ${duration(time(end) - began)}.${end.content.payload.reason ? ` ${end.content.payload.reason}` : ""}` : this.at === null && !this.over ? "Following live." : "As it was at this point.";
    this.say(h("p", { class: "row" }, h("strong", null, `Step ${plan_step_id}`), badge(status), h("span", null, text)));
  }

  drawLanes(view, at, began, length) {
    this.events.forEach(({ content, plan_step_id }) => {
      const key = content.result_key ?? null;
      const id = JSON.stringify([plan_step_id, key]);
      if (key === null || this.lanes.has(id)) return;
      const lane = new Lane(key, plan_step_id, content.stage);
      this.lanes.set(id, lane);
      this.laneList.append(lane.element);
    });
    for (const lane of this.lanes.values()) lane.update(view, this.events, at, began, length);
  }

  seek(index) {
    this.at = index === null || index >= this.events.length - 1 ? null : index;
    this.update();
  }

  toggle() {
    if (this.player) {
      this.pause();
      return;
    }
    if (this.events.length < 2) return;
    this.at ??= 0;
    clear(this.play, icon("stop"), h("span", null, "Pause"));
    this.show();
    const next = () => {
      const at = this.at;
      if (at === null) return this.pause();
      const pause_ms = Math.max(LEAST_PAUSE_MS, Math.min(MOST_PAUSE_MS, time(this.events[at + 1]) - time(this.events[at])));
      this.player = setTimeout(() => {
        // The slider may have been moved meanwhile.
        if (this.at !== null) this.seek(this.at + 1);
        next();
      }, pause_ms);
    };
    next();
  }

  pause() {
    clearTimeout(this.player);
    this.player = null;
    clear(this.play, icon("play"), h("span", null, "Play"));
  }
}

/** One result key: what its subagent has delivered so far. */
class Lane {
  constructor(key, step, stage) {
    Object.assign(this, { key, step });
    this.state = h("span", { class: "row" });
    this.track = h("div", { class: "track", "aria-hidden": "true" });
    this.note = h("p", { class: "lane-text" });
    this.pre = h("pre", { class: "line", tabindex: 0 });
    this.payload = h("details", { class: "more" }, h("summary", null, `Payload of ${key}`), this.pre);
    this.element = h("li", null, h("div", { class: "row" }, h("h3", null, key), h("span", { class: "hint" }, words(stage)), h("span", { class: "spring" }), this.state), this.track, this.note, this.payload);
  }

  update(view, events, at, began, length) {
    const own = (event) => event.plan_step_id === this.step && event.content.result_key === this.key;
    const heard = [...view.latest.values()].filter(own).sort((a, b) => a.sequence - b.sequence);
    const [newest, result] = [heard[heard.length - 1], heard.find((event) => event.type === "subagent_result")];
    clear(this.state, newest ? badge(newest.content.status) : h("span", { class: "hint" }, "not yet"), result ? h("span", { class: "hint" }, `revision ${result.content.revision}`) : null);
    clear(
      this.track,
      events.map((event, index) => own(event) && h("span", { class: `mark ${KINDS[event.content.status] ?? ""}${index > at ? " later" : ""}`, style: { left: `${(100 * (time(event) - began)) / length}%` } })),
      h("span", { class: "playhead", style: { left: `${(100 * (time(events[at]) - began)) / length}%` } }),
    );
    const payload = result?.content.payload ?? newest?.content.payload ?? {};
    this.note.textContent = said(newest, payload);
    this.note.hidden = !this.note.textContent;
    const text = JSON.stringify(payload, null, 2);
    this.payload.hidden = text === "{}";
    if (this.pre.textContent !== text) this.pre.textContent = text;
  }
}

/** A payload in a sentence, where it has one. */
function said(newest, payload) {
  const failed = newest && (newest.content.payload.error ?? newest.content.payload.reason);
  if (failed) return String(failed);
  const text = payload.answer ?? payload.transcript ?? payload.message ?? payload.title;
  if (typeof text === "string" && text) return text;
  return Array.isArray(payload.rows) ? count(payload.row_count ?? payload.rows.length, "row") : "";
}

function eventItem(event, began) {
  const { content } = event;
  const details = h(
    "details",
    null,
    h("summary", null, h("span", { class: "sequence" }, `#${event.sequence}`), h("span", { class: "took" }, `+${duration(time(event) - began)}`), h("span", { class: "event-name" }, words(event.type), content.result_key ? h("span", { class: "hint" }, ` ${content.result_key}`) : null), badge(content.status)),
  );
  details.addEventListener("toggle", () => details.children.length < 2 && details.append(h("pre", { class: "line", tabindex: 0 }, JSON.stringify(event, null, 2))), { once: true });
  return h("li", null, details);
}
