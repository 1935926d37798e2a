"""A server: batches, workers, admission, sessions. Limits and deadlines, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmnode.core.policy.budget import TurnPolicy
from llmnode.core.policy.reaching import RelayedPolicy

if TYPE_CHECKING:
    from llmnode.core.priority import Priority


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """The limits that decide which slices of sessions are computed together, see `core/serving/scheduling.py`."""

    decode_positions: int = 8
    """A step of at most this many positions counts as a decode: a user may be reading along, and it hardly lengthens a
    forward."""
    decodes: int = 64
    """The most positions of decodes in one forward."""
    stretch: float = 1.75
    """With prefills added, a forward of decodes may take this many times as long as without them. Prefills through a
    few blocks between two forwards count too. A user who reads along keeps more than half of the speed, and a prefill
    takes 2.3 times as long as alone."""
    prefill_s: float = 0.5
    """Prefills may take this much of a forward while nobody decodes. A decode that arrives meanwhile waits for all of
    it. On our CPU prefills get no faster with more."""
    decoding_s: float = 1.0
    """A session whose last decode is at most this long ago counts as decoding: its next step may arrive at any time."""
    least_prefill: int = 8
    """A forward through all blocks takes at least this many prefill positions, however slow it is. With fewer, prefills
    would hardly advance."""
    unmeasured_prefill: int = 64
    """The prefill positions in a forward until their cost has been measured."""
    fast_prefill: int = 128
    """From this many positions on, the cost per position hardly falls. If a forward has no time for this many through
    all blocks, but has it for half of them through one block, prefills go through a few blocks at a time. This happens
    beside decodes on a CPU."""
    most_prefill: int = 512
    """More positions gain nothing on any device that we know, and need memory."""
    full_share: float = 0.75
    """A forward with this share of the positions that there is time for, and `fast_prefill` of them, begins no row that
    it could not end."""
    pass_positions: int = 256
    """Sequences of a pass go together up to this many positions. More gain nothing on a CPU, and others would wait."""
    gather_share: float = 0.85
    """Sessions that decode in step wait for each other if their absence is shorter than this share of the fixed cost of
    a forward, which a shared forward saves. The fixed cost is what a forward of decodes takes without the part that
    each decode adds. At a share of 1 waiting would neither gain nor lose."""
    ageing_s: float = 2.0
    """Each time a request has waited this long without a turn, it counts as one priority higher."""

    def rank(self, priority: Priority, since_s: float, now_s: float) -> int:
        """The rank, at `now_s`, of a request of this `priority` that waits since `since_s`. A lower one comes first."""
        return max(0, priority - int((now_s - since_s) / self.ageing_s))


@dataclass(frozen=True, slots=True)
class WorkerPolicy:
    """The deadlines of a worker process, and when it is started again."""

    hello_s: float = 60.0
    """A new process must have started Python within this time, even on a busy machine."""
    look_s: float = 30.0
    """Loading a model has no deadline. The node checks and reports its progress this often."""
    stuck_s: float = 300.0
    """A worker whose loading makes no progress for this long counts as crashed. A slow disk or a download resumes
    sooner."""
    answer_s: float = 60.0
    """A batch that takes longer counts as a crash: clients wait no longer either (`ClientPolicy.step_timeout_s`)."""
    end_s: float = 5.0
    """The system has this long to clean up after a dying process, which may write its memory to disk."""
    pause_s: float = 1.0
    """The pause before the first restart after a crash; it doubles before each further one."""
    longest_pause_s: float = 60.0
    steady_s: float = 300.0
    """A worker that has served this long before it crashes is restarted as if it had never crashed before."""
    failed_starts: int = 4
    """After this many failed starts in a row the node gives up: this machine cannot hold what it was asked to."""


@dataclass(frozen=True, slots=True)
class LifePolicy:
    """How a node goes from one span to another, see `core/serving/node_life.py`."""

    drain_s: float = 10.0
    """Sessions have this long to end before the blocks are dropped: as at `llmnode serve --drain-s`."""
    settle_s: float = 60.0
    """They have this long if the new blocks are served already: it costs memory alone, and a session that ends in time
    need not be replayed elsewhere."""
    load_beside_s: float = 3600.0
    """Blocks that are not loaded beside others within this time are given up."""


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Limits of the queue for KV memory, see `core/serving/admission_queue.py`."""

    wait_s: float = 4.0
    """A session waits at most this long for KV memory. Clients wait longer for an answer
    (`ClientPolicy.open_timeout_s`)."""
    most_waiting: int = 256
    """The most sessions that wait: each is a task and some kilobytes."""
    most_waiting_per_client: int = 64
    passed_over: int = 8
    """This many smaller sessions may overtake a large one that does not fit yet. Then memory is kept free until it
    fits."""
    ageing_s: float = 1.0
    """Each time a session has waited this long, it counts as one priority higher."""
    first_positions: int = 256
    """A session comes in with KV for its replay and this many positions, and grows in pieces of this many. A peer that
    holds nothing may have others moved for this many, however small its share is. Else many identities in one address
    group would keep another peer of this group out."""
    growth_share: float = 1 / 32
    """Newcomers leave this share of the KV free for sessions that may grow, as vLLM does (1 / 100 there, where a
    session that has left comes back sooner)."""
    idle_s: float = 10.0
    """A session that was not used for this long may be moved for others, if its holder has more than its share. Its
    client replays it elsewhere. A user who reads an answer may take longer, and a client that generates does not."""
    own_idle_s: float = 60.0
    """One that was not used for this long may be moved for another session of its own peer. A session within a step is
    used sooner: its client waits no longer for an answer (`ClientPolicy.step_timeout_s`)."""
    unused_s: float = 2.0
    """The same for a session that has computed nothing yet: nothing is lost. Its first step may be on its way."""
    keeps_s: float = 20.0
    """A session that is used is not moved before it had its KV for this long: the replay costs a prefill."""
    look_every_s: float = 0.2
    """While a session waits, the server looks this often whether others may be moved."""
    tried_per_look: int = 16
    """It looks whether others may be moved for this many that wait, and for the next ones at the next look."""
    stays_kept: int = 64
    """The durations of this many recent sessions are kept, to estimate how long one stays."""
    forecasts: int = 8
    """The server works out this many times at once when others may be moved for a session that it refuses. Each takes
    some forwards' time with thousands of sessions. An address group gets a quarter of them."""
    forecasts_per_s: float = 1.0
    """Then it does so this often. Meanwhile it only says when sessions usually end."""
    least_retry_s: float = 1.0
    """No client is told to ask again sooner than this."""
    longest_retry_s: float = 60.0
    """No client is told to ask again later than this: the estimate is rough."""


@dataclass(frozen=True, slots=True)
class ServePolicy:
    """The limits of a server for its clients."""

    sessions_per_link: int = 64
    session_bytes: int = 24 << 10
    """The memory of a session without frames or KV: objects and a task. It was measured as 13 kB, on a small link."""
    links: int = 256
    malformed_burst: int = 16
    """An address group may send this many malformed frames at once. A further one costs the link that it came over."""
    malformed_per_s: float = 0.1
    """Then one is allowed this often."""
    requests: TurnPolicy = TurnPolicy(burst=128, per_s=2, shared_per_s=64)
    """Frames of address groups that ask for no work of the worker, and refusals of others. Each takes about half a
    millisecond of the event loop."""
    openings: TurnPolicy = TurnPolicy(burst=0, per_s=1, shared_per_s=1024)
    """Those that a session opens and ends with, beyond that burst, while nothing of others is computed: a large batch
    opens its sessions in a moment."""
    wants: TurnPolicy = TurnPolicy(burst=1024, per_s=16, shared_per_s=256)
    """Questions before pushes. A server asks about one for each session that it pushes to, and for more as a session
    grows: each push that was used gives its address group one back. Each takes about a tenth of a millisecond."""
    others_work_s: float = 1.0
    """A step of others counts for this long after its end: they will send the next one."""
    requests_per_step: float = 4.0
    """A step that was computed gives its address group this many of them back: a session has some before its first
    step, and others with it."""
    totals_s: float = 10.0
    """A peer on another machine learns what this server has done up to a moment that is no older than this."""
    steps_ahead: int = 4
    """Steps a client may send before the one that is due has arrived."""
    passes_per_link: int = 4
    """Passes, which train, that a client may ask for at the same time."""
    pass_positions: int = 8192
    """The most positions of one pass: a frame can hold that many of a small model."""
    longest_pass_s: float = 900.0
    """A pass is given up after this time, or after the time that its client waits (`PassPolicy`)."""
    pass_sequence: int = 2048
    """The longest sequence of a pass. It goes through a block in one part, and decodes wait for that."""
    session_prompt_bytes: int = 32 << 20
    """The most bytes of a session's deep prompts in the blocks of its span. They are held until it ends."""
    pass_prompt_bytes: int = 8 << 20
    """The most bytes of a pass's deep prompts. Its frames have this much left beside the longest sequence."""
    adapter_part_bytes: int = 32 << 20
    """The most bytes of one block's part of an adapter, in fp32: rank 48 for all layers of a model of 70 billion
    weights. It crosses in one frame."""
    adapter_gradient_bytes: int = 32 << 20
    """The most bytes of an adapter's gradients in one answer, which is one frame."""
    adapter_parts_per_link: int = 4
    """Parts of adapters that a client may send at the same time."""
    look_s: float = 5.0
    """The server looks at this interval how much memory it takes."""
    adapter_idle_s: float = 300.0
    """An adapter that nothing used for this long is dropped. Its client can bring it again."""
    replay_bytes: int = 64 << 20
    """The most bytes of logged results that one frame may ask for."""
    memory_patience_s: float = 5.0
    """A step of a client waits this long for memory (`BudgetPolicy`). Meanwhile no other frame is read from its link.
    It is less than the client waits for an answer (`ClientPolicy.step_patience_s`), and than its link waits for ours to
    read (`LinkPolicy.write_timeout_s`). Pushes wait for nothing."""
    refusal_patience_s: float = 4.0
    """The refusal of a step waits this long for a turn of the client's address group."""
    longest_work_wait_s: float = 40.0
    """A step that is to be computed waits for memory for as long as other steps end, each within `memory_patience_s`
    of the one before, and for this long at most: its client waits for the answer for `ClientPolicy.step_timeout_s`."""
    push_first_bytes: int = 1280 << 10
    """A session grants this much to the hop before it at the beginning of an epoch, so that a prompt is pushed without
    a question, which would take a round trip at each hop. These are 512 positions of SmolLM2-135M in fp32, or 160
    of hidden states of 8 KiB. It is used up by the steps that follow."""
    push_first_share: float = 0.25
    """With more than this share of the pushes taken, it is `push_first_crowded_bytes`."""
    push_first_crowded_bytes: int = 256 << 10
    """A peer may hold 48 MiB of pushes (`BudgetPolicy`): about 150 sessions between two servers."""
    push_window_bytes: int = 64 << 10
    """Later it grants this much ahead, which are some decodes. Prefills ask for more while they are computed."""
    pushed_times: int = 2
    """A session grants this many times the size of all its positions in one epoch."""
    pushed_ahead: int = 8
    """The steps of one session that may be here and not done with, of those that were pushed."""
    push_patience_s: float = 1.0
    """A result waits this long for the right to be pushed. Then it goes by way of the client."""
    push_again_s: float = 2.0
    """A next hop that has no memory for the question before a push is asked again after this time. So it is by a client
    whose address group has had too many questions asked."""
    rights_burst: int = 512
    """A server asks next hops for this many rights at once, for clients of one address group: half of what they answer
    at once (`wants`). Each push that was made gives one back."""
    rights_per_s: float = 8.0
    late_push_bytes: int = 64 << 20
    """A peer is excused this much of pushes that came after its right was over."""
    probe_bytes: int = 1 << 18
    """The most bytes of a probe, by which a peer measures how fast it sends to us."""
    probes_burst: int = 12
    """An address group may send this many probes at once: four peers that measure for the first time."""
    probes_per_s: float = 0.1
    """Then one is allowed this often: 26 kB/s."""
    unasked_burst: int = 64
    """An address group may send this many steps that nobody has asked for over links that ask for grants. A further one
    costs the link."""
    unasked_per_s: float = 1.0
    replayed_times: float = 4.0
    """A session pushes its log to the next hop this many times at once, each time that a hop is lost for example.
    Then it goes by way of the client."""
    replayed_every_s: float = 10.0
    """Then it does so once more in this time."""
    connect_timeout_s: float = 3.0
    """The time for a connection to a next hop and for its first answer."""
    dial_patience_s: float = 0.5
    """A session waits this long, some round trips, for the connection to its next hop. Until the connection is there,
    the client passes results between the two hops."""
    hops_sought_burst: int = 12
    """Next hops that a server looks for at once, for clients of one address group, and has no connection to. It dials
    24 addresses of strangers at the same time, and 64 at once (`DialPolicy`). Those that are reached do not count."""
    hops_sought_per_s: float = 0.5
    """Then it looks for one this often. A client passes results on where it does not."""
    hops_kept: int = 128
    """Connections that a server has opened to next hops and keeps, a quarter of `BudgetPolicy.connections`: nobody else
    has a place of these. Beyond that, one over which no session pushes ends, or one of the address group with most."""
    redial_s: float = 2.0
    """A next hop that could not be reached, for example behind a NAT, is not dialled again for this long. The pause
    doubles each time."""
    longest_redial_s: float = 60.0
    relayed: RelayedPolicy = field(default_factory=RelayedPolicy)
    """Larger prefills are not pushed through relays, if the client is reached directly."""
    session_idle_s: float = 600.0
    """A session without a step for this long is closed and its KV freed."""
    lease_s: float = 60.0
    """A session may outlive its link by this much if its client asks for it. Within this time another process must read
    the file of the session and load the model. 0 grants no lease."""
    leased_share: float = 0.25
    """Sessions without a link may hold this share of the server's KV together: their clients may never return. When it
    is taken, address groups and clients share it (`core/serving/leased_kv.py`)."""
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
