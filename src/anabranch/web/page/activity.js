/** The screen of past questions, ratings, and API keys. */
import { get, path, post, remove, session } from "./api.js";
import { ago, button, clear, copy, dialog, duration, empty, field, h, icon, problem, toast } from "./dom.js";
import { needsOperator } from "./sources.js";

const LIMIT = 50;
const SLOW_MS = 3000;
const TABS = [
  { name: "questions", title: "Questions", show: questions },
  { name: "feedback", title: "Feedback", show: feedback },
  { name: "keys", title: "Keys", show: keys },
];
const FILTERS = {
  all: { label: "All", query: {} },
  failed: { label: "Failed", query: { outcome: "failed" } },
  slow: { label: `Slower than ${SLOW_MS / 1000} s`, query: { slower_than_ms: SLOW_MS } },
  down: { label: "Rated down", query: { rating: "thumbs_down" } },
};
const OUTCOMES = { answered: ["Answered", "good"], refused: ["Not enough evidence", "fair"], cancelled: ["Stopped", ""] };
const SURFACES = { query: "Page, API", rag_stream: "RAG stream", openai: "OpenAI’s API", chat: "Chat API", endpoints: "Endpoint", mcp: "MCP", planner: "Planner", cli: "Command line", library: "Python" };

export async function activityScreen(main, ...rest) {
  const current = Math.max(0, TABS.findIndex((one) => one.name === rest.slice(0, -1)[0]));
  const body = h("div", { role: "tabpanel", id: "activity-panel", tabindex: -1, class: "fit" });
  const tabs = TABS.map(({ name, title }) => h("button", { type: "button", class: "button", role: "tab", id: `tab-${name}`, "aria-controls": body.id, onClick: () => select(name) }, title));
  const bar = h("div", { class: "tabs", role: "tablist", "aria-label": "Activity", onKeydown: move }, tabs);
  function move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = (tabs.indexOf(document.activeElement) + step + TABS.length) % TABS.length;
    tabs[next].focus();
    select(TABS[next].name);
  }
  function select(name) {
    history.replaceState(null, "", `#/activity/${name}`);
    tabs.forEach((tab, index) => {
      const chosen = TABS[index].name === name;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
    });
    body.setAttribute("aria-labelledby", `tab-${name}`);
    clear(body, h("p", { class: "hint" }, "Loading…"));
    return TABS.find((one) => one.name === name).show(body);
  }
  clear(main, h("div", { class: "screen wide-screen" }, h("div", { class: "screen-head" }, h("div", null, h("h1", null, "Activity"), h("p", null, session.operator ? "Questions and ratings of all users of this server." : "Your questions and ratings."))), bar, body));
  await select(TABS[current].name);
}

/** A list that is fetched page by page. The last list that was asked for is shown. */
function paged(body, { head, url, items, table, none }) {
  const latest = Symbol("list");
  body.latest = latest;
  const all = [];
  const area = h("div");
  const more = h("div", { class: "row pager" });
  const status = h("p", { class: "unseen", role: "status" });
  async function load(after) {
    let found;
    try {
      found = await get(url(after));
    } catch (error) {
      if (body.latest === latest) clear(all.length ? more : area, problem(error, () => load(after)));
      return;
    }
    if (body.latest !== latest) return;
    all.push(...found[items]);
    status.textContent = `${all.length} shown`;
    clear(area, all.length ? table(all) : found.note ? h("p", { class: "note" }, found.note) : none());
    clear(more, found.has_more ? button(`Show ${LIMIT} more`, () => load(found.next)) : null);
  }
  clear(body, head, area, more, status);
  return load(null);
}

const address = (base, query, after) => `${base}?${new URLSearchParams({ limit: LIMIT, ...query, ...(after ? { after } : {}) })}`;
const column = (label, kind = "") => h("th", { scope: "col", class: kind }, label);
const asker = (one) => one.user ?? "this machine";

function ratingOf(one) {
  if (!one.rating) return null;
  const good = one.rating === "thumbs_up";
  return h("span", { class: `rating ${good ? "good" : "bad"}`, title: one.comment }, icon(good ? "up" : "down", 16), h("span", { class: "unseen" }, good ? "Good answer" : "Bad answer"));
}

function outcome(one) {
  const [label, kind] = OUTCOMES[one.outcome] ?? (one.outcome ? [`Failed: ${one.outcome.replaceAll("_", " ")}`, "bad"] : ["Not finished", ""]);
  return h("span", { class: `badge ${kind}` }, label);
}

function questions(body, chosen = "all") {
  const filters = Object.entries(FILTERS).map(([name, { label }]) => button(label, () => questions(body, name).then(() => body.querySelector("[aria-pressed=true]")?.focus()), { "aria-pressed": String(name === chosen) }));
  return paged(body, {
    head: h("div", { class: "row filters", role: "group", "aria-label": "Which questions" }, filters),
    url: (after) => address("/v1/queries", FILTERS[chosen].query, after),
    items: "queries",
    none: () => (chosen === "all" ? empty("No questions yet", "Every question that is asked here is listed with its outcome.", h("a", { class: "button primary", href: "#/ask" }, "Ask the first one")) : h("p", { class: "card hint" }, "No questions match this filter.")),
    table: questionTable,
  });
}

function questionTable(all) {
  const users = all.some((one) => one.user !== undefined);
  return h(
    "table",
    { class: "data" },
    h("caption", { class: "unseen" }, "Questions, newest first"),
    h("thead", null, h("tr", null, column("Question"), column("Outcome", "wide"), column("Latency", "wide number"), column("Supported", "wide number"), column("Model", "wider"), column("Surface", "wider"), users ? column("User", "wide") : null, column("Rating"), column("Time", "wide"))),
    h(
      "tbody",
      null,
      all.map((one) => {
        const supported = typeof one.faithfulness === "number" ? `${Math.round(one.faithfulness * 100)} %` : null;
        return h(
          "tr",
          null,
          h(
            "th",
            { scope: "row", class: "asked" },
            h("a", { href: `#/answers/${path(one.id)}` }, one.query ?? "Text not kept"),
            h("span", { class: "narrow hint" }, outcome(one), " ", [duration(one.latency_ms), supported ? `${supported} supported` : null, users ? asker(one) : null].filter(Boolean).join(" · "), " · ", ago(one.created_at)),
          ),
          h("td", { class: "wide" }, outcome(one)),
          h("td", { class: `wide number${one.latency_ms > SLOW_MS ? " slow" : ""}` }, duration(one.latency_ms)),
          h("td", { class: "wide number" }, supported ?? h("span", { title: "Not checked" }, "–")),
          h("td", { class: "wider breakable" }, one.model ?? "–"),
          h("td", { class: "wider" }, SURFACES[one.surface] ?? one.surface ?? "–"),
          users ? h("td", { class: "wide" }, asker(one)) : null,
          h("td", null, ratingOf(one) ?? "–"),
          h("td", { class: "wide" }, ago(one.created_at)),
        );
      }),
    ),
  );
}

function feedback(body) {
  return paged(body, {
    url: (after) => address("/v1/feedback", {}, after),
    items: "feedback",
    none: () => empty("No ratings yet", "Rate an answer with the thumbs below it; a comment says what was wrong."),
    table: (all) =>
      h(
        "ul",
        { class: "list" },
        all.map((one) =>
          h(
            "li",
            { class: "rated" },
            ratingOf(one),
            h("div", null, h("a", { href: `#/answers/${path(one.query_id)}` }, one.query ?? "Text not kept"), one.comment ? h("blockquote", null, one.comment) : null, h("p", { class: "hint" }, one.user !== undefined ? `${asker(one)} · ` : "", SURFACES[one.surface] ?? one.surface ?? "", " · ", ago(one.rated_at))),
          ),
        ),
      ),
  });
}

/* Keys. */

async function keys(body) {
  const latest = Symbol("keys");
  body.latest = latest;
  if (!(session.signed_in && session.operator)) {
    clear(body, needsOperator("Managing API keys"));
    return;
  }
  let found;
  try {
    found = (await get("/v1/keys")).keys;
  } catch (error) {
    if (body.latest === latest) clear(body, error.status === 401 || error.status === 403 ? needsOperator("Managing API keys") : problem(error, () => keys(body)));
    return;
  }
  if (body.latest !== latest) return;
  clear(
    body,
    h("div", { class: "row section-head" }, h("p", { class: "hint" }, "A key names its user. An operator’s key may also change sources, keys and every collection."), h("span", { class: "spring" }), button("New key", () => newKey(body), { icon: "plus", kind: "primary" })),
    found.length
      ? h(
          "table",
          { class: "data" },
          h("caption", { class: "unseen" }, "API keys"),
          h("thead", null, h("tr", null, column("User"), column("Groups", "wide"), column("Note", "wide"), column("Rights", "wide"), column("Last used", "wide"), column("State"), h("th", { scope: "col" }, h("span", { class: "unseen" }, "Actions")))),
          h("tbody", null, found.map((one) => keyRow(one, body))),
        )
      : empty("No keys", "Make one for each person or program that asks from another machine."),
  );
}

function keyRow(one, body) {
  return h(
    "tr",
    { class: one.revoked_at ? "revoked" : "" },
    h("th", { scope: "row" }, one.user, " ", one.operator ? h("span", { class: "badge open" }, "Operator") : null, h("span", { class: "key-id hint" }, one.id), h("span", { class: "narrow hint" }, [...one.groups, one.note].filter(Boolean).join(" · "))),
    h("td", { class: "wide" }, one.groups.join(", ") || "–"),
    h("td", { class: "wide" }, one.note || "–"),
    h("td", { class: "wide" }, rightsOf(one)),
    h("td", { class: "wide" }, one.last_used_at ? ago(one.last_used_at) : "–"),
    h("td", null, one.state === "expired" ? ["Expired ", ago(one.expires_at)] : one.revoked_at ? ["Revoked ", ago(one.revoked_at)] : one.current ? h("span", { class: "badge good" }, "You use this one") : one.expires_at ? `Valid until ${one.expires_at.slice(0, 10)}` : "Valid"),
    h("td", { class: "row-actions" }, one.revoked_at ? null : button("Revoke", () => revoke(one, body), { kind: "quiet danger", "aria-label": `Revoke key ${one.id} of ${one.user}` })),
  );
}

function rightsOf(one) {
  const collections = one.collections && `only ${one.collections.map((each) => each.name).join(", ") || "deleted collections"}`;
  return [one.scopes.join(", "), collections, one.grants?.length ? `uses ${one.grants.join(", ")}` : null].filter(Boolean).join(" · ");
}

function newKey(body) {
  const user = h("input", { required: true, maxlength: 200, autocomplete: "off" });
  const groups = h("input", { autocomplete: "off", placeholder: "hr, legal" });
  const note = h("input", { maxlength: 200, autocomplete: "off", placeholder: "laptop" });
  const operator = h("input", { type: "checkbox" });
  const expires = h("input", { type: "date" });
  const collections = h("input", { autocomplete: "off", placeholder: "handbook" });
  const grants = h("input", { autocomplete: "off", placeholder: "source:wiki, planner" });
  const names = (input) => input.value.split(",").map((one) => one.trim()).filter(Boolean);
  const named = (input) => (names(input).length ? names(input) : null);
  const failed = h("div", { role: "alert" });
  const submit = async (event) => {
    event.preventDefault();
    try {
      const made = await post("/v1/keys", {
        ...{ user: user.value.trim(), groups: names(groups), operator: operator.checked, note: note.value.trim() },
        ...{ collections: named(collections), grants: named(grants), expires_at: expires.value ? `${expires.value}T23:59:59Z` : null },
      });
      box.close();
      showKey(made);
      keys(body);
    } catch (error) {
      clear(failed, problem(error));
    }
  };
  const box = dialog(
    "New key",
    h(
      "form",
      { onSubmit: submit },
      field("User", user, "Documents that this user adds belong to this name."),
      field("Groups (optional)", groups, "Names, with commas between them. They open documents that are restricted to groups."),
      field("Note (optional)", note, "What the key is for."),
      field("Only these collections (optional)", collections, "Others do not exist for the key."),
      field("Configured endpoints (optional)", grants, "source:NAME, mcp:NAME, model:NAME, planner, or all. Without any, it uses none."),
      field("Expires (optional)", expires, "It works until the end of this day (UTC)."),
      h("label", { class: "option" }, operator, h("span", null, "Operator: may change sources, keys and everything else")),
      failed,
      h("div", { class: "row end" }, button("Cancel", () => box.close()), h("button", { type: "submit", class: "button primary" }, "Make the key")),
    ),
  );
  user.focus();
}

function showKey(made) {
  const box = dialog(
    `The key of ${made.user}`,
    h("p", { class: "note" }, "Copy it now. It is shown only this once; the server keeps only a hash of it."),
    h("pre", { class: "line secret", tabindex: 0, "aria-label": "Key" }, made.key),
    h("div", { class: "row end" }, button("Copy", () => copy(made.key, "Key copied."), { icon: "copy", kind: "primary" }), button("Done", () => box.close())),
  );
}

function revoke(one, body) {
  const failed = h("div", { role: "alert" });
  const send = async () => {
    try {
      await remove(`/v1/keys/${path(one.id)}`);
    } catch (error) {
      clear(failed, problem(error));
      return;
    }
    box.close();
    if (one.current) {
      location.reload();
      return;
    }
    toast(`The key of ${one.user} was revoked.`);
    keys(body);
  };
  const box = dialog(
    "Revoke this key?",
    h("p", null, `Programs that use the key ${one.id} of ${one.user} are refused from now on. This cannot be undone.`, one.current ? " It is the key that you are signed in with: you will be signed out." : ""),
    failed,
    h("div", { class: "row end" }, button("Cancel", () => box.close()), button("Revoke", send, { kind: "danger" })),
  );
}
