"""`anabranch.testing.mcp` as a process that starts often: by its file, without all that its package brings along, and
without the garbage collector, which takes much of the time in which MCP's SDK loads."""

import atexit
import gc
import runpy
from pathlib import Path

if __name__ == "__main__":
    gc.disable()
    atexit.register(gc.freeze)
    runpy.run_path(str(Path(__file__).parents[2] / "src" / "anabranch" / "testing" / "mcp.py"), run_name="__main__")
