"""The picture of ``kvloop top`` on a terminal, drawn with rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

COLOURS: Final = {
    "reused": "green",
    "partial": "yellow",
    "cold": "blue",
    "decode_only": "magenta",
    "refused": "red",
    "passed": "dim",
}
NOTHING: Final = "-"
_HASH_SHOWN: Final = 12
_MODEL_SHOWN: Final = 24
_ENGINES: Final = 6
_FIXED_LINES: Final = 13
"""The headline, each table's title and header, the empty lines between them."""
_WIDE: Final = 110
_LINES_PRINTED: Final = 60


class Screen:
    """The whole terminal, until left."""

    def __init__(self, interval: float, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False, transient=True)
        self._interval = interval

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, seen: dict[str, Any]) -> None:
        """Draw the picture anew."""
        keys = Text(f" every {self._interval:g} s · q quits", style="dim")
        self._live.update(Group(draw(seen, self._console.width, self._console.height - 1), keys), refresh=True)

    @staticmethod
    def print_once(seen: dict[str, Any]) -> None:
        """Print the picture below what the terminal shows already."""
        console = Console()
        console.print(draw(seen, console.width, _LINES_PRINTED))


def draw(seen: dict[str, Any], width: int, height: int) -> RenderableType:
    """Return the picture for a terminal of that size: the summary, then as many turns and conversations as fit."""
    is_wide = width >= _WIDE
    summary = _side_by_side([_outcomes(seen), _parts(seen), *([_reasons(seen)] if is_wide else [])])
    replicas, engines = _replicas(seen), _engines(seen)
    places = _side_by_side([replicas, engines]) if is_wide else Group(replicas, engines)
    summary_rows = max(3, len(seen["turns_per_second"]), len(seen["reasons_per_second"]) if is_wide else 0)
    if is_wide:
        above = _FIXED_LINES + summary_rows + max(replicas.row_count, engines.row_count)
    else:
        above = _FIXED_LINES + summary_rows + replicas.row_count + engines.row_count + 2
    left = max(2, height - above)
    turns = max(1, min(len(seen["turns"]), max(left // 2, left - len(seen["conversations"]))))
    lists = Group(_turns(seen, turns, is_wide=is_wide), Text(), _conversations(seen, max(1, left - turns)))
    return Group(_headline(seen), Text(), summary, Text(), places, Text(), lists)


def _headline(seen: dict[str, Any]) -> Text:
    up = [replica for replica in seen["replicas"] if replica["up"]]
    share = seen["reused_share"]
    # A shared store's turns are no replica's.
    kept = NOTHING if _is_shared(seen) else f"{sum(replica['kept_turns'] for replica in up):,}"
    line = Text.assemble(
        (" kvloop ", "reverse bold"),
        f" {len(up)}/{len(seen['replicas'])} up · ",
        (f"{sum(seen['turns_per_second'].values()):.1f}", "bold"),
        " turns/s · ",
        (f"{sum(replica['live_requests'] for replica in up):,}", "bold"),
        " live · ",
        (kept, "bold"),
        " kept · ",
        (NOTHING if share is None else f"{share:.0%}", "bold green"),
        " of prompt tokens reused ",
    )
    if any(replica["prompt_ids_differed"] for replica in up):
        line.append("\n REUSE IS OFF: a P prefilled other tokens than it was told; see the runbook", "bold red")
    return line


def _is_shared(seen: dict[str, Any]) -> bool:
    """Whether turns are kept where no replica counts them."""
    return any(replica["up"] and replica["shared_store"] for replica in seen["replicas"])


def _table(title: str, *columns: str) -> Table:
    """Return an empty table; columns that begin with ``>`` are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1), header_style="dim")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table


def _side_by_side(tables: list[Table]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for _ in tables:
        grid.add_column()
    grid.add_row(*tables)
    return grid


def _outcomes(seen: dict[str, Any]) -> Table:
    table = _table("Outcomes", "", ">turns/s", ">share", ">TTFT median", ">95 %")
    total = sum(seen["turns_per_second"].values())
    for outcome, rate in seen["turns_per_second"].items():
        ttft = seen["time_to_first_token"].get(outcome, {})
        table.add_row(
            Text(outcome, style=COLOURS.get(outcome, "")),
            f"{rate:.1f}",
            f"{rate / total:.0%}",
            _seconds(ttft.get("median_seconds")),
            _seconds(ttft.get("p95_seconds")),
        )
    if not total:
        table.add_row(Text("none between the looks", style="dim"))
    return table


def _parts(seen: dict[str, Any]) -> Table:
    table = _table("TTFT by part", "", ">mean")
    parts = seen["time_to_first_token_parts"]
    for part in ("render", "prefill", "decode"):
        table.add_row(part, _seconds(parts.get(part)))
    return table


def _reasons(seen: dict[str, Any]) -> Table:
    table = _table("Not all reused, because", "", ">turns/s")
    for reason, rate in seen["reasons_per_second"].items():
        table.add_row(reason, f"{rate:.1f}")
    return table


def _replicas(seen: dict[str, Any]) -> Table:
    table = _table("Replicas", "", ">turns/s", ">live", ">kept", ">releasing", ">CPU", ">memory")
    for row in seen["replicas"]:
        if not row["up"]:
            table.add_row(Text(row["replica"], style="red"), Text(f"down: {row['error']}", style="red"))
            continue
        kept = NOTHING if row["shared_store"] else row["kept_turns"]
        numbers = (f"{row['turns_per_second']:.1f}", row["live_requests"], kept, row["releases_waiting"])
        memory = f"{row['memory_bytes'] / 2**20:,.0f} MiB"
        table.add_row(row["replica"], *(map(_count, numbers)), f"{row['cpu_cores']:.0%}", memory)
    return table


def _engines(seen: dict[str, Any]) -> Table:
    table = _table("Decode engines", "", ">kept", ">tokens pinned")
    for row in seen["engines"][:_ENGINES]:
        table.add_row(row["address"], _count(row["kept_turns"]), _count(row["retained_tokens"]))
    if len(seen["engines"]) > _ENGINES:
        table.add_row(Text(f"and {len(seen['engines']) - _ENGINES} more", style="dim"))
    if not seen["engines"]:
        nothing = "in the shared store (not counted here)" if _is_shared(seen) else "nothing is kept"
        table.add_row(Text(nothing, style="dim"))
    return table


def _turns(seen: dict[str, Any], rows: int, *, is_wide: bool) -> Table:
    parts = ("render", "prefill", "decode") if is_wide else ()
    timed = (">TTFT", *(f">{part}" for part in parts))
    table = _table("Last turns", "conversation", "outcome", "reason", ">prompt", ">reused", *timed, ">ago")
    for row in seen["turns"][:rows]:
        outcome = row["outcome"]
        times = [row.get(f"{name}_ms") for name in ("ttft", *parts)]
        table.add_row(
            row.get("conversation", NOTHING)[:_HASH_SHOWN],
            Text(outcome, style=COLOURS.get(outcome, "")),
            row.get("reason", ""),
            *(_count(row.get(key)) for key in ("prompt", "reused")),
            *(_seconds(None if time is None else time / 1000) for time in times),
            _age(row["age_seconds"]),
        )
    return table


def _conversations(seen: dict[str, Any], rows: int) -> Table:
    # Without a shared store each replica keeps its own.
    place = ("kept by",) if len(seen["replicas"]) > 1 else ()
    table = _table(
        "Conversations kept, the newest", "conversation", "model", "engine", ">tokens", ">age", ">expires in", *place
    )
    for row in seen["conversations"][:rows]:
        table.add_row(
            row["conversation"][:_HASH_SHOWN],
            row["model"][-_MODEL_SHOWN:],
            row["engine"],
            _count(row["tokens"]),
            _age(row["age_seconds"]),
            _age(row["expires_in_seconds"]),
            *([row["replica"]] if place else []),
        )
    return table


def _count(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
