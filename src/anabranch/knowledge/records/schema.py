"""The tables, as forward-only migrations."""

FIRST = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE collections (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    description TEXT NOT NULL,
    settings TEXT NOT NULL,
    created_at REAL NOT NULL,
    UNIQUE (owner, name)
);

-- A new version of a document is a new row under the same id; keys are never used again.
CREATE TABLE documents (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    collection INTEGER NOT NULL REFERENCES collections (key),
    owner TEXT NOT NULL,
    source TEXT NOT NULL,
    identity TEXT NOT NULL,
    filename TEXT,
    url TEXT,
    title TEXT NOT NULL,
    content_hash TEXT NOT NULL,
    recipe TEXT NOT NULL,
    metadata TEXT NOT NULL,
    visibility TEXT NOT NULL,
    allowed_users TEXT NOT NULL,
    allowed_groups TEXT NOT NULL,
    day INTEGER NOT NULL,
    pages INTEGER,
    first_chunk INTEGER NOT NULL,
    chunk_count INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    size INTEGER NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL
);
CREATE INDEX documents_by_collection ON documents (collection, created_at);
CREATE INDEX documents_by_hash ON documents (content_hash);
CREATE INDEX documents_by_chunk ON documents (first_chunk);
CREATE UNIQUE INDEX documents_by_identity ON documents (collection, identity);

CREATE TABLE contents (document INTEGER PRIMARY KEY, content TEXT NOT NULL);

-- Every scalar of the metadata and every tag, for filters.
CREATE TABLE attributes (
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    document INTEGER NOT NULL,
    PRIMARY KEY (name, value, document)
) WITHOUT ROWID;
CREATE INDEX attributes_by_document ON attributes (document);

-- The chunks of one document have keys in a row: first_chunk, first_chunk + 1, …
CREATE TABLE chunks (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL,
    document INTEGER NOT NULL,
    start_char INTEGER NOT NULL,
    end_char INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    kind TEXT NOT NULL,
    headers TEXT NOT NULL,
    page INTEGER,
    text TEXT NOT NULL
);

CREATE TABLE embeddings (chunk INTEGER PRIMARY KEY, vector BLOB NOT NULL, tokens BLOB NOT NULL);

CREATE TABLE changes (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    op TEXT NOT NULL,
    document INTEGER NOT NULL,
    at REAL NOT NULL
);

CREATE TABLE jobs (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    collection INTEGER NOT NULL,
    collection_id TEXT NOT NULL,
    owner TEXT NOT NULL,
    chunking TEXT NOT NULL,
    cancelled INTEGER NOT NULL DEFAULT 0,
    created_at REAL NOT NULL,
    completed_at REAL
);
CREATE INDEX jobs_open ON jobs (key) WHERE completed_at IS NULL;

CREATE TABLE items (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    job INTEGER NOT NULL REFERENCES jobs (key),
    ordinal INTEGER NOT NULL,
    document_id TEXT NOT NULL,
    status TEXT NOT NULL,
    outcome TEXT,
    chunk_count INTEGER NOT NULL DEFAULT 0,
    error TEXT,
    arrived TEXT NOT NULL,
    content_hash TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX items_by_job ON items (job, ordinal);
CREATE INDEX items_pending ON items (key) WHERE status = 'pending';

CREATE TABLE uploads (item INTEGER PRIMARY KEY, data BLOB NOT NULL);

CREATE TABLE queries (
    id TEXT PRIMARY KEY,
    user TEXT NOT NULL,
    conversation TEXT,
    original TEXT NOT NULL,
    rewritten TEXT,
    variants TEXT NOT NULL,
    filters TEXT NOT NULL,
    top_k INTEGER NOT NULL,
    endpoint TEXT,
    transaction_token TEXT,
    retrieval_ms INTEGER NOT NULL,
    latency_ms INTEGER NOT NULL,
    created_at REAL NOT NULL
);
CREATE INDEX queries_by_conversation ON queries (user, conversation, created_at);
CREATE INDEX queries_by_time ON queries (created_at);

CREATE TABLE query_collections (
    collection INTEGER NOT NULL,
    query TEXT NOT NULL,
    created_at REAL NOT NULL,
    PRIMARY KEY (collection, created_at, query)
) WITHOUT ROWID;
CREATE INDEX query_collections_by_query ON query_collections (query);

CREATE TABLE retrievals (
    query TEXT NOT NULL,
    rank INTEGER NOT NULL,
    chunk TEXT NOT NULL,
    document TEXT NOT NULL,
    dense REAL,
    sparse REAL,
    fused REAL,
    rerank REAL,
    PRIMARY KEY (query, rank)
) WITHOUT ROWID;
CREATE INDEX retrievals_by_document ON retrievals (document);

CREATE TABLE responses (
    query TEXT PRIMARY KEY,
    answer TEXT NOT NULL,
    refused INTEGER NOT NULL,
    model TEXT,
    input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    faithfulness REAL,
    relevance REAL,
    feedback TEXT,
    comment TEXT,
    created_at REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE citations (
    query TEXT NOT NULL,
    ordinal INTEGER NOT NULL,
    citation_index INTEGER NOT NULL,
    chunk TEXT NOT NULL,
    document TEXT NOT NULL,
    quoted TEXT NOT NULL,
    PRIMARY KEY (query, ordinal)
) WITHOUT ROWID;
CREATE INDEX citations_by_document ON citations (document);

CREATE TABLE keys (
    id TEXT PRIMARY KEY,
    hash TEXT NOT NULL UNIQUE,
    user TEXT NOT NULL,
    groups TEXT NOT NULL,
    operator INTEGER NOT NULL,
    note TEXT NOT NULL,
    created_at REAL NOT NULL,
    revoked_at REAL
) WITHOUT ROWID;

CREATE TABLE endpoints (
    owner TEXT NOT NULL,
    slug TEXT NOT NULL,
    collection INTEGER NOT NULL,
    created_at REAL NOT NULL,
    PRIMARY KEY (owner, slug)
) WITHOUT ROWID;
"""

SURFACES = """
ALTER TABLE queries ADD COLUMN surface TEXT;
ALTER TABLE queries ADD COLUMN settings TEXT;
ALTER TABLE queries ADD COLUMN outcome TEXT;
"""

# Counts hold no question, so they are kept longer than questions; `day` counts from 1970-01-01 (UTC). `rated_us` is the
# time of a rating in microseconds: lists of feedback are ordered by it.
QUERY_COUNTS = """
CREATE TABLE query_counts (
    collection INTEGER NOT NULL,
    day INTEGER NOT NULL,
    user TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (collection, day, user)
) WITHOUT ROWID;
INSERT INTO query_counts
    SELECT collection, CAST(queries.created_at / 86400 AS INTEGER), user, count(*)
    FROM query_collections
    JOIN queries ON queries.id = query_collections.query
    JOIN responses ON responses.query = queries.id
    GROUP BY 1, 2, 3;
ALTER TABLE responses ADD COLUMN rated_us INTEGER;
UPDATE responses SET rated_us = CAST(created_at * 1000000 AS INTEGER) WHERE feedback IS NOT NULL;
CREATE INDEX responses_by_rating ON responses (rated_us) WHERE feedback IS NOT NULL;
CREATE INDEX queries_by_user ON queries (user);
UPDATE queries
    SET outcome = (SELECT iif(refused, 'refused', 'answered') FROM responses WHERE responses.query = queries.id)
    WHERE outcome IS NULL;
"""

# The bytes of a document in the records: its text, the text of its chunks, and their vectors.
MEASURE = """
UPDATE documents SET stored_bytes =
    coalesce((SELECT length(CAST(content AS BLOB)) FROM contents WHERE document = documents.key), 0)
    + coalesce((
        SELECT sum(length(CAST(text AS BLOB)) + length(vector) + length(embeddings.tokens))
        FROM chunks JOIN embeddings ON embeddings.chunk = chunks.key
        WHERE chunks.key >= first_chunk AND chunks.key < first_chunk + chunk_count
    ), 0)
"""

PROCESSING = """
ALTER TABLE documents ADD COLUMN connector_id TEXT;
ALTER TABLE documents ADD COLUMN processed_at REAL;
ALTER TABLE documents ADD COLUMN stored_bytes INTEGER NOT NULL DEFAULT 0;
UPDATE documents SET processed_at = updated_at;
CREATE INDEX documents_by_filename ON documents (filename COLLATE NOCASE);
CREATE INDEX documents_by_title ON documents (title COLLATE NOCASE);

ALTER TABLE items ADD COLUMN finished_at REAL;
CREATE INDEX items_open ON items (status, key) WHERE status IN ('pending', 'processing', 'failed');
CREATE INDEX items_failed ON items (key) WHERE status = 'failed';
CREATE INDEX items_by_document ON items (document_id, status);
CREATE INDEX items_open_by_identity ON items (json_extract(arrived, '$.identity'))
    WHERE status IN ('pending', 'processing', 'failed');

-- The newest version of each document, if it is not stored. An upload is kept while its document waits, is processed,
-- or has failed and can be retried; older items need not be read.
CREATE VIEW open_items AS
SELECT items.key, document_id, status, error, arrived, content_hash, finished_at, jobs.owner, collection, chunking,
    settings, length(data) AS size,
    EXISTS (SELECT 1 FROM documents WHERE documents.id = document_id) AS is_stored
FROM items JOIN uploads ON uploads.item = items.key
JOIN jobs ON jobs.key = items.job JOIN collections ON collections.key = jobs.collection
WHERE status IN ('pending', 'processing', 'failed') AND items.key >= (SELECT min(item) FROM uploads) AND NOT EXISTS (
    SELECT 1 FROM items AS newer JOIN uploads AS kept ON kept.item = newer.key
    WHERE newer.document_id = items.document_id AND newer.key > items.key
    AND newer.status IN ('pending', 'processing', 'failed')
);
"""

# How many sentences of a verified answer have each verdict, as JSON.
VERDICTS = """
ALTER TABLE responses ADD COLUMN verdicts TEXT;
"""

# The offsets in the text at which the pages of a document begin, as JSON; null if it was stored before.
PAGE_STARTS = """
ALTER TABLE contents ADD COLUMN page_starts TEXT;
"""

# The sentences of a verified answer, as JSON; whether others may read an entry; where a quoted text is in its document.
SHARING = """
ALTER TABLE responses ADD COLUMN sentences TEXT;
ALTER TABLE queries ADD COLUMN shared INTEGER NOT NULL DEFAULT 0;
ALTER TABLE citations ADD COLUMN start_char INTEGER;
ALTER TABLE citations ADD COLUMN end_char INTEGER;
"""

# The pages of a chunk after its first one, each with the offset in the document at which it begins, as JSON.
LATER_PAGES = """
ALTER TABLE chunks ADD COLUMN later_pages TEXT;
"""

# What is to be erased, and what was: `documents` are ids, as JSON; `user` is forgotten once the user's rows are gone.
# `next_at` is when the next pass is due, null when the erasure is complete; `pass` numbers the latest one, over all
# erasures. `erased` counts what each store has removed. `backups` are the files that were made of these records.
ERASURES = """
CREATE TABLE erasures (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    what TEXT NOT NULL,
    documents TEXT NOT NULL,
    user TEXT,
    requested_at REAL NOT NULL,
    due_at REAL NOT NULL,
    settled_at REAL NOT NULL,
    next_at REAL,
    pass INTEGER NOT NULL DEFAULT 0,
    completed_at REAL,
    error TEXT
);
CREATE INDEX erasures_open ON erasures (next_at) WHERE next_at IS NOT NULL;
CREATE INDEX erasures_by_pass ON erasures (pass);

CREATE TABLE erased (
    erasure INTEGER NOT NULL,
    store TEXT NOT NULL,
    removed INTEGER NOT NULL,
    PRIMARY KEY (erasure, store)
) WITHOUT ROWID;

CREATE TABLE backups (path TEXT PRIMARY KEY, made_at REAL NOT NULL) WITHOUT ROWID;
"""

# Keys of before keep all rights; `grants` is null where the settings say who may use configured endpoints. The previous
# secret of a rotated key is valid until `previous_until`. `key_collections` are those to which the asker's key was
# restricted.
KEY_RIGHTS = """
ALTER TABLE keys ADD COLUMN scopes TEXT NOT NULL DEFAULT '["ask","read","ingest","admin"]';
UPDATE keys SET scopes = '["ask","read","ingest"]' WHERE NOT operator;
ALTER TABLE keys ADD COLUMN collections TEXT;
ALTER TABLE keys ADD COLUMN grants TEXT;
ALTER TABLE keys ADD COLUMN limits TEXT NOT NULL DEFAULT '{}';
ALTER TABLE keys ADD COLUMN expires_at REAL;
ALTER TABLE keys ADD COLUMN last_used_at REAL;
ALTER TABLE keys ADD COLUMN previous_hash TEXT;
ALTER TABLE keys ADD COLUMN previous_until REAL;
CREATE INDEX keys_by_previous_hash ON keys (previous_hash) WHERE previous_hash IS NOT NULL;
ALTER TABLE queries ADD COLUMN key_collections TEXT;
"""

# `audit_chain` has one row: the last record that was deleted (the first hash is random, so that no two logs are alike),
# and the newest one. `day` counts from 1970-01-01 (UTC).
AUDIT = """
CREATE TABLE audit (
    seq INTEGER PRIMARY KEY,
    at_us INTEGER NOT NULL,
    action TEXT NOT NULL,
    outcome TEXT NOT NULL,
    actor BLOB NOT NULL,
    address BLOB NOT NULL,
    surface TEXT NOT NULL,
    api_key TEXT NOT NULL,
    request TEXT NOT NULL,
    object TEXT NOT NULL,
    name BLOB NOT NULL,
    details TEXT NOT NULL,
    hash BLOB NOT NULL
);
CREATE TRIGGER audit_is_not_changed BEFORE UPDATE ON audit BEGIN
    SELECT RAISE(ABORT, 'records of the audit log are not changed');
END;
CREATE TABLE audit_names (
    digest BLOB PRIMARY KEY,
    salt BLOB NOT NULL,
    day INTEGER NOT NULL,
    subject TEXT NOT NULL,
    name TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX audit_names_by_subject ON audit_names (subject, day, name);
CREATE TABLE audit_chain (
    anchor_seq INTEGER NOT NULL,
    anchor_hash BLOB NOT NULL,
    head_seq INTEGER NOT NULL,
    head_hash BLOB NOT NULL
);
INSERT INTO audit_chain VALUES (0, randomblob(32), 0, x'');
UPDATE audit_chain SET head_hash = anchor_hash;
"""

# Documents that everybody may see, in a collection that everybody may see, follow the collection. Others keep what was
# chosen for them. Before, everything was public unless somebody said otherwise; in records that were there it still is.
DEFAULT_VISIBILITY = """
INSERT INTO facts SELECT 'default_visibility', iif(user_version = 0, 'private', 'public') FROM pragma_user_version;
UPDATE documents SET visibility = 'collection' WHERE visibility = 'public' AND EXISTS (
    SELECT 1 FROM collections WHERE key = collection
    AND json_extract(settings, '$.default_permissions.visibility') = 'public'
);
"""

# What the queue is read by: the lane of an item is its owner and whether it is to be fetched. `alone` marks the one
# that is processed alone: if the process dies, it is the cause.
LANES = """
ALTER TABLE items ADD COLUMN owner TEXT NOT NULL DEFAULT '';
ALTER TABLE items ADD COLUMN is_url INTEGER NOT NULL DEFAULT 0;
ALTER TABLE items ADD COLUMN size INTEGER NOT NULL DEFAULT 0;
ALTER TABLE items ADD COLUMN alone INTEGER NOT NULL DEFAULT 0;
UPDATE items SET
    owner = (SELECT owner FROM jobs WHERE jobs.key = items.job),
    is_url = json_extract(arrived, '$.source') = 'url',
    size = coalesce((SELECT length(data) FROM uploads WHERE item = items.key), 0)
    WHERE status IN ('pending', 'processing');
CREATE INDEX items_waiting ON items (owner, is_url, key) WHERE status = 'pending';
CREATE INDEX items_unfinished ON items (owner, size) WHERE status IN ('pending', 'processing');
"""

# What each owner stores, with metadata, counted with each document, so that a limit costs one row.
STORED = """
CREATE TABLE stored (owner TEXT PRIMARY KEY, documents INTEGER NOT NULL, bytes INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO stored SELECT owner, count(*), sum(stored_bytes + length(metadata)) FROM documents GROUP BY owner;
CREATE TRIGGER stored_more AFTER INSERT ON documents BEGIN
    INSERT INTO stored VALUES (new.owner, 1, new.stored_bytes + length(new.metadata))
    ON CONFLICT (owner) DO UPDATE SET documents = documents + 1, bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER stored_less AFTER DELETE ON documents BEGIN
    UPDATE stored SET documents = documents - 1, bytes = bytes - old.stored_bytes - length(old.metadata)
    WHERE owner = old.owner;
    DELETE FROM stored WHERE owner = old.owner AND documents = 0;
END;
CREATE TRIGGER stored_otherwise AFTER UPDATE OF stored_bytes, metadata ON documents BEGIN
    UPDATE stored SET bytes = bytes - old.stored_bytes - length(old.metadata) + new.stored_bytes + length(new.metadata)
    WHERE owner = new.owner;
END;
"""

# The passages that were found for the turns that the model has read with a question, and for those that these had read:
# the chunks of each document, as JSON; null for entries of before, for which it may have read any earlier turn.
EARLIER_PASSAGES = """
ALTER TABLE queries ADD COLUMN earlier_passages TEXT;
"""

# Whether the operator has published an endpoint. Others publish only their own collections under their own names.
PUBLISHERS = """
ALTER TABLE endpoints ADD COLUMN by_operator INTEGER NOT NULL DEFAULT 0;
UPDATE endpoints SET by_operator = owner != (SELECT owner FROM collections WHERE key = collection);
"""

# How many users and groups the permissions of a document name, and a digest of the list: equal lists are held once.
NAMES = """
ALTER TABLE documents ADD COLUMN names INTEGER NOT NULL DEFAULT 0;
ALTER TABLE documents ADD COLUMN names_digest BLOB;
UPDATE documents SET names = json_array_length(allowed_users) + json_array_length(allowed_groups);
CREATE INDEX documents_by_names ON documents (owner, names_digest, names) WHERE names > 4;
"""

# The groups of the asker's key, as JSON; null: an operator's key. Entries of before have those of all keys that their
# user had until then: a key that has less may not read them.
KEY_GROUPS = """
ALTER TABLE queries ADD COLUMN key_groups TEXT DEFAULT '[]';
UPDATE queries SET key_groups = known.names FROM (
    SELECT user, iif(max(operator), NULL, json_group_array(DISTINCT value) FILTER (WHERE value IS NOT NULL)) AS names
    FROM keys LEFT JOIN json_each(keys.groups) GROUP BY user
) AS known WHERE queries.user = known.user AND known.names IS NOT '[]';
"""

# The nodes that share the records, and which of them processes an item: "" where the records are in the data folder.
NODES = """
CREATE TABLE nodes (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    version TEXT NOT NULL,
    started_at REAL NOT NULL,
    seen_at REAL NOT NULL,
    seq INTEGER NOT NULL,
    erased_pass INTEGER NOT NULL
) WITHOUT ROWID;
ALTER TABLE items ADD COLUMN node TEXT NOT NULL DEFAULT '';
CREATE INDEX items_processed ON items (key) WHERE status = 'processing';
"""

# A random number for each collection that every change of its documents replaces, whichever version of Anabranch makes
# it: what was found before is known by it. The numbers of changes would be used again in restored records.
VERSIONS = """
CREATE TABLE versions (collection INTEGER PRIMARY KEY, version INTEGER NOT NULL);
INSERT INTO versions SELECT key, random() FROM collections;
CREATE TRIGGER versions_insert AFTER INSERT ON documents BEGIN
    INSERT INTO versions VALUES (new.collection, random())
    ON CONFLICT (collection) DO UPDATE SET version = excluded.version;
END;
CREATE TRIGGER versions_update AFTER UPDATE ON documents BEGIN
    INSERT INTO versions VALUES (new.collection, random())
    ON CONFLICT (collection) DO UPDATE SET version = excluded.version;
END;
CREATE TRIGGER versions_delete AFTER DELETE ON documents BEGIN
    UPDATE versions SET version = random() WHERE collection = old.collection;
END;
"""

MIGRATIONS = (
    FIRST,
    SURFACES,
    QUERY_COUNTS,
    f"{PROCESSING}{MEASURE.strip()};",
    VERDICTS,
    SHARING,
    PAGE_STARTS,
    LATER_PAGES,
    ERASURES,
    KEY_RIGHTS,
    AUDIT,
    DEFAULT_VISIBILITY,
    LANES,
    STORED,
    EARLIER_PASSAGES,
    PUBLISHERS,
    NAMES,
    KEY_GROUPS,
    NODES,
    VERSIONS,
)
