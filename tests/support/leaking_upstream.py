"""An MCP server over stdio that quotes its key: `leaking_upstream.py error|found`."""

import json
import os
import sys

TOOL = {"name": "lookup", "inputSchema": {"type": "object", "properties": {"query": {"type": "string"}}}}
INFO = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "shouts", "version": "1"},
}


def main(mode: str, key: str) -> None:
    sys.stderr.write(f"starting with {key}\n")
    said = {"type": "text", "text": f"No entry for {key}"}
    results = {
        "initialize": INFO,
        "tools/list": {"tools": [TOOL]},
        "tools/call": {"content": [said], "isError": mode == "error"},
    }
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        found = results.get(asked["method"])
        outcome = {"result": found} if found else {"error": {"code": -32601, "message": f"No method for {key}"}}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **outcome}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], os.environ["API_KEY"])
