"""What must be so once the load has paused after a fault: nothing runs, nothing leaks, the counters agree."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fault_load import CLIENTS
from fault_site import FaultSite, Part

QUIET_SECONDS = 30.0
"""What was under way ends by then: releases are tried twice, a second apart, with ten seconds' patience each."""

NEVER = ("wrong_kv_turns", "poisoned_blocks_cached", "handles_used_twice", "handles_used_late", "blocks_leaked")
"""Counters of the workers that stay 0 whatever happens."""

MOST_IDLE_CONNECTIONS = 4 * CLIENTS
"""Connections kept for the next request, by ext_proc to Envoy and by Envoy to ext_proc and the workers."""


@dataclass
class Baseline:
    """How a process looked when it was new and quiet, by its id: a restarted part gets another one."""

    tasks: dict[int, float] = field(default_factory=dict)
    descriptors: dict[int, int] = field(default_factory=dict)


@dataclass
class Tally:
    """What the workers counted in all their lives, dead ones included as far as they were asked before."""

    never: Counter[str] = field(default_factory=Counter)

    def add(self, worker: Part, report: dict[str, Any], last: dict[str, dict[str, Any]]) -> None:
        """Take a worker's report; ``last`` has the one before, by name, from the same or an earlier life."""
        before = last.get(worker.name, {})
        same_life = before.get("engine_id") == report["engine_id"]
        for key in NEVER:
            self.never[key] += report[key] - (before.get(key, 0) if same_life else 0)
        last[worker.name] = report


class Checks:
    """Looks at a site. ``leaks`` and ``wrongs`` are what was found since they were last taken."""

    def __init__(self, site: FaultSite) -> None:
        self.site = site
        self._baseline = Baseline()
        self._tally = Tally()
        self._last_reports: dict[str, dict[str, Any]] = {}
        self._streams: dict[str, float] | None = None

    def note_workers(self) -> None:
        """Read the workers' counters while they can still tell."""
        for worker in self.site.workers:
            if worker.component.alive():
                self._tally.add(worker, self.site.report(worker), self._last_reports)

    def wrongs(self) -> dict[str, int]:
        """Return which of the counters that stay 0 did not, ever."""
        self.note_workers()
        return {key: count for key, count in self._tally.never.items() if count}

    def leaks(self, *, counts_streams: bool) -> list[str]:
        """Wait until all is quiet; say what is not, after a while, and what was left behind."""
        found: list[str] = []
        for what, fact in self._facts():
            try:
                self.site.until(fact, what, QUIET_SECONDS)
            except AssertionError as error:
                found.append(f"{error}; {self._state(what)}")
        found += self._left_sockets()
        found += self._disagreements(counts_streams=counts_streams)
        return found

    def pins(self) -> list[str]:
        """Say what the workers still hold: to be asked when every handle's and lease's time is over."""
        return [
            f"{worker.name} still has {key}={value}"
            for worker in self.site.workers
            for key, value in self.site.report(worker).items()
            if key in ("live_pins", "live_leases") and value
        ]

    def free_blocks(self) -> list[str]:
        """Say which worker has not got all its blocks back."""
        reports = {worker.name: self.site.report(worker) for worker in self.site.workers}
        return [
            f"{name} has {report['free_blocks']} of {report['block_count']} blocks free"
            for name, report in reports.items()
            if report["free_blocks"] != report["block_count"]
        ]

    # --- inside -----------------------------------------------------------------------------------------------------

    def _facts(self) -> list[tuple[str, Any]]:
        site = self.site
        facts: list[tuple[str, Any]] = [
            (f"{worker.name} runs nothing", lambda worker=worker: not self._running(worker)) for worker in site.workers
        ]
        for replica in site.extproc:
            facts += [
                (f"{replica.name} has no live requests", lambda part=replica: self._live(part) == 0),
                (f"{replica.name} has no tasks left over", lambda part=replica: self._tasks_are_back(part)),
                (f"{replica.name} has no descriptors left over", lambda part=replica: self._descriptors_are_back(part)),
            ]
        facts += [
            (f"{part.name} closes idle connections", lambda part=part: self._connections(part) <= MOST_IDLE_CONNECTIONS)
            for part in (*site.extproc, site.envoy)
        ]
        facts.append(("Envoy has no active requests", lambda: not any(self._active().values())))
        facts.append(("Envoy has no descriptors left over", lambda: self._descriptors_are_back(site.envoy)))
        return facts

    def _connections(self, part: Part) -> int:
        return sum(state == "ESTABLISHED" for state, _, _ in part.sockets())

    def _running(self, worker: Part) -> int:
        report = self.site.report(worker)
        return int(report["running"]) + int(report["waiting"])

    def _live(self, replica: Part) -> float:
        metrics = self.site.metrics(replica)
        return metrics["kvloop_live_requests"] + metrics["kvloop_releases_waiting"]

    def _tasks_are_back(self, replica: Part) -> bool:
        tasks = self.site.metrics(replica)["kvloop_event_loop_tasks"]
        return tasks <= self._baseline.tasks.setdefault(replica.pid, tasks)

    def _descriptors_are_back(self, part: Part) -> bool:
        count = part.other_descriptors()
        return count <= self._baseline.descriptors.setdefault(part.pid, count)

    def _active(self) -> dict[str, int]:
        stats = self.site.envoy_stats("(http.main|cluster.decode|cluster.prefill|cluster.kvloop_extproc)")
        return {
            name: value
            for name, value in stats.items()
            if name.endswith(("downstream_rq_active", "upstream_rq_active", "upstream_rq_pending_active")) and value
        }

    def _state(self, what: str) -> str:
        """Return what there is to see of a fact that is not so."""
        if "Envoy" in what:
            return str(self._active())
        for worker in self.site.workers:
            if worker.name in what:
                return str(self.site.report(worker))
        for replica in self.site.extproc:
            if replica.name in what:
                metrics = self.site.metrics(replica)
                shown = ("kvloop_live_requests", "kvloop_releases_waiting", "kvloop_event_loop_tasks")
                return str({name: metrics[name] for name in shown} | {"sockets": replica.sockets()})
        return ""

    def _left_sockets(self) -> list[str]:
        found = []
        for part in (*self.site.extproc, self.site.envoy):
            states = Counter(state for state, _, _ in part.sockets())
            if states["CLOSE_WAIT"]:
                found.append(f"{part.name} has not closed {states['CLOSE_WAIT']} connections whose peer has")
        return found

    def _disagreements(self, *, counts_streams: bool) -> list[str]:
        """Compare sums that must be equal: D's handles, and Envoy's streams with ext_proc's turns."""
        found = []
        for worker in self.site.decode:
            report = self.site.report(worker)
            ended = sum(report[key] for key in ("handles_read", "handles_released", "handles_expired", "live_pins"))
            if report["handles_given"] != ended:
                found.append(f"{worker.name} gave {report['handles_given']} handles and knows of {ended}")
        stats = self.site.envoy_stats("(http.main.ext_proc.kvloop|cluster.kvloop_extproc)")
        now = {
            "streams": stats["http.main.ext_proc.kvloop.streams_started"],
            "retries": stats["cluster.kvloop_extproc.upstream_rq_retry"],
            "turns": sum(self.site.metrics(replica)["kvloop_turns_total"] for replica in self.site.extproc),
        }
        before, self._streams = self._streams, now
        if counts_streams and before is not None:
            grown = {key: now[key] - before[key] for key in now}
            if grown["turns"] != grown["streams"] + grown["retries"]:
                found.append(f"Envoy's streams and ext_proc's turns do not agree: {grown}")
        return found
