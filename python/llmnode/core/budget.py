"""The budget of a process: resources are reserved before they are used, in scopes that contain each other.

A process contains address groups, a group addresses, an address peers; then come connections, links and sessions. The
holdings of a scope count in each scope around it too, and each has limits. So the limit of the process holds, whatever
the number of peers, links and sessions. The resource manager of go-libp2p has such scopes. When a limit is reached, a
connection of least worth is evicted, or the newcomer goes without. Knows neither sockets nor clocks.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum, IntEnum
from itertools import count
from typing import TYPE_CHECKING

from llmnode.core.address_groups import address_groups
from llmnode.core.errors import LocalProtocolError
from llmnode.core.rates import Rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import BudgetPolicy


class Resource(Enum):
    """The value says what is counted."""

    MEMORY = "bytes of memory"
    WINDOWS = "bytes that may arrive ahead of our reading"
    """A part of the memory."""
    PUSHES = "bytes of memory that other servers may push"
    ANSWERS = "bytes of memory for answers that are being made"
    """A part of the memory, for milliseconds. It makes nobody the one that holds most: we choose when it is held."""
    WORK = "bytes of steps that are computed"
    PASSES = "bytes of passes, which train"
    """Apart from the work, so that passes that wait take no memory from steps."""
    LOGS = "bytes of results that are kept"
    ADAPTERS = "bytes of adapters"
    """They are in the worker, beside its KV."""
    CONNECTIONS = "connections"
    INBOUND = "connections that others have opened"
    LINKS = "links"
    STREAMS = "streams"
    DIALS = "dials"
    HEAVY_ANSWERS = "heavy answers"

    __hash__ = object.__hash__
    """Enum's own hashes the name, in Python: twenty times for each frame."""


class Kind(Enum):
    """The kinds of scopes, from the widest to the narrowest."""

    PROCESS = "process"
    GROUP = "address group"
    HOST = "address"
    PEER = "peer"
    CONNECTION = "connection"
    LINK = "link"
    SESSION = "session"


OF_MEMORY = {Resource.MEMORY, Resource.WINDOWS, Resource.PUSHES, Resource.LOGS}
"""For these a connection that we have opened may be dropped as any other."""


SEARCHES_IN_VAIN = 16
"""An address group may look this often at once for a connection to evict, and find none: a look at some hundred takes a
millisecond, and all links of a stranger that has used up its share may wait for memory."""
CHANGES_FOR_SEARCH = 32
"""Then it may do so once more each time that this number of reservations were made or given back, by anybody."""


class Worth(IntEnum):
    """How much a connection is worth to us when there are too many.

    A connection is OURS if we have opened it: then it keeps its place, and loses it only for the memory that it holds.
    """

    NOTHING = 0  # nothing uses it
    LINK = 1  # a link goes over it, as yet without a session
    USED = 2  # it has sessions, a reservation or a circuit
    OURS = 3


class Scope:
    """Made by `Budget`, and by `open` of the scope around it."""

    __slots__ = (
        "_children",
        "_limits",
        "_outside",
        "_searches",
        "_shared",
        "_watchers",
        "changes",
        "held",
        "is_closed",
        "is_shared",
        "kind",
        "name",
        "number",
        "on_evict",
        "runs",
        "worth",
    )

    def __init__(self, parent: Scope | None, kind: Kind, name: str, limits: Mapping[Resource, int]) -> None:
        self.kind = kind
        self.name = name
        self.number = 0
        """The newer one of two connections has the higher number."""
        self.worth = Worth.NOTHING
        self.runs = Worth.USED
        """The worth of what a connection of ours holds in memory."""
        self.on_evict: Callable[[], None] = _do_nothing
        """Ends the connection. It is called at most once."""
        self.held: Counter[Resource] = Counter()
        """With what the scopes within it hold."""
        self.is_closed = False
        self.is_shared = False
        """It is closed with the last scope within it."""
        self._outside: tuple[Scope, ...] = () if parent is None else parent.around
        self._limits = limits
        self._children: dict[Scope, None] = {}
        self._shared: dict[str, Scope] = {}
        self.changes = 0
        """The reservations that were made or given back, if it contains all others."""
        self._searches = Rates(SEARCHES_IN_VAIN, 1 / CHANGES_FOR_SEARCH) if parent is None else None
        """Those in vain, by address groups. Its clock counts changes."""
        self._watchers: dict[Callable[[], None], None] = {}

    def __repr__(self) -> str:
        return f"<{self.kind.value} {self.name}>"

    @property
    def around(self) -> tuple[Scope, ...]:
        """The scope itself, and those that contain it, from the narrowest to the widest."""
        return self, *self._outside

    def of_kind(self, kind: Kind) -> Scope | None:
        """The scope of this kind that contains this one."""
        for scope in self.around:
            if scope.kind is kind:
                return scope
        return None

    def within(self, kind: Kind) -> Iterator[Scope]:
        """All scopes of this kind that this one contains."""
        if self.kind is kind:
            yield self
            return
        for child in self._children:
            yield from child.within(kind)

    def open(self, kind: Kind, name: str, limits: Mapping[Resource, int] | None = None) -> Scope:
        """A scope within this one, for its owner to close."""
        child = Scope(self, kind, name, limits or {})
        child.is_closed = self.is_closed
        if not self.is_closed:
            self._children[child] = None
        return child

    def share(self, kind: Kind, name: str, limits: Mapping[Resource, int]) -> Scope:
        """The scope of this name within this one. It is closed with the last scope within it."""
        child = self._shared.get(name)
        if child is None:
            child = self.open(kind, name, limits)
            child.is_shared = True
            self._shared[name] = child
        return child

    def reserve(self, resource: Resource, amount: int) -> Scope | None:
        """Take `amount` here and in all scopes around, or nothing. Returns the scope that is full, None if none is."""
        if amount < 0:
            raise LocalProtocolError(f"a reservation of {amount} {resource.value}")
        around = (self, *self._outside)
        for scope in around:
            limits = scope._limits
            if scope.is_closed or (resource in limits and scope.held[resource] + amount > limits[resource]):
                return scope
        for scope in around:
            scope.held[resource] += amount
        scope.changes += 1
        return None

    def release(self, resource: Resource, amount: int) -> None:
        """Give back what was reserved. A scope that is closed has given it back already."""
        if self.is_closed:
            return
        if not 0 <= amount <= self.held[resource]:
            own = self.held[resource]
            raise LocalProtocolError(f"{self!r} gives back {amount} {resource.value}, and holds {own}")
        self.held[resource] -= amount
        widest = self
        for widest in self._outside:
            widest.held[resource] -= amount
        widest.changes += 1
        if widest._watchers:
            widest._note_release()

    def watch(self, note: Callable[[], None]) -> None:
        """Have `note` called once, when something of the process has been given back. It returns at once."""
        self.around[-1]._watchers[note] = None

    def unwatch(self, note: Callable[[], None]) -> None:
        self.around[-1]._watchers.pop(note, None)

    def take(self, resource: Resource, amount: int, *, has_waited: bool = False) -> bool:
        """Reserve, and evict others for it if that is fair. False if the asker goes without.

        `has_waited` says that it has waited for others to give something back, and now takes it.
        """
        while (full := self.reserve(resource, amount)) is not None:
            if full.is_closed or (evicted := self._victim(full, resource, has_waited=has_waited)) is None:
                return False
            evicted.evict()
        return True

    def _victim(self, full: Scope, resource: Resource, *, has_waited: bool) -> Scope | None:
        """The one that `choose_victim` names, if it was not asked too often in vain."""
        widest, group = self.around[-1], self.of_kind(Kind.GROUP)
        searches, key = widest._searches, ("" if group is None else group.name, resource)
        if searches is None or (not has_waited and searches.wait_s(key, widest.changes)):
            return None
        if (victim := choose_victim(full, self, resource, has_waited=has_waited)) is None:
            searches.count(key, widest.changes)
        return victim

    def take_all(self, wanted: Mapping[Resource, int]) -> bool:
        """Take each of them, or none."""
        return self._all(wanted, self.take)

    def reserve_all(self, wanted: Mapping[Resource, int]) -> bool:
        """Reserve each of them, or none. Nobody is evicted for it."""
        return self._all(wanted, lambda resource, amount: self.reserve(resource, amount) is None)

    def _all(self, wanted: Mapping[Resource, int], get: Callable[[Resource, int], bool]) -> bool:
        got: list[tuple[Resource, int]] = []
        for resource, amount in wanted.items():
            if not get(resource, amount):
                for each in got:
                    self.release(*each)
                return False
            got.append((resource, amount))
        return True

    def could_hold(self, resource: Resource, amount: int) -> bool:
        """Whether the limits allow it, if nothing else is held."""
        return all((limit := each.limit(resource)) is None or amount <= limit for each in self.around)

    def is_taken(self, resource: Resource, share: float) -> bool:
        """Whether more than this share of a limit is taken, here or in a scope around."""
        return any(
            (limit := each.limit(resource)) is not None and each.held[resource] > share * limit for each in self.around
        )

    def limit(self, resource: Resource) -> int | None:
        """None without a limit."""
        return self._limits.get(resource)

    def set_limit(self, resource: Resource, amount: int) -> None:
        """The scope keeps what it holds, even if that is more."""
        self._limits = {**self._limits, resource: amount}

    def evict(self) -> None:
        """Another one needs the place."""
        end, self.on_evict = self.on_evict, _do_nothing
        end()
        self.close()

    def close(self) -> None:
        """Give back all that this scope and those within it hold. Safe to call twice."""
        if self.is_closed:
            return
        held = +self.held
        self._mark_closed()
        if not self._outside:
            return
        for scope in self._outside:
            scope.held.subtract(held)
        parent, widest = self._outside[0], self._outside[-1]
        widest.changes += 1
        if widest._watchers:
            widest._note_release()
        parent._children.pop(self, None)
        if parent._shared.get(self.name) is self:
            del parent._shared[self.name]
        if parent.is_shared and not parent._children:
            parent.close()

    @property
    def use(self) -> Worth:
        """The worth of a connection, with that of the sessions over it."""
        if self._children and self.worth < Worth.USED and any(True for _ in self.within(Kind.SESSION)):
            return Worth.USED
        return self.worth

    def use_of(self, resource: Resource) -> Worth:
        """The worth of a connection when there is too little of `resource`."""
        return self.runs if self.worth is Worth.OURS and resource in OF_MEMORY else self.use

    def _note_release(self) -> None:
        watchers, self._watchers = self._watchers, {}
        for note in watchers:
            note()

    def _mark_closed(self) -> None:
        self.is_closed = True
        self.held.clear()
        for child in self._children:
            child._mark_closed()
        self._children.clear()
        self._shared.clear()


class Budget:
    """All scopes of a process."""

    def __init__(self, policy: BudgetPolicy) -> None:
        self._limits = {kind: limits_of(policy, kind) for kind in Kind}
        self._numbers = count(1)
        self.process = Scope(None, Kind.PROCESS, "this process", self._limits[Kind.PROCESS])

    def connection(self, address: str, peer: PeerId | None = None) -> Scope:
        """A new scope for a connection. The peer is at an IP address, or at what else tells where it is.

        While a connection is half-open, it is not known which peer that is.
        """
        scope = self.process
        group, host = address_groups(address)
        for kind, name in ((Kind.GROUP, group), (Kind.HOST, host), (Kind.PEER, peer)):
            if name is not None:
                scope = scope.share(kind, name, self._limits[kind])
        scope = scope.open(Kind.CONNECTION, peer or "half-open")
        scope.number = next(self._numbers)
        return scope

    def of_peer(self, scope: Scope) -> Scope:
        """The scope of the peer that `scope` is of, which may have been closed with its last connection.

        Its owner opens another one within.
        """
        names = {each.kind: each.name for each in scope.around}
        around = self.process
        for kind in (Kind.GROUP, Kind.HOST, Kind.PEER):
            if kind in names:
                around = around.share(kind, names[kind], self._limits[kind])
        return around


def choose_victim(full: Scope, asker: Scope, resource: Resource, *, has_waited: bool = False) -> Scope | None:
    """The connection to drop so that `asker` gets what `full` has refused; None if `asker` is to go without.

    It is of an address group that holds more than the asker's. One that nothing uses goes first, then those of groups
    that hold more than their share, with sessions or without. A group below its share loses only one without them.
    Within the group, the least worth goes first, then what holds most, then the newest. Within the asker's own group,
    only what nothing uses makes way, the oldest first; or, for memory, what holds more than the asker and is worth no
    more. A connection that we have opened keeps its place. Its memory counts by what runs over it: others may have had
    us open it. But if we have opened the asker's too, it waits first: a client's servers do not evict each other at
    once. Nothing makes way for work, or for adapters (`core/serving/adapter_shelf.py`).
    """
    if resource in (Resource.WORK, Resource.PASSES, Resource.ADAPTERS):
        return None
    asking = asker.of_kind(Kind.CONNECTION)
    own = asker.of_kind(Kind.GROUP)
    is_patient = asking is not None and asking.worth is Worth.OURS and not has_waited
    rivals = [
        (each, use, each.of_kind(Kind.GROUP))
        for each in full.within(Kind.CONNECTION)
        if each is not asking
        and each.held[resource]
        and (use := each.use_of(resource)) < Worth.OURS
        and not (is_patient and each.worth is Worth.OURS and use is not Worth.NOTHING)
    ]
    groups = {group for _, _, group in rivals if group is not None}
    limit = full.limit(resource)
    of_groups = sum(_kept(each, resource) for each in full.within(Kind.GROUP))
    share = 0 if limit is None else (limit - full.held[resource] + of_groups) // max(1, len(groups))
    own_held = 0 if own is None else _kept(own, resource)
    for worth, least in ((Worth.NOTHING, 0), (Worth.LINK, share), (Worth.USED, share), (Worth.LINK, 0)):
        of_others = [
            (_kept(group, resource), _kept(each, resource), each.number, each)
            for each, use, group in rivals
            if use is worth and group not in (None, own) and _kept(group, resource) > max(own_held, least)
        ]
        if of_others:
            return max(of_others, key=lambda each: each[:3])[3]
    return _own_victim([each for each, _, group in rivals if group is own], asking, resource)


def _kept(scope: Scope, resource: Resource) -> int:
    """The amount that counts for a scope: memory of answers that are being made for it is left out."""
    return scope.held[resource] - (scope.held[Resource.ANSWERS] if resource is Resource.MEMORY else 0)


def _do_nothing() -> None: ...


def _own_victim(rivals: list[Scope], asking: Scope | None, resource: Resource) -> Scope | None:
    unused = [each for each in rivals if each.use_of(resource) is Worth.NOTHING]
    if unused:
        return min(unused, key=lambda each: each.number)
    if resource not in (Resource.MEMORY, Resource.WINDOWS) or asking is None:
        return None
    use, held = asking.use_of(resource), _kept(asking, resource)
    larger = [each for each in rivals if each.use_of(resource) <= use and _kept(each, resource) > held]
    return max(larger, key=lambda each: (_kept(each, resource), each.number), default=None)


def limits_of(policy: BudgetPolicy, kind: Kind) -> dict[Resource, int]:
    """The limits of each scope of this kind."""
    match kind:
        case Kind.PROCESS:
            return {
                Resource.MEMORY: int((1 - policy.work_share - policy.pass_share) * policy.memory_bytes),
                Resource.WINDOWS: int(policy.window_share * policy.memory_bytes),
                Resource.PUSHES: int(policy.push_share * policy.memory_bytes),
                Resource.WORK: int(policy.work_share * policy.memory_bytes),
                Resource.PASSES: int(policy.pass_share * policy.memory_bytes),
                Resource.LOGS: 0,
                Resource.ADAPTERS: policy.adapter_bytes,
                Resource.CONNECTIONS: policy.connections,
                Resource.INBOUND: policy.connections,
                Resource.LINKS: policy.links,
                Resource.STREAMS: policy.streams,
                Resource.DIALS: policy.dials,
                Resource.HEAVY_ANSWERS: policy.heavy_answers,
            }
        case Kind.GROUP:
            return {
                Resource.MEMORY: int(policy.group_share * policy.memory_bytes),
                Resource.WINDOWS: int(policy.group_share * policy.window_share * policy.memory_bytes),
                Resource.PUSHES: int(policy.group_share * policy.push_share * policy.memory_bytes),
                Resource.ADAPTERS: int(policy.group_share * policy.adapter_bytes),
                Resource.INBOUND: int(policy.group_share * policy.connections),
                Resource.LINKS: int(policy.group_share * policy.links),
                Resource.STREAMS: int(policy.group_share * policy.streams),
            }
        case Kind.HOST:
            return {Resource.INBOUND: policy.connections_per_host}
        case Kind.PEER:
            return {
                Resource.MEMORY: int(policy.peer_share * policy.memory_bytes),
                Resource.WINDOWS: int(policy.peer_share * policy.window_share * policy.memory_bytes),
                Resource.PUSHES: int(policy.peer_share * policy.push_share * policy.memory_bytes),
                Resource.ADAPTERS: int(policy.peer_share * policy.adapter_bytes),
                Resource.INBOUND: policy.connections_per_peer,
                Resource.STREAMS: policy.streams_per_peer,
                Resource.HEAVY_ANSWERS: policy.heavy_answers_per_peer,
            }
        case _:
            return {}
