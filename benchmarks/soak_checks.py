"""What a soak promises, and whether it was kept: outcomes, latencies, and what the gateway holds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from processes import memory, open_files, shared_files, threads
from soak_clients import Clients, Record

LATENCY = 3.0  # times the median
HEALTH = 0.1  # seconds
GROWTH = 1.25  # of resident memory between the warm-up and the end
SPARE_FILES, SPARE_THREADS = 8, 4
OUTCOMES = {"damaged": {"400"}, "missing": {"400"}, "crowd": {"200", "429"}}  # without the engine's doing; else 200


@dataclass
class Verdict:
    """What was promised and not kept."""

    broken: list[str] = field(default_factory=list)

    def need(self, kept: object, words: str) -> None:
        """Note ``words`` unless ``kept``."""
        if not kept:
            self.broken.append(words)


@dataclass
class Held:
    """What the gateway holds at a moment."""

    memory: int
    files: int
    threads: int
    shared: int
    in_flight: int

    @classmethod
    async def now(cls, pid: int, clients: Clients) -> Held:
        """What its processes and its metrics say."""
        in_flight = int(await clients.metric("pixelgate_requests_in_flight"))
        return cls(memory(pid, "VmRSS"), open_files(pid), threads(pid), shared_files(pid), in_flight)

    def show(self, when: str) -> None:
        """Print it."""
        held = f"{self.files:3} descriptors, {self.threads:3} threads, {self.shared} in shared memory"
        print(f"{when:14} {self.memory >> 20:5} MiB, {held}, {self.in_flight} in flight", flush=True)

    def after(self, warm: Held, verdict: Verdict) -> None:
        """Compare with what was held before the load."""
        grown = f"memory grew from {warm.memory >> 20} to {self.memory >> 20} MiB"
        verdict.need(self.memory <= warm.memory * GROWTH, grown)
        verdict.need(self.files <= warm.files + SPARE_FILES, f"{warm.files} descriptors became {self.files}")
        verdict.need(self.threads <= warm.threads + SPARE_THREADS, f"{warm.threads} threads became {self.threads}")
        verdict.need(self.shared == 0, f"{self.shared} files are left in shared memory")
        verdict.need(self.in_flight == 0, f"{self.in_flight} requests are still in flight")


def judge(records: list[Record], caused: Callable[[Record], bool], verdict: Verdict) -> None:
    """Print a line for each kind of request, and hold the outcomes against what was promised.

    ``caused`` says of which requests the outcome is the engine's doing; they count for nothing.
    """
    print(f"{'requests':20} {'count':>6} {'p50 ms':>8} {'p99 ms':>8}  outcomes; those while the engine was gone")
    times: dict[str, tuple[float, float]] = {}
    for kind in dict.fromkeys(record.kind for record in records):
        own = [record for record in records if record.kind == kind]
        told = [record for record in own if not caused(record)]
        outcomes = Counter(record.outcome for record in told)
        meanwhile = Counter(record.outcome for record in own) - outcomes
        median, high = times[kind] = _quantiles(told)
        print(f"{kind:20} {len(own):6} {1e3 * median:8.1f} {1e3 * high:8.1f}  {dict(outcomes)}; {dict(meanwhile)}")
        wanted = OUTCOMES.get(kind, {"left"} if kind.startswith("left") else {"200"})
        wrong = {outcome: count for outcome, count in outcomes.items() if outcome not in wanted}
        verdict.need(not wrong, f"{kind}: {wrong}")
    _judge_latency(times, verdict)


def _judge_latency(times: dict[str, tuple[float, float]], verdict: Verdict) -> None:
    """Only on a machine that could keep the promises: alone, the probe has to do so with half the time to spare."""
    ratio, alone, health = (_ratio(times["probe"]), _ratio(times["probe, alone"]), times["health"][1])
    print(f"p99 of the probe is {ratio:.1f} times its median, without other load {alone:.1f} times")
    if alone > LATENCY / 2 or times["health, alone"][1] > HEALTH / 2:
        print("latencies are not judged: others keep this machine busy")
        return
    verdict.need(ratio <= LATENCY, f"p99 of the probe is {ratio:.1f} times its median")
    verdict.need(health <= HEALTH, f"p99 of /health is {1e3 * health:.0f} ms")


def _ratio(times: tuple[float, float]) -> float:
    median, high = times
    return high / median if median else 1.0


def _quantiles(records: list[Record]) -> tuple[float, float]:
    """Median and p99, in seconds."""
    seconds = sorted(record.end - record.start for record in records) or [0.0]
    return statistics.median(seconds), seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
