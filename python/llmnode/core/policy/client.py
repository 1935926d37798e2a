"""A client: routes, recovery, trust. Limits and deadlines, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmnode.core.ids import PeerId
from llmnode.core.policy.reaching import RelayedPolicy
from llmnode.core.priority import Priority


@dataclass(frozen=True, slots=True)
class StandingPolicy:
    """How far a client believes what peers say about their speed, see `core/peers/standing.py`."""

    proven_positions: int = 16
    """A peer has proved itself when it has computed this many positions for us, in steps that count for the speed."""
    keeps_s: float = 600.0
    """A peer that has not served us for this long has to prove itself anew: it may be busier now, or faster."""
    short_step: int = 8
    """Steps of at most this many positions count for the speed. More positions would look faster than they are."""
    believed_times: float = 4.0
    """A peer that has not proved itself counts at most this many times as fast as others."""
    unproven_cost: float = 1.25
    """Next to peers that have proved themselves, another one costs at least this many times what they cost. It does so
    in the way and in blocks, and has no more blocks than they on its word."""
    way_s: float = 0.1
    """A peer that takes this much longer than `believed_times` what it says is far away, busy or a liar. Others are not
    compared to it."""
    explored_share: float = 1 / 16
    """In this share of new sessions only `believed_times` limits the newcomers that have computed in a trial."""
    unproven_sessions: int = 1
    """A peer that has not proved itself gets this many sessions at a time. A further one costs `entrusted_cost`."""
    entrusted_cost: float = 4.0
    most_failures: int = 4
    """The cost of a peer doubles with each session that it took and did not serve, this many times at most."""
    doubt_cost_s: float = 1.0
    """Such a failure adds this to the cost of a token through all blocks, at other peers of its address group, and at
    those that have computed nothing for this client. Then all groups are tried before a second peer of one is."""
    doubt_half_life_s: float = 60.0
    """Half of these failures are forgotten in this time."""
    most_doubts: float = 16.0
    """More of them do not count."""
    first_patience_s: float = 8.0
    """A peer that has not proved itself may take this long for the first step of a session, and a multiple of what it
    says (`ClientPolicy.step_patience_times`). The time doubles with each failure. It is not limited by this if no
    other peer has the blocks."""
    tried_patience_s: float = 3.0
    tried_patience_times: float = 20.0
    """If it has computed a short step lately, in a trial for example, it may take this multiple of that instead, and
    `tried_patience_s`. A quick server that then hangs costs 3 s and not 8. Packets that get lost, and a forward for
    others, take a second or two."""
    tried_s: float = 60.0
    """Such a step was at most this long ago: the peer may be busier now."""
    first_bytes_per_s: float = 250_000
    """Beside that, its hidden states have the time that they take at this rate: a slow uplink, with others on it."""
    slow_step_s: float = 0.5
    """A step is slow if it takes this much more than `believed_times` what the peer says: the way may be long."""
    slow_total_s: float = 4.0
    """A session leaves a hop that took this much longer than it says, in steps that are slow, if another peer is
    believed to be `leaving_times` as fast. For each further hop that it leaves the time doubles."""
    leaving_times: float = 4.0


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """How a client chooses the peers of a route, and connects to them."""

    connect_timeout_s: float = 4.0
    """The time for some round trips to a peer of a route. A frozen peer must not keep a session from other peers for
    longer."""
    reach_s: float = 30.0
    """A client that opens a session looks this long for a route whose peers it can reach."""
    connect_moment_s: float = 0.1
    """After the first failed connection of a route, the client waits this long for the others. Further peers that
    cannot be reached are then found at the same time."""
    introduced_s: float = 5.0
    """A server that was told about its next hop remembers it for this long, whatever its view is like."""
    open_patience_s: float = 10.0
    """A session that cannot open tries again for this long, while the view says that its peers are there."""
    kv_patience_s: float = 60.0
    """A session tries for this long while servers have no KV memory for it, and say when they may."""
    full_cost_s: float = 4.0
    """This is added to the cost of a peer that has no KV memory for the session: the wait for admission
    (`AdmissionPolicy`)."""
    first_positions: int = 256
    """Servers let a session in that has KV for this many positions, or for its greatest length
    (`AdmissionPolicy.first_positions`)."""
    announced_after_s: float = 20.0
    """A server announces its load every 15 s or so: a session that is in use is a part of it after this time."""
    unreached_of_group: float = 1.5
    """After this number of peers of an address group that could not be reached, others there that the client has not
    reached cost more."""
    unreached_of_all: float = 4.0
    """The same for all address groups together: strangers may announce any address."""
    unreached_cost_s: float = 1.0
    """Each further failure adds this to their cost. So a known way is taken, and without one they are all tried."""
    most_unreached: float = 16.0
    """More failures do not count."""
    unreached_half_life_s: float = 60.0
    """Half of the failures are forgotten in this time."""
    tries_beside: int = 8
    """When a peer of a new route cannot be reached, the client dials this many others at the same time."""
    near: float = 0.05
    """Servers whose costs differ by less than this share are nearly the same: each client prefers others of them. A
    route that has become dearer by no more is kept."""
    ask_s: float = 0.5
    """Before a session opens, the servers of its route have this long to say how busy they are now."""
    asks: int = 2
    """That many times at most: a route that has become dearer is chosen anew, and asked too."""
    asked_beside: int = 4
    """This many servers that could take the place of one of the route are asked too, if there are connections."""
    asked_again_s: float = 1.0
    """An answer that is older is asked for again."""
    asked_keeps_s: float = 5.0
    """An answer counts for this long."""
    silent_s: float = 60.0
    """A server that does not answer is not asked again sooner. It is believed as it is announced."""
    sessions_per_link: int = 64
    """A server takes this many sessions over one link (`ServePolicy.sessions_per_link`). A batch does not move to one
    that takes only a part of its rows."""
    second_hop_cost: float = 4.0
    """A peer that has a hop of the session already counts this many times as slow for another one: it would hold KV for
    the session twice."""
    retry_s: float = 1.0
    """The pause between two looks for peers, unless the swarm changes before."""
    longest_pause_s: float = 5.0
    """The same pause is not longer than this, whatever time peers name until they have free KV."""
    ban_s: float = 2.0
    """The first ban of a peer that failed; each further ban lasts twice the one before."""
    longest_ban_s: float = 30.0
    """The longest ban for failures that cost the client little time."""
    ban_times: float = 4.0
    """A ban lasts at least this number of times the time that the client has waited for the peer. Each further failure
    doubles it. Otherwise three silent peers would be tried in turn for ever."""
    refused_within_s: float = 6.0
    """A server may keep the client waiting this long before it says that it is full: for KV
    (`AdmissionPolicy.wait_s`) or memory (`ServePolicy.memory_patience_s`). A server that takes longer is banned."""
    longest_costly_ban_s: float = 600.0
    """The longest ban after such waits. Where nobody else has the blocks, peers whose bans end first are used."""
    allowed: frozenset[PeerId] | None = None
    """The only servers that the client uses; None for all."""
    blocked: frozenset[PeerId] = frozenset()
    """Servers that the client does not use."""
    measured_peers: int = 8
    """The client measures the round trips to at most this number of servers beside those that it uses. All others are
    taken to be distant."""
    measure_s: float = 4.0
    """The time for such a measurement, and for the connection before it."""
    measure_again_s: float = 60.0
    """A round trip that was measured longer ago is measured again when a new session could use the server: at the first
    time either end may have been busy. Within this time `measured_peers` counts."""
    round_trips: int = 64
    """The client remembers this many. Those that were measured longest ago go first."""
    standbys: bool = True
    """The client keeps connections to peers that could take the place of a lost one."""
    standbys_again_s: float = 5.0
    """Those of the same route are looked for again after this time. A text often takes less."""

    def may_use(self, peer: PeerId) -> bool:
        """Whether the client was not told to leave `peer` out."""
        return (self.allowed is None or peer in self.allowed) and peer not in self.blocked


@dataclass(frozen=True, slots=True)
class TrialPolicy:
    """How a client tries several servers at once after one has failed, see `session/trials.py`."""

    at_once: int = 16
    """Servers that are tried together, of different address groups if there are such. Each computes one position."""
    most: int = 64
    """The most that are tried after one failure."""
    explored: int = 16
    """The newcomers that are tried beside servers that serve well, to find faster ones."""
    explored_s: float = 0.5
    """A session waits this long for the first of them."""
    opens_within_s: float = 2.0
    """Others are tried too if a session has not opened within this time."""
    timeout_s: float = 10.0
    """A server has this long to open a session and compute the position."""
    moment_s: float = 2.0
    """After this time the next ones are tried beside. Honest servers need some round trips."""
    keeps_s: float = 60.0
    """The same server is not tried again sooner than this, and one that has computed the position is preferred to
    others for this long."""


@dataclass(frozen=True, slots=True)
class MovePolicy:
    """When a session that is served well goes over to a better route, see `core/moves.py`."""

    enabled: bool = True
    look_s: float = 15.0
    """A session looks for a better route once in this time, or in up to twice that. Servers announce their loads every
    15 s or so. The time doubles with each move that the session has tried, whether that went well or not."""
    tried_s: float = 5.0
    """When servers that only say that they are better are tried, it looks again after this time."""
    first_steps: int = 32
    """And not before it has done this number of steps. Until then its hops have not proved themselves, and it is
    expected to do few more."""
    repays_times: float = 2.0
    """A move is to bring this many times its price. Each of them is an estimate that may be off by a third or so."""
    least_share: float = 0.2
    """And a step is to take this share less. Loads and round trips go up and down by a tenth or two."""
    longest_s: float = 10.0
    """No text stops for a longer time, as far as one knows before: somebody may read it."""
    patience_s: float = 2.0
    """A move is given up after `repays_times` times its price and this: a fast one may have to send a packet twice."""
    drift: float = 0.25
    """A session looks if others are known, or have other loads, or if its own steps took this share more or less."""
    least_chance: float = 0.25
    """This share of the sessions that see the same better server go there at a time, if others use the old one. Their
    load is announced before most of the others look again. A server of the same speed is to get half of them."""
    upload_again_s: float = 300.0
    """A client's upload is measured again after this time, if a price depends on it."""


@dataclass(frozen=True, slots=True)
class PushPolicy:
    """When hops push their results to each other, and not by way of the client."""

    enabled: bool = True
    """Hops give their results to the next one directly, where they can reach it."""
    patience_s: float = 2.0
    """A hop that was given a step directly has this long to answer, plus a multiple of what a similar step took."""
    retry_s: float = 2.0
    """A hop that could not push, or whose push was lost, is asked again between two steps after this time. The pause
    doubles each time, because asking takes a round trip."""
    longest_retry_s: float = 60.0


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """How a session outlives the peers that it loses, and the process that it began in."""

    upstream_logs: bool = True
    """Each hop logs its results for a peer that takes the next hop's place. The client sees only digests of what hops
    give each other. Without it all results come to the client too and are logged there (Petals' cache at the
    client)."""
    replay_patience_s: float = 15.0
    """The time for logged results, as `PushPolicy.patience_s` is for a step. They are pushed over a fresh connection,
    are hardly ever lost, and are a prefill."""
    timeout_s: float = 30.0
    """A session that lost a peer looks this long for a replacement: a server may be starting again. The time of replays
    does not count."""
    kv_patience_s: float = 300.0
    """It looks this long if others needed its KV, and no peer has any for it: a user's answer has begun."""
    replay_positions_per_s: float = 16.0
    """A replay may take a second for this many positions, and `ClientPolicy.step_timeout_s` more. Each of its chunks
    has the deadline of a step too."""
    overflow_patience_s: float = 5.0
    """Servers of one address group may be one stranger's. If all that can be asked are of one, and say that numbers
    overflow, they are believed after this time: until then others may come, and compute the step."""
    failed_tries: int = 4
    """The time of this many replays that fail does not count either. A peer that trickles must not keep a session from
    others, and many of them must not keep it for ever."""
    replacements: int = 32
    """A step may lose this many hops before one of its chunks has passed them all. Then it fails: peers may take over
    again and again, and do nothing."""
    lease_s: float = 60.0
    """Servers are asked to keep a session that `InferenceSession.export` has saved for this long."""


@dataclass(frozen=True, slots=True)
class PassPolicy:
    """How long a client waits for the answer to a pass, which trains, see `core/peers/pass_patience.py`.

    The time begins when the pass is written: no server is blamed for a slow uplink (`swarm/uploads.py`).
    """

    base_s: float = 60.0
    """Any pass may take this long: others may train at the same server."""
    cost_per_s: float = 200.0
    """It may take a second more for this many positions times blocks of a forward. A processor without a GPU computes
    some positions a second through a model of 7 billion weights, which has 32 blocks."""
    bytes_per_s: float = 64 << 10
    """And a second more for this many bytes on the way there and back."""
    longest_s: float = 900.0
    """No answer may take longer."""
    patience_s: float = 15.0
    patience_times: float = 20.0
    """A pass at a known peer may take this many times what one of its size took before, plus `patience_s`. So one that
    hangs is given up sooner."""
    first_patience_s: float = 8.0
    first_patience_times: float = 8.0
    """A peer that has answered no pass may take this many times what the median of known peers with the same blocks
    takes, plus `first_patience_s`, if there are such. A newcomer may be four times as slow as they, and has two passes
    one after another. The time doubles each time that it was too short."""
    rest_times: float = 20.0
    """After that the peer rests for this multiple of the time that it was waited for: it gets no pass while others can
    take it. So one that is silent holds up passes for a twentieth of a client's time at most."""


@dataclass(frozen=True, slots=True)
class TrustPolicy:
    """How a client checks receipts, and treats peers that may have lied."""

    strict: bool = False
    """The signatures of a step's receipts are checked before the step ends. Otherwise they are checked beside a later
    step."""
    unverified_steps: int = 4
    """Steps whose signatures are checked together, beside the next one."""
    receipts_kept: int = 16_384
    """The receipts kept per session, some 7 MB: 5,461 tokens through three hops. Older receipts are forgotten."""
    conviction_s: float = 3600.0
    """A peer that is proved to have lied is not used for this long. No bug does that, so waiting seconds would not
    help."""
    suspicion_cost: float = 0.5
    """Each break without proof adds this share to the cost of each peer that may have caused it. Equal peers are then
    preferred, but a peer that is twice as fast stays in use: half of the suspected peers are honest."""
    suspicion_half_life_s: float = 300.0
    """Suspicion halves in this time, so that an honest peer is cleared of its neighbours' breaks. A peer that keeps
    lying is suspected faster than this forgets."""
    most_suspicion: float = 16.0
    """The most breaks that count, so that a peer that alone holds some blocks is forgiven within an hour."""


@dataclass(frozen=True, slots=True)
class SpotCheckPolicy:
    """The chunks that another peer computes again, see `session/spot_checks.py`."""

    share: float = 0.0
    """The share of announced chunks that another peer computes again. 0.01 costs servers a prefill in 100 tokens."""
    positions: int = 2048
    """Chunks that end further on are not checked: a check is a prefill of all positions, and their transfer."""
    timeout_s: float = 60.0
    """A peer has this long to compute a chunk again. Then others are asked, or the check is given up."""
    tolerance: float | None = None
    """Relative L2 error of a position that honest peers may differ by. None: as measured (`session/spot_checks.py`)."""


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """The limits and deadlines of a client."""

    priority: Priority = Priority.INTERACTIVE
    """The priority that the client's sessions claim. Servers cannot check it; they also share fairly among clients."""
    open_timeout_s: float = 10.0
    step_timeout_s: float = 60.0
    """This is long enough for a long prefill on a slow peer. The link notices a dead peer within
    `LinkPolicy.silence_s`."""
    step_patience_s: float = 15.0
    step_patience_times: float = 20.0
    """A step at a known hop may take this many times what a similar step took before, plus `step_patience_s`. The hop's
    link lives, so it may be busy with others; but a hop that hangs is given up before `step_timeout_s`."""
    replaced_patience_s: float = 8.0
    """That of a decode, instead of `step_patience_s`, if other peers with the same blocks have computed something
    for this client since the step was given, and the hop nothing. It is more than a server waits for memory before it
    refuses a step (`ServePolicy.memory_patience_s`), since a refusal says more than silence."""
    memory_patience_s: float = 60.0
    """A hop that nobody else could replace, and that has no memory for a step now, is given it again for this long.
    Other steps of the same client may be what fills its memory."""
    deterministic: bool = False
    """Training gives the same bits each time, also if servers leave (`SwarmPasses.outputs`)."""
    chunk_tokens: int = 512
    """A prefill is sent in chunks of this many positions, so that no frame and no forward grows with the prompt."""
    chunks_ahead: int = 3
    """Chunks of one session that are under way together. It is less than servers accept, `ServePolicy.steps_ahead`."""
    route: RoutePolicy = field(default_factory=RoutePolicy)
    moves: MovePolicy = field(default_factory=MovePolicy)
    push: PushPolicy = field(default_factory=PushPolicy)
    relayed: RelayedPolicy = field(default_factory=RelayedPolicy)
    recovery: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    passes: PassPolicy = field(default_factory=PassPolicy)
    trust: TrustPolicy = field(default_factory=TrustPolicy)
    standing: StandingPolicy = field(default_factory=StandingPolicy)
    trials: TrialPolicy = field(default_factory=TrialPolicy)
    spot_checks: SpotCheckPolicy = field(default_factory=SpotCheckPolicy)
