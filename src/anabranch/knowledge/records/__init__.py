"""The records are the truth, in SQLite. Each module owns some tables; `database` owns connections and threads."""
