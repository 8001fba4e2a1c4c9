"""`anabranch mcp`: run as an MCP server over stdio, print a client's configuration, and list the MCP servers."""

import asyncio
import gc
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

import click
import msgspec
from rich.table import Table
from rich.text import Text

from anabranch.app.anabranch import Anabranch
from anabranch.configuration.config_file import DEFAULT_FILE
from anabranch.configuration.extras import require
from anabranch.configuration.settings import PREFIX, Settings, load, variables_in_use
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.mcp import ServerHealth
from anabranch.entrypoints.cli.options import config_option, configured, json_option
from anabranch.entrypoints.cli.terminal import flat, notes, output, print_json, progress

STYLES = {"ready": "green", "failed": "red", "disabled": "dim"}
POLL_S = 0.1
INDENT = 2
NO_SERVER = (
    "No MCP server is configured. Name some in anabranch.yaml, as in other MCP clients:\n\n"
    "mcpServers:\n  memory:\n    command: npx\n    args: [-y, '@modelcontextprotocol/server-memory']"
)


@click.group("mcp", invoke_without_command=True)
@click.option("--print-config", is_flag=True, help="Print the entry for a client's configuration, and exit.")
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar=PREFIX + "CONFIG",
    help="The configuration file [default: anabranch.yaml].",
)
@click.pass_context
def group(context: click.Context, print_config: bool, config: Path | None) -> None:
    """Run as an MCP server over stdio; list the configured MCP servers.

    A client starts it and calls the tools aggregate, search and ask.
    """
    context.obj = config
    if context.invoked_subcommand is not None:
        return
    settings = configured(config)
    if print_config:
        _print_config(settings, config)
        return
    require("mcp", "anabranch mcp")
    if sys.stdin.isatty():
        notes().print(
            "This is an MCP server on standard input and output; a client starts it. For the client's configuration: "
            "anabranch mcp --print-config. Ctrl-C ends it."
        )
    asyncio.run(_serve(settings, config))


@group.command()
@json_option
@config_option
@click.pass_obj
def servers(given: Path | None, as_json: bool, config: Path | None) -> None:
    """Connect to each configured MCP server and show its state and its tool.

    The exit status is 1 if an enabled server cannot be used.
    """
    found = asyncio.run(_health(configured(config or given)))
    if as_json:
        print_json(found)
    elif found:
        _show(found)
    else:
        notes().print(NO_SERVER)
    sys.exit(1 if any(one.state not in ("ready", "disabled") for one in found) else 0)


async def _serve(settings: Settings, config: Path | None) -> None:
    # MCP's SDK loads only where it runs. It makes no garbage then, and to look for some takes time.
    gc.disable()
    from anabranch.app.config_reload import ConfigReload  # noqa: PLC0415
    from anabranch.app.startup import watched  # noqa: PLC0415
    from anabranch.entrypoints.mcp.stdio import StdioServer  # noqa: PLC0415
    from anabranch.entrypoints.reload_signal import on_hangup  # noqa: PLC0415
    from anabranch.telemetry.log import configured_log  # noqa: PLC0415
    from anabranch.telemetry.metrics import Metrics  # noqa: PLC0415

    gc.freeze()
    gc.enable()

    log = configured_log(settings)
    serving = asyncio.current_task()
    assert serving is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with suppress(asyncio.CancelledError):
        async with (
            watched(settings, log, Metrics(settings)) as telemetry,
            Anabranch.open(settings=settings, telemetry=telemetry, log_queries=True) as anabranch,
        ):
            await anabranch.warm()
            server = StdioServer(anabranch, log)
            async with on_hangup(
                ConfigReload(settings, server.reconfigure, log, lambda: load(file=config), anabranch.record).again
            ):
                await server.serve()
    log.flush()


async def _health(settings: Settings) -> tuple[ServerHealth, ...]:
    """The health of each server once it is ready or has failed. Retries of failed servers are not awaited."""
    failed: dict[str, ServerHealth] = {}
    async with Anabranch.open(settings=settings) as anabranch:
        await anabranch.warm()
        settled = asyncio.ensure_future(anabranch.servers_settled())
        with progress("Connecting", unit="servers") as advance:
            while not settled.done():
                await asyncio.wait([settled], timeout=POLL_S)
                found = [one for one in anabranch.servers() if one.state != "disabled"]
                failed |= {one.name: one for one in found if one.state == "failed"}
                advance(sum(one.state == "ready" or one.name in failed for one in found), len(found))
        await settled
        return tuple(_settled(one, failed.get(one.name)) for one in anabranch.servers())


def _settled(one: ServerHealth, failed: ServerHealth | None) -> ServerHealth:
    """A server that is being retried counts as failed, with its last error."""
    if one.state in ("ready", "disabled"):
        return one
    if failed is not None:
        return failed
    return msgspec.structs.replace(one, state="failed") if one.error else one


def _show(found: tuple[ServerHealth, ...]) -> None:
    console = output()
    console.print(_table(found))
    details = [(one, why) for one in found if (why := one.chosen if one.state == "ready" else one.error)]
    if details:
        console.print()
    for one, why in details:
        line = Text.assemble((one.name, "bold"), ": ", (flat(why), STYLES.get(one.state, "")))
        lines = line.wrap(console, max(20, console.width - INDENT))
        for part in lines:
            part.rstrip()
        console.print(Text("\n" + " " * INDENT).join(lines))


def _table(found: tuple[ServerHealth, ...]) -> Table:
    """Names are never truncated, because users copy them; they wrap instead."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("server", "state", "over", "protocol", "tool"):
        table.add_column(name, no_wrap=name not in ("server", "tool"), overflow="fold")
    for one in found:
        state = Text(one.state, style=STYLES.get(one.state, "yellow"))
        tool = flat(f"{one.tool}({one.query_argument or ''})") if one.tool else ""
        latency = "" if one.latency_ms is None else f", {one.latency_ms} ms"
        table.add_row(one.name, state, one.transport, Text(flat(one.protocol or "")), Text(tool + latency))
    return table


def _print_config(settings: Settings, config: Path | None) -> None:
    """Print the configuration entry on standard output, and hints on standard error."""
    file = config or (DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
    arguments = ["mcp", *(["--config", str(file.resolve())] if file else [])]
    command, *before = _program()
    # A client starts it in another folder, without the environment of this shell.
    environment = {
        PREFIX + name.upper(): str(Path(getattr(settings, name)).expanduser().resolve())
        for name in ("data_dir", "models_dir")
        if getattr(settings, name) != getattr(Settings(), name)
    }
    entry = {"command": command, "args": [*before, *arguments], **({"env": environment} if environment else {})}
    print_json({"mcpServers": {"anabranch": entry}})
    if missing := [name for name in variables_in_use(file=file) if name not in environment]:
        notes().print(
            "\nA client starts it without the variables of this shell. Add these with their values to the entry, "
            f'under "env": {", ".join(missing)}.'
        )
    notes().print(
        f"\nPaste this into the client's configuration. Or let it use a running server (anabranch serve) by its URL, "
        f"http://127.0.0.1:{settings.port}/mcp:\n"
        f'{{"mcpServers": {{"anabranch": {{"type": "http", "url": "http://127.0.0.1:{settings.port}/mcp"}}}}}}\n'
        f'From another machine it needs a key (anabranch keys create): "headers": {{"Authorization": "Bearer KEY"}}.'
    )


def _program() -> list[str]:
    """The command that starts this program, with absolute paths."""
    started = Path(sys.argv[0])
    if started.name == "anabranch" and started.is_file():
        return [str(started.absolute())]
    if found := shutil.which("anabranch", path=str(Path(sys.executable).parent)):
        return [str(Path(found).absolute())]
    if not sys.executable:
        raise ConfigurationError(
            "The path of this program is unknown; put it into the client's configuration yourself."
        )
    return [sys.executable, "-m", "anabranch"]
