"""A small MCP server over stdio: `mcp_stub_server.py NAME SECONDS`."""

import json
import sys
import time

RESULTS = [
    {"title": "Anabranch", "text": "An anabranch leaves the river and joins it again.", "url": "https://example.com/a"},
    {"title": "Delta", "text": "A delta is where a river meets the sea.", "date": "2024-05-01"},
]
TOOL = {
    "name": "lookup",
    "description": "Search.",
    "inputSchema": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    "annotations": {"readOnlyHint": True},
}


def reply(method: str, name: str, seconds: float) -> dict[str, object]:
    if method == "initialize":
        info = {"name": name, "version": "1"}
        return {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [TOOL]}
    time.sleep(seconds)
    if name == "failing":
        return {"content": [{"type": "text", "text": "The index is being rebuilt."}], "isError": True}
    found = [] if name.startswith("empty") else RESULTS
    return {"content": [{"type": "text", "text": json.dumps(found)}]}


def main(name: str, seconds: float) -> None:
    for line in sys.stdin:
        said = json.loads(line)
        if "id" not in said:
            continue
        message: dict[str, object] = {"jsonrpc": "2.0", "id": said["id"]}
        if said["method"] in ("initialize", "tools/list", "tools/call"):
            message["result"] = reply(said["method"], name, seconds)
        else:
            message["error"] = {"code": -32601, "message": "Method not found"}
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
