"""The commands `lockstep vault …`: what a person does to a simulated vault.

Words and tables only: every command is one call of the simulator's controls (services/vault.py).
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from lockstep.kernel.errors import InvalidInput, Transient
from lockstep.kernel.settings import load_settings
from lockstep.vaultsim.model import ArchiveFault, ChangeKind, Knobs, Poison, Twist

vault = typer.Typer(name="vault", help="Control the vault simulator.", no_args_is_help=True)
console = Console(width=None if sys.stdout.isatty() else 160)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Url = Annotated[str | None, typer.Option("--url", help="Address of the simulator. Default: the embedded one.")]
VaultId = Annotated[str, typer.Option("--vault", help="The vault's id.")]
Stop = Annotated[str, typer.Option("--stop", help="Stop time of the window: YYYYMMDDHHMM or 2026-01-01T00:15Z.")]

_PATIENCE_SECONDS = 600.0  # publishing thousands of windows packs each of them once


@vault.command()
def add(  # noqa: PLR0913, PLR0917  # the options of a command
    vault_id: Annotated[str, typer.Option("--id", help="Id of the new vault.")],
    seed: Annotated[int, typer.Option(help="All data follows from it.")] = 1,
    rows: Annotated[int, typer.Option(help="Changed rows per object and window.")] = 20,
    base_rows: Annotated[int, typer.Option(help="Rows per object before the first window.")] = 20,
    origin: Annotated[str, typer.Option(help="Where the first window starts.")] = "2026-01-01T00:00:00Z",
    objects: Annotated[str, typer.Option(help="Comma-separated objects; others than the usual become custom.")] = "",
    empty_every: Annotated[int, typer.Option(help="Every n-th window has no records; 0: none.")] = 0,
    delete_percent: Annotated[int, typer.Option(help="Share of the rows that die young.")] = 8,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Create a simulated vault. The same command again changes nothing."""
    fields = {
        "id": vault_id,
        "seed": seed,
        "rows": rows,
        "base_rows": base_rows,
        "origin": origin,
        "objects": [name.strip() for name in objects.split(",") if name.strip()],
        "empty_every": empty_every,
        "delete_percent": delete_percent,
    }
    _show(_call("POST", "", fields, url), as_json)


@vault.command("list")
def list_vaults(url: Url = None, as_json: Json = False) -> None:
    """Show all simulated vaults."""
    found = _call("GET", "", None, url)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    if not found:
        console.print("No vault is simulated yet. Add one with `lockstep vault add --id 1000020`.")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("vault", "windows", "first stop", "last stop", "withheld", "poisoned", "faulty", "address"):
        table.add_column(title, overflow="fold")
    for one in found:
        table.add_row(
            one["id"],
            str(one["published"]),
            one["first_stop"] or "",
            one["last_stop"] or "",
            str(len(one["withheld"])),
            str(len(one["poisoned"])),
            str(len(one["faults"])),
            one["url"],
        )
    console.print(table)


@vault.command()
def show(vault_id: VaultId, url: Url = None, as_json: Json = False) -> None:
    """Show one vault: how far it has published and what was done to it."""
    _show(_call("GET", f"/{vault_id}", None, url), as_json)


@vault.command()
def remove(vault_id: VaultId, url: Url = None) -> None:
    """Forget a simulated vault."""
    _call("DELETE", f"/{vault_id}", None, url)
    console.print(f"vault {vault_id} is gone.")


@vault.command()
def publish(
    vault_id: VaultId,
    windows: Annotated[int, typer.Option("--windows", min=1, help="How many further windows.")] = 1,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Let time pass: publish the next windows."""
    _act(vault_id, "publish", {"windows": windows}, url, as_json)


@vault.command()
def withhold(vault_id: VaultId, stop: Stop, message: str = "", url: Url = None, as_json: Json = False) -> None:
    """List a window as an error, as the vendor does when it fails to publish, until `release`."""
    _act(vault_id, "withhold", {"stop": stop, "message": message}, url, as_json)


@vault.command()
def release(vault_id: VaultId, stop: Stop, url: Url = None, as_json: Json = False) -> None:
    """Publish a withheld window under its old name."""
    _act(vault_id, "release", {"stop": stop}, url, as_json)


@vault.command()
def poison(
    vault_id: VaultId,
    stop: Stop,
    kind: Annotated[Poison, typer.Option(help="What is wrong.")] = Poison.NUMBER,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Put a value into a window that no warehouse can take. The archive itself stays sound."""
    _act(vault_id, "poison", {"stop": stop, "kind": kind.value}, url, as_json)


@vault.command()
def heal(vault_id: VaultId, stop: Stop, url: Url = None, as_json: Json = False) -> None:
    """Take poison and archive faults out of a window: the vendor publishes it anew."""
    _act(vault_id, "heal", {"stop": stop}, url, as_json)


@vault.command()
def evolve(
    vault_id: VaultId,
    object_name: Annotated[str, typer.Option("--object", help="The object that changes, or the new one.")],
    kind: Annotated[ChangeKind, typer.Option(help="What changes.")] = ChangeKind.COLUMN,
    column: Annotated[str, typer.Option(help="The column that comes, grows or goes.")] = "",
    column_type: Annotated[str, typer.Option("--type", help="The vendor's type of a new column.")] = "String",
    length: Annotated[int, typer.Option(help="Length of a new or widened column.")] = 100,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Change the schema, from the next window to be published on."""
    data = {"kind": kind.value, "object": object_name, "column": column, "type": column_type, "length": length}
    _act(vault_id, "evolve", data, url, as_json)


@vault.command()
def full(
    vault_id: VaultId,
    stop: Annotated[str | None, typer.Option("--stop", help="As of when. Default: the last published window.")] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Publish a full archive."""
    _act(vault_id, "full", {"stop": stop} if stop else {}, url, as_json)


@vault.command()
def log(vault_id: VaultId, url: Url = None, as_json: Json = False) -> None:
    """Publish the audit log of the day that ends with the last published window."""
    _act(vault_id, "log", {}, url, as_json)


@vault.command()
def lose(vault_id: VaultId, stop: Stop, url: Url = None, as_json: Json = False) -> None:
    """Leave a window out of every listing, without a word."""
    _act(vault_id, "lose", {"stop": stop}, url, as_json)


@vault.command()
def twist(
    vault_id: VaultId,
    stop: Stop,
    kind: Annotated[Twist, typer.Option(help="What is awkward.")],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Make a window's content awkward but legal: an id in both files, or twice in one."""
    _act(vault_id, "twist", {"stop": stop, "kind": kind.value}, url, as_json)


@vault.command()
def faults(
    vault_id: VaultId,
    settings: Annotated[
        list[str] | None, typer.Argument(help="Knobs as name=value, for example part_size=1000 shuffle=true.")
    ] = None,
    stop: Annotated[str | None, typer.Option("--stop", help="Damage the archive of this window instead.")] = None,
    kind: Annotated[ArchiveFault | None, typer.Option(help="How the archive is damaged.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Turn every knob back.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Set the knobs of a vault's service, or damage one archive. Without arguments: show the knobs."""
    if (stop is None) != (kind is None):
        raise InvalidInput("--stop and --kind belong together.")
    if stop is not None and kind is not None:
        _act(vault_id, "fault", {"stop": stop, "kind": kind.value}, url, as_json)
        return
    changes = (Knobs().model_dump() if reset else {}) | _parse_knobs(settings or [])
    path, method = (f"/{vault_id}/knobs", "POST") if changes else (f"/{vault_id}", "GET")
    state = _call(method, path, changes or None, url)
    if as_json:
        print(json.dumps(state["knobs"], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("knob", "value", "meaning"):
        table.add_column(title)
    for name, field in Knobs.model_fields.items():
        table.add_row(name, str(state["knobs"][name]), field.description or "")
    console.print(table)


def _parse_knobs(settings: list[str]) -> dict[str, Any]:
    pairs = [one.partition("=") for one in settings]
    problems = [f"{name}: unknown knob" for name, _, _ in pairs if name not in Knobs.model_fields]
    problems += [f"{name}: write {name}=value" for name, sign, _ in pairs if not sign]
    if problems:
        raise InvalidInput("these knobs cannot be set.", problems=problems)
    return {name: value for name, _, value in pairs}


def _act(vault_id: str, action: str, data: dict[str, Any], url: str | None, as_json: bool) -> None:
    _show(_call("POST", f"/{vault_id}/{action}", data, url), as_json)


def _show(state: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(state, indent=2))
        return
    lines = {
        "vault": state["id"],
        "address": state["url"],
        "windows": f"{state['published']}"
        + (f", {state['first_stop']} to {state['last_stop']}" * bool(state["published"])),
        "withheld": ", ".join(state["withheld_stops"]),
        "poisoned": ", ".join(state["poisoned_stops"]),
        "faulty": ", ".join(f"{stop} {kind}" for stop, kind in state["faulty_stops"].items()),
        "schema changes": str(len(state["changes"]) or ""),
    }
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in lines.items():
        if value:
            table.add_row(f"[dim]{name}[/]", value)
    console.print(table)


def _call(method: str, path: str, data: dict[str, Any] | None, url: str | None) -> Any:
    address = (url or _embedded()).rstrip("/") + "/_control/vaults" + path
    try:
        answer = httpx.request(method, address, json=data, timeout=_PATIENCE_SECONDS)
    except httpx.TransportError as error:
        raise Transient(
            f"the vault simulator does not answer: {error}", next_step="start it with `lockstep up --only vault`."
        ) from None
    if answer.is_success:
        return answer.json() if answer.content else None
    problem = answer.json()
    raise InvalidInput(
        problem.get("detail") or problem.get("title", "refused"),
        problems=[one["detail"] for one in problem.get("errors") or ()],
    )


def _embedded() -> str:
    from stack.home import Home  # keeps `import lockstep` free of the stack

    settings = load_settings()
    port = settings.vault_port or Home(settings.home).ports().get("vault")
    if port is None:
        raise InvalidInput("no vault simulator has run here.", next_step="start it with `lockstep up --only vault`.")
    return f"http://127.0.0.1:{port}"
