/** The screen of collections: their documents, adding and deleting them, who may see them, and publishing. */
import { collections, get, patch, path, post, put, remove, session, upload } from "./api.js";
import { ago, button, bytes, clear, copy, count, dialog, empty, field, h, icon, problem, toast, whileDisabled } from "./dom.js";
import { openPanel, openSource } from "./viewer.js";

const PAGE = 50;
const CHUNKS = 100;
const MOST_AT_ONCE = 2;
const MOST_POLLED = 6;
const POLL_MS = 500;
const REFRESH_MS = 3000;
const UNDO_MS = 8000;
const UNDO = `Undo (${/Mac|iP/.test(navigator.platform) ? "⌘" : "Ctrl+"}Z)`;
// Files that systems leave in folders, and that nobody means to add.
const LEFT_OUT = /(^|\/)(\.[^/]*|Thumbs\.db|desktop\.ini|__MACOSX)(\/|$)/i;
const STATES = {
  completed: { label: "Ready", kind: "good" },
  processing: { label: "Being read", kind: "open" },
  pending: { label: "Queued", kind: "open" },
  failed: { label: "Failed", kind: "bad" },
};
const OF_COLLECTION = {
  private: { label: "Only the owner", hint: "Whoever makes the collection" },
  restricted: { label: "Named people", hint: "The owner, and the users and groups named here" },
  public: { label: "Everyone", hint: "Everyone who may use this server" },
};
const OF_DOCUMENT = {
  collection: { label: "Readers of the collection", hint: "Whoever may see the collection, also after that changes" },
  ...OF_COLLECTION,
  private: { label: "Only the owner", hint: "Whoever adds the document" },
};
const FORMATS = "PDF, Word (.docx), Markdown, HTML, text, CSV and JSON";

// A name with a slash, or "." and "..", does not fit into a path: its id does.
const UNFIT = /^\.{1,2}$|\//;
const collectionPath = (one) => `/v1/collections/${path(one.id)}`;
const address = (one) => `#/library/${path(UNFIT.test(one.called ?? one.name) ? one.id : (one.called ?? one.name))}`;

export async function libraryScreen(main, ...rest) {
  const [name] = rest.slice(0, -1);
  const leaving = new AbortController();
  const screen = name ? new CollectionScreen(main, name, leaving.signal) : new CollectionsScreen(main, leaving.signal);
  await screen.load();
  return () => {
    leaving.abort();
    if (!location.hash.startsWith("#/library")) sendDeletions();
  };
}

/* Deleting, with a moment to undo it. */

const deletions = new Map();

/** Hides something at once, and deletes it on the server when its notice ends without "Undo". */
async function deleteLater(key, text, url, redraw) {
  const deletion = { send };
  deletions.set(key, deletion);
  redraw();
  const undone = toast(text, { action: UNDO, lasts_ms: UNDO_MS });
  deletion.notice = document.getElementById("toasts").lastElementChild;
  async function send(keepalive = false) {
    if (deletion.sent) return;
    deletion.sent = true;
    deletion.notice.remove();
    try {
      await remove(url, { keepalive });
    } catch (error) {
      toast(`It was not deleted. ${error.message}`, { kind: "error" });
    }
    deletions.delete(key);
    redraw(true);
  }
  if (!(await undone)) return send();
  deletions.delete(key);
  redraw();
}

const sendDeletions = () => [...deletions.values()].forEach((deletion) => deletion.send(true));

addEventListener("pagehide", sendDeletions);
addEventListener("keydown", (event) => {
  if (event.key !== "z" || !(event.ctrlKey || event.metaKey) || event.shiftKey || event.target.matches?.("input, textarea")) return;
  const latest = [...deletions.values()].findLast((deletion) => !deletion.sent);
  if (!latest) return;
  event.preventDefault();
  latest.notice.querySelector("button").click();
});

/* Files on their way. */

const transfers = [];
const progress = new EventTarget();
let polling = null;
let turn = 0;

/** A file, a text or a URL from the moment it was given until it can be searched. */
class Transfer {
  constructor(collection, name, { file = null, documents = null } = {}) {
    Object.assign(this, { collection, name, file, documents, state: "waiting", fraction: 0, job: null, document: null, error: "", remedy: "" });
    this.text = h("span", { class: "transfer-state" });
    this.fill = h("div");
    this.bar = h("div", { class: "progress" }, this.fill);
    this.note = h("div");
    this.element = h("li", { class: "transfer" }, h("div", { class: "row" }, h("span", { class: "transfer-name" }, icon("file", 16), name), this.text), this.bar, this.note);
    this.draw();
  }

  get open() {
    return !["done", "failed"].includes(this.state);
  }

  /** A file or text that was sent and cannot be read is not read better the next time; a page of the web may be. */
  get retriable() {
    return !this.job || !(this.file || this.documents?.[0].source.type === "text");
  }

  set(changes) {
    Object.assign(this, changes);
    this.draw();
    progress.dispatchEvent(new CustomEvent("change", { detail: this }));
  }

  draw() {
    const { state, fraction, outcome, chunks } = this;
    const words = { added: "Added", replaced: "Replaced", updated: "Updated", unchanged: "Already there, unchanged" };
    const text = {
      waiting: "Waiting",
      uploading: fraction < 1 ? `Uploading, ${Math.floor(fraction * 100)} %` : "Uploaded",
      queued: "Queued",
      processing: "Being read",
      done: `${words[outcome] ?? "Done"}${chunks ? `, ${count(chunks, "chunk")}` : ""}`,
      failed: "Failed",
    }[state];
    this.text.textContent = text;
    this.element.dataset.state = state;
    this.bar.hidden = !this.open;
    this.bar.classList.toggle("busy", state === "processing" || state === "queued");
    this.fill.style.setProperty("width", `${state === "waiting" ? 0 : Math.round(fraction * 100)}%`);
    const key = state === "failed" ? this.error + this.remedy : "";
    if (this.noted === key) return;
    this.noted = key;
    clear(this.note, key ? [h("p", { class: "transfer-error" }, this.error, this.remedy ? ` ${this.remedy}` : ""), this.retriable ? button("Retry", () => this.retry(), { icon: "again", "aria-label": `Retry ${this.name}` }) : null] : null);
  }

  async send() {
    this.set({ state: "uploading", fraction: 0, error: "", remedy: "" });
    try {
      const accepted = this.file ? await this.sendFile() : await post("/v1/ingest", { collection_id: this.collection, documents: this.documents });
      this.set({ state: "queued", fraction: 1, job: accepted.job_id });
    } catch (error) {
      this.set({ state: "failed", error: error.message, remedy: remedy(error) });
    }
  }

  sendFile() {
    const form = new FormData();
    form.append("collection_id", this.collection);
    form.append("files", this.file, this.name);
    return upload("/v1/ingest", form, (fraction) => this.set({ fraction }));
  }

  async poll() {
    try {
      const job = await get(`/v1/ingest/${path(this.job)}`);
      const [one] = job.documents;
      const status = one?.status ?? job.status;
      this.document = one?.id ?? this.document;
      if (status === "completed") this.set({ state: "done", outcome: one?.outcome, chunks: one?.chunk_count });
      else if (status === "failed") this.set({ state: "failed", error: one?.error ?? "It could not be read.", remedy: this.retriable ? "Change it and add it again, or retry." : "Change it and add it again." });
      else if (status === "cancelled") this.set({ state: "failed", error: "It was cancelled.", remedy: "Add it again if you need it." });
      else if (status === "processing" && this.state !== "processing") this.set({ state: "processing" });
    } catch (error) {
      // A server that restarts comes back; the job is kept there.
      if (error.status && error.status < 500 && error.status !== 429) this.set({ state: "failed", error: error.message, remedy: "Add it again." });
    }
  }

  async retry() {
    if (!this.document) return start(this);
    try {
      const accepted = await post(`/v1/documents/${path(this.document)}/retry`, {});
      this.set({ state: "queued", fraction: 1, job: accepted.job_id });
      poll();
    } catch (error) {
      if (error.status === 409 || error.status === 404) start(this);
      else this.set({ error: error.message, remedy: remedy(error) });
    }
  }
}

function remedy({ status }) {
  if (status === 0) return "Start the server, then retry.";
  if (status === 413) return "Split the file, or ask the operator for a higher limit.";
  if (status === 429 || status >= 500) return "Wait a moment, then retry.";
  if (status === 401 || status === 403) return "Sign in as the owner of the collection, then retry.";
  return "";
}

function start(transfer) {
  transfer.set({ state: "waiting", fraction: 0, document: null });
  pump();
}

function pump() {
  const sending = transfers.filter((one) => one.state === "uploading").length;
  const next = transfers.filter((one) => one.state === "waiting").slice(0, MOST_AT_ONCE - sending);
  for (const one of next)
    one.send().then(() => {
      pump();
      poll();
    });
}

function poll() {
  polling ??= setTimeout(async () => {
    const open = transfers.filter((one) => one.job && one.open);
    const chosen = open.length > MOST_POLLED ? Array.from({ length: MOST_POLLED }, (_, index) => open[(turn + index) % open.length]) : open;
    turn += MOST_POLLED;
    await Promise.all(chosen.map((one) => one.poll()));
    polling = null;
    if (transfers.some((one) => one.job && one.open)) poll();
  }, POLL_MS);
}

function add(list) {
  transfers.push(...list);
  progress.dispatchEvent(new CustomEvent("added"));
  pump();
}

addEventListener("beforeunload", (event) => {
  if (transfers.some((one) => one.state === "waiting" || one.state === "uploading")) event.preventDefault();
});

/** The files of a drop, those in folders with their path. Has to be called before the event ends. */
function dropped(data) {
  const entries = [...data.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  return entries.length ? Promise.all(entries.map(filesOf)).then((found) => found.flat()) : Promise.resolve([...data.files].map((file) => ({ file, name: file.name })));
}

async function filesOf(entry) {
  const name = entry.fullPath.replace(/^\//, "");
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject)).catch(() => null);
    return file ? [{ file, name }] : [];
  }
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject)).catch(() => []);
    if (!some.length) return found;
    for (const one of some) found.push(...(await filesOf(one)));
  }
}

/** A place to drop files and folders, with buttons that do the same; files may be dropped anywhere on the screen. */
function dropZone(title, onFiles, signal, ...more) {
  const given = (files) => {
    const wanted = files.filter(({ name }) => !LEFT_OUT.test(name));
    if (wanted.length) onFiles(wanted);
    else toast(files.length ? "Only hidden files were given; they are not added." : "There are no files in it.");
  };
  const input = (label, folder) => {
    const control = h("input", { type: "file", multiple: true, webkitdirectory: folder, hidden: true, "aria-label": label });
    control.addEventListener("change", () => {
      given([...control.files].map((file) => ({ file, name: file.webkitRelativePath || file.name })));
      control.value = "";
    });
    return control;
  };
  const [files, folder] = [input("Files", false), input("Folder", true)];
  const zone = h(
    "div",
    { class: "drop" },
    h("p", { class: "drop-title" }, title),
    h("p", { class: "hint" }, `${FORMATS}.`),
    h("div", { class: "row" }, button("Choose files", () => files.click(), { icon: "file", kind: "primary" }), button("Choose a folder", () => folder.click(), { icon: "folder" }), ...more),
    files,
    folder,
  );
  const carries = (event) => event.dataTransfer?.types.includes("Files") && !document.querySelector("dialog[open]");
  document.addEventListener("dragover", (event) => carries(event) && (event.preventDefault(), zone.classList.add("over")), { signal });
  document.addEventListener("dragleave", (event) => event.relatedTarget || zone.classList.remove("over"), { signal });
  document.addEventListener(
    "drop",
    (event) => {
      zone.classList.remove("over");
      if (!carries(event)) return;
      event.preventDefault();
      dropped(event.dataTransfer).then(given);
    },
    { signal },
  );
  return zone;
}

/* Forms. */

/** A dialog with a form: it closes when `submit` succeeds, and else says what failed. */
function formDialog(title, { lead, fields, action, kind = "primary", submit }) {
  const note = h("div", { role: "alert" });
  const send = h("button", { type: "submit", class: `button ${kind}` }, action);
  const form = h("form", { onSubmit: submitted }, ...fields, note, h("div", { class: "row end" }, button("Cancel", () => box.close()), send));
  async function submitted(event) {
    event.preventDefault();
    clear(note);
    await whileDisabled(send, async () => {
      try {
        if ((await submit(box)) !== false) box.close();
      } catch (error) {
        clear(note, h("p", { class: "problem" }, error.message));
      }
    });
  }
  const box = dialog(title, lead ? h("p", null, lead) : null, form);
  (form.querySelector("input:not([type=radio]), textarea") ?? send).focus();
  return box;
}

const names = (text) => [...new Set(text.split(/[,\n]/).map((one) => one.trim()).filter(Boolean))];

/** Who may see a collection or a document: one of the `choices`, the first of which is the default. */
function permissionFields(legend, choices, given) {
  const group = `visibility-${Math.random().toString(36).slice(2)}`;
  const radios = Object.entries(choices).map(([value, { label, hint }]) => {
    const radio = h("input", { type: "radio", name: group, value, checked: (given?.visibility ?? Object.keys(choices)[0]) === value, onChange: () => draw() });
    return { radio, element: h("label", { class: "option described" }, radio, h("span", null, label), h("span", { class: "hint" }, hint)) };
  });
  const users = h("input", { value: (given?.allowed_users ?? []).join(", "), autocomplete: "off" });
  const groups = h("input", { value: (given?.allowed_groups ?? []).join(", "), autocomplete: "off" });
  const named = h("div", { class: "named" }, field("Users", users, "Names, with commas between them"), field("Groups", groups, "Names, with commas between them"));
  const chosen = () => radios.find(({ radio }) => radio.checked).radio.value;
  const draw = () => (named.hidden = chosen() !== "restricted");
  draw();
  return {
    element: h("fieldset", null, h("legend", null, legend), radios.map((one) => one.element), named),
    read() {
      const restricted = chosen() === "restricted";
      if (restricted && !names(users.value).length && !names(groups.value).length) throw new Error("Name at least one user or group, or choose “Only the owner”.");
      return { visibility: chosen(), allowed_users: restricted ? names(users.value) : [], allowed_groups: restricted ? names(groups.value) : [] };
    },
  };
}

function newCollection() {
  const name = h("input", { required: true, maxlength: 100, autocomplete: "off", placeholder: "handbook" });
  const description = h("textarea", { rows: 2, maxlength: 10_000 });
  const permissions = permissionFields("Who may see it", OF_COLLECTION);
  formDialog("New collection", {
    lead: "A collection is a set of documents that is searched as one source.",
    fields: [field("Name", name), field("Description (optional)", description, "What is in it, for people and models that choose sources."), permissions.element],
    action: "Create",
    submit: async () => {
      const made = await post("/v1/collections", { name: name.value.trim(), description: description.value.trim(), settings: { default_permissions: permissions.read() } });
      location.hash = address(made);
    },
  });
}

/* All collections. */

class CollectionsScreen {
  constructor(main, signal) {
    Object.assign(this, { main, signal, collections: [] });
    progress.addEventListener("deleted", () => this.load().catch(() => this.draw()), { signal });
  }

  async load() {
    this.collections = await collections();
    if (!this.signal.aborted) this.draw();
  }

  draw() {
    const shown = this.collections.filter((one) => !deletions.has(`collection ${one.id}`));
    const zone = dropZone(shown.length ? "Drop files or a folder here" : "Drop files or a folder here to begin", (files) => this.dropped(files), this.signal);
    clear(
      this.main,
      h(
        "div",
        { class: "screen" },
        h(
          "div",
          { class: "screen-head" },
          h("div", null, h("h1", null, "Library"), h("p", null, "Your documents, in collections. Each collection is a source that answers can cite.")),
          button("New collection", newCollection, { icon: "plus", kind: shown.length ? "primary" : "" }),
        ),
        zone,
        shown.length
          ? h("ul", { class: "cards collections" }, shown.map(card))
          : empty("No collections yet", "Drop files above: they become a collection, and a few seconds later you can ask about them. The files stay on this server."),
      ),
    );
  }

  dropped(files) {
    const list = h("datalist", { id: "known-collections" }, this.collections.map(({ called }) => h("option", { value: called })));
    const name = h("input", { required: true, maxlength: 100, value: "documents", list: list.id, autocomplete: "off" });
    formDialog(`Add ${count(files.length, "file")}`, {
      fields: [field("Collection", name, "A new name makes a new collection; the name of one adds the files to it."), list],
      action: "Add",
      submit: async () => {
        const chosen = name.value.trim();
        const one = this.collections.find((known) => known.called === chosen) ?? (await post("/v1/collections", { name: chosen }));
        add(files.map((file) => new Transfer(one.id, file.name, file)));
        location.hash = address(one);
      },
    });
    name.select();
  }
}

function card(one) {
  const size = h("span", null);
  get(`${collectionPath(one)}/stats`)
    .then((stats) => (size.textContent = ` · ${bytes(stats.storage_bytes)}`))
    .catch(() => {});
  return h(
    "li",
    { class: "card collection" },
    h("h2", null, h("a", { href: address(one) }, one.name)),
    one.description ? h("p", { class: "clamped" }, one.description) : null,
    h("p", { class: "hint" }, `${count(one.document_count, "document")} · ${count(one.chunk_count, "chunk")}`, size),
    h("p", { class: "row card-foot" }, one.owner ? h("span", { class: "hint" }, `Owner: ${one.owner}`) : null, publishedBadge(one)),
  );
}

const publishedBadge = (one) => (one.published?.length ? h("span", { class: "badge good", title: one.published.join(", ") }, "Published") : null);

/* One collection. */

class CollectionScreen {
  constructor(main, name, signal) {
    Object.assign(this, { main, name, signal, pages: [null], status: "all", page: null });
    this.facts = h("p", { class: "hint" });
    this.status_text = h("p", { class: "unseen", role: "status" });
    this.transfers = h("section", { class: "section", hidden: true });
    this.documents = h("div", { class: "fit" });
    this.heading = h("h2", { tabindex: -1 }, "Documents");
  }

  get mine() {
    return this.collection.settings.default_permissions !== null;
  }

  async load() {
    try {
      const known = UNFIT.test(this.name) ? (await collections()).find(({ called }) => called === this.name) : null;
      this.collection = await get(known ? collectionPath(known) : `/v1/collections/${path(this.name)}`);
    } catch (error) {
      if (error.status !== 404) throw error;
      clear(this.main, h("div", { class: "screen" }, h("h1", null, "Library"), empty("There is no such collection", error.message, h("a", { class: "button", href: "#/library" }, "All collections"))));
      return;
    }
    if (this.signal.aborted) return;
    this.drawFrame();
    this.drawTransfers();
    progress.addEventListener("added", () => this.drawTransfers(), { signal: this.signal });
    progress.addEventListener("change", ({ detail }) => this.changed(detail), { signal: this.signal });
    this.signal.addEventListener("abort", () => clearTimeout(this.timer));
    this.drawFacts();
    await this.loadDocuments();
  }

  drawFrame() {
    const one = this.collection;
    const filter = h("select", { onChange: () => this.restart(filter.value) }, h("option", { value: "all" }, "All states"), Object.entries(STATES).map(([value, { label }]) => h("option", { value }, label)));
    filter.id = "state-filter";
    const zone = this.mine
      ? dropZone("Drop files or a folder here", (files) => this.add(files.map((file) => new Transfer(one.id, file.name, file))), this.signal, button("Paste text", () => this.pasteText(), { icon: "copy" }), button("Add a URL", () => this.addUrl(), { icon: "link" }))
      : h("p", { class: "note" }, `${one.owner ?? "Someone else"} owns this collection. You can read and ask it; only its owner can change it.`);
    clear(
      this.main,
      h(
        "div",
        { class: "screen" },
        h("p", { class: "crumbs" }, h("a", { href: "#/library" }, "Library")),
        h(
          "div",
          { class: "screen-head" },
          h("div", null, h("h1", { class: "breakable" }, one.name), one.description ? h("p", null, one.description) : null, this.facts),
          h("div", { class: "row" }, h("a", { class: "button", href: `#/ask?collection=${encodeURIComponent(UNFIT.test(this.name) ? one.id : this.name)}` }, icon("ask"), h("span", null, "Ask it")), this.mine ? [button("Who may see it", () => this.readers(), { icon: "key" }), button("Publish", () => publish(one, () => this.refreshCollection()), { icon: "external" }), button("Delete", () => this.confirmDelete(), { icon: "trash", kind: "danger" })] : null),
        ),
        zone,
        this.status_text,
        this.transfers,
        h("section", { class: "section" }, h("div", { class: "row section-head" }, this.heading, h("span", { class: "spring" }), h("label", { class: "hint", for: filter.id }, "Show"), filter), this.documents),
      ),
    );
  }

  async refreshCollection() {
    this.collection = await get(collectionPath(this.collection)).catch(() => this.collection);
    this.drawFacts();
  }

  async drawFacts() {
    const one = this.collection;
    const readers = one.settings.default_permissions;
    const base = [count(one.document_count, "document"), count(one.chunk_count, "chunk"), readers ? `seen by: ${OF_COLLECTION[readers.visibility].label.toLowerCase()}` : null];
    const draw = (more) => clear(this.facts, [...base, ...more, one.owner ? `owner ${one.owner}` : null].filter(Boolean).join(" · "), " ", publishedBadge(one) ?? "");
    draw([]);
    const stats = await get(`${collectionPath(one)}/stats`).catch(() => null);
    if (stats) draw([bytes(stats.storage_bytes), stats.query_count_30d ? `${count(stats.query_count_30d, "question")} in 30 days` : null]);
  }

  add(list) {
    add(list);
    this.transfers.scrollIntoView({ block: "nearest" });
  }

  pasteText() {
    const title = h("input", { required: true, maxlength: 200, autocomplete: "off" });
    const text = h("textarea", { required: true, rows: 10 });
    formDialog("Paste text", {
      fields: [field("Title", title), field("Text", text, "Markdown is understood: headings become the outline of the document.")],
      action: "Add",
      submit: () => this.add([new Transfer(this.collection.id, title.value.trim(), { documents: [{ title: title.value.trim(), source: { type: "text", content: text.value } }] })]),
    });
  }

  addUrl() {
    const url = h("input", { type: "url", required: true, placeholder: "https://example.com/page", autocomplete: "off" });
    formDialog("Add a URL", {
      lead: "The server fetches this one page (or file) and keeps its text. Adding the same URL again updates it.",
      fields: [field("URL", url)],
      action: "Add",
      submit: () => this.add([new Transfer(this.collection.id, url.value.trim(), { documents: [{ source: { type: "url", content: url.value.trim() } }] })]),
    });
  }

  /* What is being added. */

  drawTransfers() {
    const mine = transfers.filter((one) => one.collection === this.collection.id);
    this.transfers.hidden = !mine.length;
    if (!mine.length) return;
    this.summary = h("h2", null);
    this.clearButton = button("Clear finished", () => this.clearFinished(), { kind: "quiet" });
    clear(
      this.transfers,
      h("div", { class: "row section-head" }, this.summary, h("span", { class: "spring" }), this.clearButton),
      h("div", { class: "transfers", role: "region", "aria-label": "Files being added", tabindex: 0 }, h("ul", { class: "list" }, mine.map((one) => one.element))),
    );
    this.drawSummary();
  }

  drawSummary() {
    const mine = transfers.filter((one) => one.collection === this.collection.id);
    const [open, failed] = [mine.filter((one) => one.open).length, mine.filter((one) => one.state === "failed").length];
    const text = `${open ? `Adding: ${mine.length - open} of ${mine.length} finished` : `${count(mine.length - failed, "item")} added`}${failed ? `, ${failed} failed` : ""}`;
    if (this.summary.textContent === text) return;
    this.summary.textContent = text;
    this.status_text.textContent = text;
    this.clearButton.hidden = open === mine.length;
  }

  clearFinished() {
    for (let index = transfers.length - 1; index >= 0; index -= 1)
      if (transfers[index].collection === this.collection.id && !transfers[index].open) transfers.splice(index, 1);
    this.drawTransfers();
    this.heading.focus();
  }

  changed(transfer) {
    if (transfer.collection !== this.collection.id) return;
    this.drawSummary();
    if (!transfer.open) this.refreshSoon(400, true);
  }

  /* The documents. */

  refreshSoon(wait_ms, counts = false) {
    this.counts ||= counts;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      if (this.counts) this.refreshCollection();
      this.counts = false;
      this.loadDocuments();
    }, wait_ms);
  }

  restart(status) {
    Object.assign(this, { status, pages: [null] });
    this.loadDocuments();
  }

  async loadDocuments() {
    const asked = Symbol("documents");
    this.asked = asked;
    const after = this.pages[this.pages.length - 1];
    const query = new URLSearchParams({ collection: this.collection.id, status: this.status, limit: PAGE, ...(after ? { after } : {}) });
    try {
      const found = await get(`/v1/documents?${query}`);
      // Only the list that was asked for last is shown.
      if (this.asked !== asked) return;
      this.page = found;
    } catch (error) {
      if (!this.signal.aborted && this.asked === asked) clear(this.documents, problem(error, () => this.loadDocuments()));
      return;
    }
    if (this.signal.aborted) return;
    this.drawDocuments();
    if (this.page.documents.some((one) => one.status === "pending" || one.status === "processing")) this.refreshSoon(REFRESH_MS);
  }

  drawDocuments() {
    const shown = this.page.documents.filter((one) => !deletions.has(`document ${one.id}`));
    if (!shown.length && this.pages.length === 1) {
      clear(
        this.documents,
        this.status === "all"
          ? h("div", { class: "card quiet-empty" }, h("p", null, "No documents yet."), this.mine ? h("p", { class: "hint" }, "Drop files above, paste a text, or add a URL. A document can be asked about as soon as it is ready.") : null)
          : h("div", { class: "card quiet-empty" }, h("p", null, `No documents in the state “${STATES[this.status].label}”.`)),
      );
      return;
    }
    const column = (label, kind = "wide") => h("th", { scope: "col", class: kind }, label);
    clear(
      this.documents,
      h(
        "table",
        { class: "data documents" },
        h("caption", { class: "unseen" }, `Documents of ${this.collection.name}`),
        h("thead", null, h("tr", null, column("Title", ""), column("State", ""), column("Chunks", "wide number"), column("Size", "wide number"), column("Pages", "wide number"), column("Who may see it"), column("Updated"), h("th", { scope: "col" }, h("span", { class: "unseen" }, "Actions")))),
        h("tbody", null, shown.map((one) => this.row(one))),
      ),
      this.pager(shown.length),
    );
  }

  pager(shown) {
    const first = (this.pages.length - 1) * PAGE + 1;
    const turnTo = (pages) => {
      this.pages = pages;
      this.loadDocuments().then(() => this.heading.focus());
    };
    return h(
      "div",
      { class: "row pager" },
      h("span", { class: "hint" }, `${first.toLocaleString("en")}–${(first + shown - 1).toLocaleString("en")} of ${this.page.total.toLocaleString("en")}`),
      h("span", { class: "spring" }),
      this.pages.length > 1 ? button("Previous", () => turnTo(this.pages.slice(0, -1)), { "aria-label": "Previous page" }) : null,
      this.page.has_more ? button("Next", () => turnTo([...this.pages, this.page.next]), { "aria-label": "Next page" }) : null,
    );
  }

  row(one) {
    const { label, kind } = STATES[one.status] ?? { label: one.status, kind: "" };
    const who = one.permissions ? OF_DOCUMENT[one.permissions.visibility].label : "Shared with you";
    const pages = one.pages ? count(one.pages, "page") : null;
    const act = (text, name, onClick, extra = {}) => button(`${text}: ${one.title}`, onClick, { icon: name, hidden: true, kind: "quiet icon-only", title: text, "data-focus": `${text} ${one.id}`, ...extra });
    return h(
      "tr",
      null,
      h(
        "th",
        { scope: "row" },
        one.searchable ? h("button", { type: "button", class: "text-button", "data-focus": `open ${one.id}`, onClick: () => openSource({ document_id: one.id, spans: [] }) }, one.title) : h("span", { class: "breakable" }, one.title),
        h("span", { class: "narrow hint" }, [one.searchable ? count(one.chunk_count, "chunk") : null, bytes(one.size_bytes), pages, who].filter(Boolean).join(" · "), " · ", ago(one.updated_at)),
        one.status === "failed" ? h("span", { class: "row-error" }, one.error ?? "It could not be read.", one.searchable ? " The earlier version is still searched." : "") : null,
        one.status === "failed" && one.permissions ? button("Retry", () => this.retry(one), { icon: "again", "aria-label": `Retry ${one.title}`, "data-focus": `retry ${one.id}` }) : null,
      ),
      h("td", null, h("span", { class: `badge ${kind}` }, label)),
      h("td", { class: "wide number" }, one.searchable ? one.chunk_count.toLocaleString("en") : "–"),
      h("td", { class: "wide number" }, bytes(one.size_bytes)),
      h("td", { class: "wide number" }, one.pages ?? "–"),
      h("td", { class: "wide" }, who),
      h("td", { class: "wide" }, ago(one.updated_at)),
      h(
        "td",
        { class: "row-actions" },
        one.searchable ? act("Chunks", "explain", () => showChunks(one)) : null,
        one.permissions ? act("Who may see it", "key", () => this.permissions(one)) : null,
        one.permissions ? act("Delete", "trash", () => this.delete(one)) : null,
      ),
    );
  }

  async retry(one) {
    try {
      const accepted = await post(`/v1/documents/${path(one.id)}/retry`, {});
      const transfer = new Transfer(this.collection.id, one.title);
      Object.assign(transfer, { job: accepted.job_id, document: one.id, state: "queued", fraction: 1 });
      transfer.draw();
      add([transfer]);
      poll();
      this.refreshSoon(100);
    } catch (error) {
      const gone = error.status === 409;
      dialog(gone ? "Add the file again" : "It cannot be retried", h("p", null, error.message), gone ? h("p", null, one.source.type === "file" ? "Drop the file on this page again: it replaces the failed one." : "Add the text or URL again.") : null);
    }
  }

  readers() {
    const chosen = permissionFields(`Who may see “${this.collection.name}”`, OF_COLLECTION, this.collection.settings.default_permissions);
    formDialog("Who may see it", {
      lead: "Documents follow their collection, unless others were chosen for them.",
      fields: [chosen.element],
      action: "Save",
      submit: async () => {
        this.collection = await patch(collectionPath(this.collection), { default_permissions: chosen.read() });
        toast("Saved. The next question sees the change.");
        this.drawFacts();
      },
    });
  }

  permissions(one) {
    const chosen = permissionFields(`Who may see “${one.title}”`, OF_DOCUMENT, one.permissions);
    formDialog("Who may see it", {
      fields: [chosen.element],
      action: "Save",
      submit: async () => {
        await patch(`/v1/documents/${path(one.id)}`, { permissions: chosen.read() });
        toast("Saved. The next question sees the change.");
        this.loadDocuments();
      },
    });
  }

  delete(one) {
    this.heading.focus({ preventScroll: true });
    deleteLater(`document ${one.id}`, `“${one.title}” is deleted.`, `/v1/documents/${path(one.id)}`, (sent) => {
      if (this.signal.aborted) return;
      if (sent) this.refreshSoon(0, true);
      else this.drawDocuments();
    });
  }

  confirmDelete() {
    const { id, name, document_count } = this.collection;
    formDialog("Delete this collection?", {
      lead: `“${name}” and its ${count(document_count, "document")} are deleted from this server. Answers that cite them lose their sources.`,
      fields: [],
      action: `Delete ${name}`,
      kind: "danger",
      submit: () => {
        deleteLater(`collection ${id}`, `“${name}” is deleted.`, collectionPath(this.collection), () => progress.dispatchEvent(new Event("deleted")));
        location.hash = "#/library";
      },
    });
  }
}

/** The chunks of a document, as they were cut. */
async function showChunks(one) {
  const list = h("ol", { class: "chunks" });
  const more = h("div");
  const facts = h("p", { class: "hint" }, "Loading…");
  openPanel(`Chunks of ${one.title}`, facts, list, more);
  async function load(after) {
    try {
      const found = await get(`/v1/documents/${path(one.id)}/chunks?limit=${CHUNKS}${after ? `&after=${encodeURIComponent(after)}` : ""}`);
      facts.textContent = `${count(found.total, "chunk")}. A chunk is what is searched and cited; this is how the document was cut.`;
      list.append(...found.chunks.map(chunk));
      clear(more, found.has_more ? button(`Show ${CHUNKS} more`, () => load(found.next)) : null);
    } catch (error) {
      if (!after) clear(facts);
      clear(more, problem(error, () => load(after)));
    }
  }
  await load(null);
}

function chunk(one) {
  const facts = [`Characters ${one.start_char.toLocaleString("en")}–${one.end_char.toLocaleString("en")}`, count(one.tokens, "token"), one.page ? `page ${one.page}` : null, one.type && one.type !== "text" ? one.type : null];
  return h(
    "li",
    { class: "chunk" },
    h("h3", null, `Chunk ${one.index + 1}`, one.headers?.length ? h("span", { class: "hint" }, ` ${one.headers.join(" › ")}`) : null),
    h("p", { class: "hint" }, facts.filter(Boolean).join(" · ")),
    h("p", { class: "chunk-text" }, one.text),
  );
}

const LOOPBACK = /^(localhost|127\.[\d.]+|\[::1\])$/;

/** Publishing: other servers then use the collection as a source. */
async function publish(one, changed) {
  const slug = (text) => text.toLowerCase().normalize("NFKD").replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "");
  const as = h("input", { required: true, value: `${one.owner ?? session.user ?? "me"}/${slug(one.name) || "collection"}`, pattern: "[^\\/\\s]+\\/[^\\/\\s]+", title: "OWNER/NAME", autocomplete: "off", spellcheck: "false" });
  const published = h("div");
  const note = h("div", { role: "alert" });
  const url = `${collectionPath(one)}/endpoint`;
  const failed = (error) => clear(note, h("p", { class: "problem" }, error.message));
  const withdraw = async (path_) => {
    await remove(`${url}?as=${encodeURIComponent(path_)}`).then(list, failed);
    changed();
  };
  const lines = (label, text) => (text ? [h("div", { class: "row" }, h("h4", null, label), h("span", { class: "spring" }), button("Copy", () => copy(text), { icon: "copy", kind: "quiet", "aria-label": `Copy: ${label}` })), h("pre", { class: "line", tabindex: 0 }, text)] : []);
  const entry = (found) =>
    h(
      "li",
      null,
      h("div", { class: "row" }, h("h3", null, found.path ?? `${found.owner}/${found.slug}`), h("span", { class: "spring" }), button("Withdraw", () => withdraw(found.path ?? `${found.owner}/${found.slug}`), { kind: "danger" })),
      lines("For another server’s anabranch.yaml", found.yaml),
      lines("As a source in a request", typeof found.source === "string" ? found.source : found.source && JSON.stringify(found.source, null, 2)),
      lines("Address", found.url_path && new URL(found.url_path, location.origin).href),
    );
  async function list() {
    const found = await get(url);
    const entries = Array.isArray(found) ? found : (found.endpoints ?? found.published ?? []);
    clear(published, entries.length ? h("ul", { class: "list published" }, entries.map(entry)) : h("p", { class: "hint" }, "It is not published yet."));
  }
  async function submit(event) {
    event.preventDefault();
    clear(note);
    try {
      const made = await put(url, { as: as.value.trim() });
      await list().catch(() => clear(published, h("ul", { class: "list published" }, entry(made))));
      changed();
    } catch (error) {
      failed(error);
    }
  }
  const box = dialog(
    `Publish ${one.name}`,
    h("p", null, "A published collection is an endpoint: another Anabranch, or any client of the endpoint protocol, can ask it. Each caller still sees only what they may see: without a key, the public documents."),
    LOOPBACK.test(location.hostname) ? h("p", { class: "note" }, `${location.host} is an address of this machine only. For other machines, open this page under an address that they can reach: it is then in the lines to paste.`) : null,
    h("form", { onSubmit: submit }, field("Publish as", as, "OWNER/NAME, the path that others use."), note, h("div", { class: "row end" }, h("button", { type: "submit", class: "button primary" }, "Publish"))),
    published,
  );
  box.classList.add("wide");
  await list().catch(failed);
}
