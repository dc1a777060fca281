"""Vector clocks: who has seen what of whom. Whoever runs in an order of its own is an agent."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


class Agent:
    """A stream or a thread of the host, and what it has seen of the others.

    Attributes:
        name: unique.
        seen: by name the newest epoch of an agent that is over, its own included.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[str, int] = {name: 0}

    def tick(self) -> None:
        """Begin the next chunk of its own work."""
        self.seen[self.name] += 1

    def join(self, seen: Mapping[str, int]) -> None:
        """Go on after all that ``seen`` holds."""
        for name, epoch in seen.items():
            if self.seen.get(name, 0) < epoch:
                self.seen[name] = epoch

    def has_seen(self, name: str, epoch: int) -> bool:
        """Whether what ``name`` did in that epoch was over before what this agent does now."""
        return self.seen.get(name, 0) >= epoch


@dataclass(frozen=True)
class Access:
    """One access to a memory.

    Attributes:
        epoch: of the agent that made it.
        site: lines of the library that led to it.
    """

    epoch: int
    site: str


@dataclass(eq=False)
class MemoryLog:
    """Who wrote to a memory last, and who has read it since.

    Attributes:
        writer: name of the agent of the newest write; empty for none.
        home: agent of the stream that allocated it; None on the host.
        made_at: lines of the library that allocated it.
        owner: the simulation that it was used in.
        used_by: names of the streams that the allocator was told of, by ``record_stream``.
    """

    writer: str = ""
    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)
    home: Agent | None = None
    made_at: str = ""
    owner: object = None
    used_by: set[str] = field(default_factory=set)

    def note(
        self, agent: Agent, writes: bool, what: str, site: str, report: Callable[[str, str], None]
    ) -> None:
        """An access by ``agent``; ``report(kind, text)`` hears of what it did not wait for."""
        verb = "writes to" if writes else "reads"
        if self.write is not None and not agent.has_seen(self.writer, self.write.epoch):
            report(
                "race",
                f"{agent.name} {verb} ({what}) what {self.writer} wrote at "
                f"[{self.write.site}] without waiting for it",
            )
        if not writes:
            self.reads[agent.name] = Access(agent.seen[agent.name], site)
            return
        for name, access in self.reads.items():
            if not agent.has_seen(name, access.epoch):
                report(
                    "race", f"{agent.name} overwrites ({what}) what {name} reads at [{access.site}]"
                )
        self.reads = {}
        self.writer, self.write = agent.name, Access(agent.seen[agent.name], site)

    def accesses(self) -> dict[str, Access]:
        """The newest one of each agent since the last write, and that write."""
        accesses = dict(self.reads)
        if self.write is not None:
            accesses.setdefault(self.writer, self.write)
        return accesses

    def unfinished(self) -> list[tuple[str, Access]]:
        """Accesses by other streams, unseen by its own, that the allocator was not told of."""
        home = self.home
        if home is None:
            return []
        return [
            (name, access)
            for name, access in self.accesses().items()
            if name.startswith("stream")
            and name not in self.used_by
            and not home.has_seen(name, access.epoch)
        ]
