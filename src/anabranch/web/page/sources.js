/** The screen of sources: what answers questions, whether it works, and adding, testing and removing. */
import { get, path, post, remove, session } from "./api.js";
import { signIn } from "./app.js";
import { ago, button, clear, count, dialog, duration, field, h, problem, toast, whileDisabled } from "./dom.js";
import { callsPlot, latencyPlot } from "./plot.js";

const REFRESH_MS = 10_000;
const OPERATOR_KEY = "anabranch keys create --user NAME --operator";
const GROUPS = [
  { kind: "collection", title: "Collections", text: "Documents on this server. They are searched together." },
  { kind: "space", title: "Remote sources", text: "Endpoints on other servers: SyftAI-Space, or another Anabranch." },
  { kind: "mcp", title: "MCP servers", text: "Servers whose search tool is called with the question." },
  { kind: "model", title: "Models", text: "They write the answer from the passages that the sources return." },
];
const HEALTH = {
  ok: { label: "Working", kind: "good" },
  degraded: { label: "Degraded", kind: "fair" },
  failing: { label: "Failing", kind: "bad" },
  circuit_open: { label: "Paused", kind: "bad" },
  unknown: { label: "Not used yet", kind: "" },
  disabled: { label: "Disabled", kind: "" },
};
const CIRCUITS = { half_open: "Circuit half open: one call tries it again", open: "Circuit open: paused after failures" };
const ORIGINS = { file: "anabranch.yaml", page: "added here", built_in: "built in" };
const STATUSES = {
  success: "It works",
  error: "It failed",
  timeout: "Too slow",
  payment_failed: "Payment failed",
  access_denied: "No access",
  policy_violation: "Refused by its policy",
  rate_limited: "Rate limit",
  skipped: "Paused after failures",
};

export async function sourcesScreen(main) {
  const screen = new SourcesScreen(main);
  await screen.load();
  const timer = setInterval(() => document.hidden || screen.refresh(), REFRESH_MS);
  return () => {
    screen.left = true;
    clearInterval(timer);
  };
}

class SourcesScreen {
  constructor(main) {
    Object.assign(this, { main, rows: new Map(), left: false });
    this.stale = h("p", { class: "hint", role: "status" });
  }

  async load() {
    this.found = await get("/v1/sources");
    if (!this.left) this.draw();
  }

  /** New figures in the rows that are shown; a new row, or one that is gone, draws the screen again. */
  async refresh() {
    let found;
    try {
      found = await get("/v1/sources");
    } catch (error) {
      this.stale.textContent = `This list is old. ${error.message}`;
      return;
    }
    if (this.left) return;
    this.stale.textContent = "";
    const same = found.can_change === this.found.can_change && found.sources.length === this.rows.size && found.sources.every((one) => this.rows.has(key(one)));
    this.found = found;
    if (same) for (const one of found.sources) this.rows.get(key(one)).update(one, found.window_minutes);
    else this.draw();
  }

  draw() {
    const { sources, can_change, per_process, note } = this.found;
    const figures = sources.some((one) => one.history); // of all callers, so only for operators
    this.rows.clear();
    clear(
      this.main,
      h(
        "div",
        { class: "screen" },
        h(
          "div",
          { class: "screen-head" },
          h("div", null, h("h1", null, "Sources"), h("p", null, `Every question goes to these in parallel.${figures ? " Figures are of the last hour." : ""}`)),
          can_change ? button("Add a source", () => this.add(), { icon: "plus", kind: "primary" }) : null,
        ),
        this.stale,
        note ? h("p", { class: "note" }, note) : null,
        can_change ? null : needsOperator("Adding, testing and removing sources"),
        per_process && figures ? h("p", { class: "hint" }, "This server runs several processes; the figures are of the one that answered this request.") : null,
        GROUPS.map((group) => this.group(group, sources.filter((one) => one.kind === group.kind))),
        h("p", { class: "hint section" }, "MCP servers that are started by a command can only be set up in anabranch.yaml, because a command runs on this machine."),
      ),
    );
  }

  group({ kind, title, text }, sources) {
    const rows = sources.map((one) => {
      const row = new SourceRow(one, this);
      this.rows.set(key(one), row);
      return row.element;
    });
    const none = { collection: ["No collections. ", h("a", { href: "#/library" }, "Add documents in the Library")], model: ["No models."] }[kind] ?? ["None yet."];
    return h("section", { class: "section" }, h("h2", null, title, " ", h("span", { class: "badge" }, String(sources.length))), h("p", { class: "hint group-text" }, text), rows.length ? h("ul", { class: "list sources" }, rows) : h("p", { class: "card hint" }, none));
  }

  add() {
    addDialog(async (made) => {
      toast(`“${made.name}” was added. The next question uses it.`);
      await this.load().catch((error) => toast(error.message, { kind: "error" }));
    });
  }

  remove(one) {
    const note = h("div", { role: "alert" });
    const send = async () => {
      try {
        await remove(`/v1/sources/${path(one.name)}`);
      } catch (error) {
        clear(note, problem(error));
        return;
      }
      box.close();
      toast(`“${one.name}” was removed.`);
      this.load().catch((error) => toast(error.message, { kind: "error" }));
    };
    const box = dialog(
      "Remove this source?",
      h("p", null, `“${one.name}” is not asked any more, and its address${one.has_secret ? " and token are" : " is"} forgotten here. Nothing is changed on its own server.`),
      note,
      h("div", { class: "row end" }, button("Cancel", () => box.close()), button(`Remove ${one.name}`, send, { kind: "danger" })),
    );
  }
}

const key = (one) => `${one.kind} ${one.name}`;

export function needsOperator(what) {
  return h(
    "div",
    { class: "card needs" },
    h("p", null, `${what} needs an operator’s key${session.signed_in ? "; yours is an ordinary one" : ""}. Make one on the server, then sign in with it:`),
    h("pre", { class: "line", tabindex: 0 }, OPERATOR_KEY),
    button("Sign in", () => signIn("Sign in with an operator’s key."), { icon: "key" }),
  );
}

/** One source; its controls stay where they are when its figures change. */
class SourceRow {
  constructor(one, screen) {
    this.facts = h("div", { class: "source-facts" });
    this.plots = h("div", { class: "plots" });
    this.result = h("div", { role: "status" });
    const test = (event) =>
      whileDisabled(event.currentTarget, async () => {
        clear(this.result, h("p", { class: "hint" }, "Testing…"));
        try {
          clear(this.result, testResult(await post(`/v1/sources/${path(one.name)}/test`, {})));
        } catch (error) {
          clear(this.result, problem(error));
        }
      });
    const testable = screen.found.can_change && one.health !== "disabled" && (one.configured === "file" || one.configured === "page");
    const href = one.kind === "collection" && one.configured === "collection" ? `#/library/${path(one.name)}` : null;
    this.element = h(
      "li",
      { class: "source" },
      h(
        "div",
        { class: "source-main" },
        h("h3", { class: "breakable" }, href ? h("a", { href }, one.name) : one.configured === "built_in" && one.kind === "collection" ? one.title : one.name),
        this.facts,
      ),
      this.plots,
      h(
        "div",
        { class: "row source-actions" },
        testable ? button("Test", test, { "aria-label": `Test ${one.name}` }) : null,
        screen.found.can_change && one.removable ? button("Remove", () => screen.remove(one), { kind: "quiet danger", "aria-label": `Remove ${one.name}` }) : null,
      ),
      this.result,
    );
    this.update(one, screen.found.window_minutes);
  }

  update(one, minutes) {
    const state = HEALTH[one.health] ?? { label: one.health, kind: "" };
    const single = one.kind === "collection" && one.configured === "collection";
    const about = [
      one.title && one.title !== one.name && one.configured !== "built_in" ? one.title : null,
      one.kind === "model" ? (one.model_kind === "extractive" ? "Quotes sentences, needs no model" : one.model_kind) : null,
      one.kind === "mcp" && one.tool ? `tool ${one.tool}` : null,
      one.owner && !single ? `${one.owner}/${one.slug}` : one.owner ? `owner ${one.owner}` : null,
      one.origin,
      typeof one.documents === "number" ? count(one.documents, "document") : null,
      ORIGINS[one.configured],
    ];
    clear(
      this.facts,
      h("p", { class: "hint breakable" }, about.filter(Boolean).join(" · ")),
      single
        ? null
        : h(
            "p",
            null,
            h("span", { class: `badge ${state.kind}` }, state.label),
            one.default ? h("span", { class: "badge" }, "Default") : null,
            one.has_secret ? h("span", { class: "badge" }, "Has a token") : null,
            h("span", { class: "hint" }, one.health_text, one.last_used_at ? [" Last used ", ago(one.last_used_at), "."] : null),
          ),
      CIRCUITS[one.circuit] ? h("p", { class: "source-error" }, `${CIRCUITS[one.circuit]}.`) : null,
      one.last_error ? h("p", { class: "source-error" }, "Last error", one.last_error_at ? [" ", ago(one.last_error_at)] : null, `: ${one.last_error}`) : null,
    );
    clear(this.plots, one.history ? [latencyPlot(one.history, minutes), callsPlot(one.history, minutes)] : null);
  }
}

function testResult(result) {
  return h(
    "div",
    { class: `test ${result.ok ? "good" : "bad"}` },
    h("p", null, h("strong", null, STATUSES[result.status] ?? result.status), typeof result.latency_ms === "number" ? ` after ${duration(result.latency_ms)}. ` : ". ", result.error ?? ""),
    result.tool ? h("p", { class: "hint" }, `Tool: ${result.tool}. ${result.tool_chosen ?? ""}`) : null,
    result.text ? h("blockquote", null, result.text) : null,
    result.passages?.length
      ? [
          h("p", { class: "hint" }, `${count(result.passages.length, "passage")}, as answers would see them:`),
          h("ul", { class: "passages" }, result.passages.map((one) => h("li", null, h("strong", null, one.title || "Untitled"), typeof one.score === "number" ? ` (${one.score.toFixed(2)})` : "", h("span", { class: "hint" }, ` ${one.text}`)))),
        ]
      : result.ok && !result.text
        ? h("p", { class: "hint" }, "It answered, and no passages were found for the test question.")
        : null,
  );
}

const KINDS = {
  space: {
    label: "Remote source",
    hint: "An endpoint of a SyftAI-Space, or a collection that another Anabranch publishes",
    fields: [
      ["url", "Address", { type: "url", required: true, placeholder: "https://space.example.com" }],
      ["owner", "Owner", { placeholder: "acme" }],
      ["slug", "Endpoint", { required: true, placeholder: "wiki" }, "The name of the endpoint on that server."],
      ["token", "Token (if it asks for one)", { type: "password" }],
    ],
  },
  mcp: {
    label: "MCP server",
    hint: "A server with a search tool, by URL",
    fields: [
      ["url", "Address", { type: "url", required: true, placeholder: "https://mcp.example.com/mcp" }, "Streamable HTTP. A server that is started by a command is set up in anabranch.yaml."],
      ["token", "Token (if it asks for one)", { type: "password" }, "Sent as Authorization: Bearer."],
      ["description", "Description (optional)", {}, "What can be found there."],
    ],
    more: [
      ["tool", "Tool", { placeholder: "search_docs" }, "Left empty, the test chooses one and says why."],
      ["query_argument", "Argument for the question", { placeholder: "query" }],
      ["result_path", "Path of the results", { placeholder: "items" }],
      ["arguments", "More arguments, as JSON", { placeholder: '{"limit": 5}' }],
      ["headers", "More headers, as JSON", { placeholder: '{"X-Team": "a"}' }],
    ],
  },
  model: {
    label: "Model",
    hint: "A chat API that is compatible with OpenAI’s, or a model of a space",
    fields: [
      ["url", "Address", { type: "url", required: true, placeholder: "https://api.example.com/v1" }],
      ["slug", "Model", { required: true, placeholder: "gpt-4o" }, "Its name on that server."],
      ["model_kind", "Protocol", { options: [["openai", "OpenAI-compatible"], ["space", "SyftAI-Space"]] }],
      ["token", "API key (if it asks for one)", { type: "password" }],
    ],
  },
};

function addDialog(added) {
  const name = h("input", { required: true, maxlength: 100, autocomplete: "off", placeholder: "wiki" });
  const question = h("input", { autocomplete: "off", placeholder: "What is the leave policy?" });
  const own = h("div");
  const result = h("div", { role: "status" });
  let controls = {};
  let kind = "space";
  const control = ([id, label, { options, ...attributes }, hint]) => {
    controls[id] = options ? h("select", null, options.map(([value, text]) => h("option", { value }, text))) : h("input", { autocomplete: "off", spellcheck: "false", ...attributes, ...(attributes.type === "password" ? { autocomplete: "new-password" } : {}) });
    return field(label, controls[id], hint);
  };
  const draw = (chosen) => {
    kind = chosen;
    controls = {};
    const { fields, more } = KINDS[kind];
    clear(result);
    clear(own, fields.map(control), more ? h("details", { class: "more" }, h("summary", null, "How the tool is called"), more.map(control)) : null);
  };
  const body = () => {
    const values = Object.entries(controls).map(([id, { value }]) => [id, value.trim()]).filter(([, value]) => value);
    return { name: name.value.trim(), kind, ...Object.fromEntries(values.map(([id, value]) => [id, id === "arguments" || id === "headers" ? json(id, value) : value])) };
  };
  const run = async (pressed, work) => {
    if (!form.reportValidity()) return;
    await whileDisabled(pressed, () => work().catch((error) => clear(result, problem(error))));
    send.scrollIntoView({ block: "nearest" });
  };
  const test = button("Test", () =>
    run(test, async () => {
      const asked = { ...body(), ...(question.value.trim() ? { question: question.value.trim() } : {}) };
      clear(result, h("p", { class: "hint" }, "Testing…"));
      clear(result, testResult(await post("/v1/sources/test", asked)));
    }),
  );
  const send = h("button", { type: "submit", class: "button primary" }, "Add");
  const submit = (event) => {
    event.preventDefault();
    run(send, async () => {
      const made = await post("/v1/sources", body());
      box.close();
      await added(made);
    });
  };
  const kinds = Object.entries(KINDS).map(([value, { label, hint }]) =>
    h("label", { class: "option described" }, h("input", { type: "radio", name: "source-kind", value, checked: value === kind, onChange: () => draw(value) }), h("span", null, label), h("span", { class: "hint" }, hint)),
  );
  const form = h(
    "form",
    { onSubmit: submit },
    h("fieldset", null, h("legend", null, "What kind of source?"), kinds),
    field("Name", name, "How it is called in answers and settings here."),
    own,
    field("Question for the test (optional)", question),
    result,
    h("div", { class: "row end" }, button("Cancel", () => box.close()), test, send),
  );
  draw(kind);
  const box = dialog("Add a source", form);
  box.classList.add("wide");
  kinds[0].querySelector("input").focus();
}

function json(id, value) {
  try {
    return JSON.parse(value);
  } catch {
    throw new Error(`The ${id} are not JSON. Write an object, such as {"limit": 5}.`);
  }
}
