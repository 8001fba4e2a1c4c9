"""`anabranch cluster`: the nodes that share the records; forgets one that is gone for good."""

import click

from anabranch.app.cluster import ClusterNode, ClusterState, remove_node, state_of
from anabranch.app.records import folder_of
from anabranch.configuration.settings import Settings
from anabranch.entrypoints.cli.options import ListsByDefault, json_option, settings_option
from anabranch.entrypoints.cli.resources import is_indexed, records, require_records, write
from anabranch.entrypoints.cli.terminal import (
    counted,
    fitting,
    flat,
    notes,
    print_fields,
    print_json,
    print_list,
    print_result,
)
from anabranch.knowledge.records import nodes

DATABASES = {"sqlite": "SQLite", "postgres": "PostgreSQL"}


@click.group("cluster", cls=ListsByDefault)
def group() -> None:
    """List the nodes that share the records, and forget one that is gone for good."""


@group.command("list")
@json_option
@settings_option
def list_nodes(as_json: bool, settings: Settings) -> None:
    """List the nodes: which are alive, which one leads, and how far behind each index is.

    Nodes share the records in PostgreSQL (AGGREGATOR_DATABASE_URL). Without it, there is one node, on this machine.
    """
    require_records(settings)
    with records(settings) as database:
        found = database.reading(nodes.cluster)
    state = state_of(settings, found, None, is_running=is_indexed(folder_of(settings)))
    if as_json:
        print_json(state)
        return
    print_fields(state, _fields(state), as_json=False)
    print_list(
        state.nodes,
        fitting(
            ("node", "state", "index", "id"),
            node=lambda one: f"{one.name} (this one)" if one.is_this else one.name,
            state=_state,
            index=_index,
            erased=lambda one: f"{one.erased_pass} of {state.last_pass}",
            version=lambda one: one.version,
            started=lambda one: "" if one.started_at is None else one.started_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            id=lambda one: one.id,
        ),
        empty="No node has run with these records yet. Start one with: anabranch serve",
        as_json=False,
    )


@group.command()
@click.argument("node", metavar="NODE")
@json_option
@settings_option
def remove(node: str, as_json: bool, settings: Settings) -> None:
    """Forget a node that will not come back. NODE is its id, or its name, if only one has it.

    Erasures wait until every node has dropped from its index what was erased, so a node that is gone for good must be
    removed. What its data folder still holds is then no longer waited for: delete that folder. A node that is alive
    cannot be removed; one that starts again is a node again, and drops what was erased.

    Example: anabranch cluster remove db-2
    """
    require_records(settings)
    removed = write(settings, lambda db: remove_node(db, node))
    print_result(removed, f"Removed {flat(removed.name)} ({removed.id}).", as_json=as_json)
    if as_json:
        return
    if removed.erasures:
        waited = "1 erasure no longer waits" if removed.erasures == 1 else f"{removed.erasures} erasures no longer wait"
        held = "what it erases" if removed.erasures == 1 else "what they erase"
        notes().print(f"{waited} for it. The index in its data folder may still hold {held}: delete that folder.")
    else:
        notes().print(
            "No erasure has waited for it. Its data folder still has an index; delete it if it is not needed."
        )


def _fields(state: ClusterState) -> list[tuple[str, str]]:
    return [
        ("records", f"{DATABASES[state.records.kind]} {state.records.server_version}"),
        ("changes", f"{state.head:,}"),
        ("waiting", counted(state.waiting_documents or 0, "document")),
    ]


def _state(one: ClusterNode) -> str:
    if one.is_alive:
        return "leads" if one.leads else "alive"
    return "stopped" if one.age_s is None else f"not heard of for {_duration(one.age_s)}"


def _duration(seconds: float) -> str:
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            return counted(int(seconds // length), unit)
    return counted(int(seconds), "second")


def _index(one: ClusterNode) -> str:
    return f"{counted(one.behind, 'change')} behind" if one.behind else "up to date"
