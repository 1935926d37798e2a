"""`llmnode.connect`: the way to a transformers model whose blocks are in the swarm, for synchronous code."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from llmnode.client.cache import SessionCache
from llmnode.client.causal_lm import DistributedModelForCausalLM
from llmnode.client.connect import aconnect, aresume, check_options, check_way_in, load_parts, with_nearby
from llmnode.client.distributed import Connection
from llmnode.client.portal import open_portal
from llmnode.core.model import AUTO
from llmnode.core.policy import ClientPolicy, RelayedPolicy, SpotCheckPolicy
from llmnode.errors import ConfigError
from llmnode.models.open_model import open_model
from llmnode.models.peft_folder import downloaded
from llmnode.net.invite import Invite, is_invite
from llmnode.net.swarm_key import entry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

Model = TypeVar("Model", bound=DistributedModelForCausalLM)


def connect(  # noqa: PLR0913  # each is an option that users know, and all but the first are named
    name: str | None = None,
    *,
    peers: str | Sequence[str] | Invite | None = None,
    swarm_key: str | Path | None = None,
    codec: str = "raw",
    dtype: str = AUTO,
    adapter: str | None = None,
    spot_check: float = 0.0,
    relayed_prefill: str = "wait",
    deterministic: bool = False,
    report: Callable[[str], None] = lambda _line: None,
) -> DistributedModelForCausalLM:
    """Connect to a swarm. Returns a transformers model whose blocks run on the servers of the swarm.

    Use it as a context manager, or call `close()` when done.

    - `name`: the model; the embedded one by default. Or an invite, the line that `llmnode invite` prints. It is enough:
      it names the peers, and perhaps the model and the key.
    - `peers`: one or several addresses, or an invite. If neither an invite nor peers are given, mDNS finds a public
      swarm in the local network. A logged warning names it, since anybody there may run its servers.
    - `swarm_key`: the key of a private swarm, as an invite (which names peers too) or as the file of the key.
    - `codec`: the format of hidden states on the wire. "raw" is exact; "fp16", "bf16" and "int8" are lossy and smaller.
    - `dtype`: only servers that compute in this precision are used. "float32" is exact. "float32+int8" and the like
      have quantized weights (`core.model.PRECISIONS`). "auto" chooses one that the swarm serves: see `aconnect`.
    - `adapter`: a LoRA adapter, which blocks compute with and which is not trained. It is a folder that PEFT has saved,
      a name on the hub (`org/name`), or the name or digest of an adapter that servers announce (`llmnode adapters`).
    - `spot_check`: the share of the results that other servers compute again (`session/spot_checks.py`). A session that
      finds a cheating server in this way ends with SessionLost. Training goes on without that server.
    - `relayed_prefill`: for long prompts to servers that are reached through a relay. "wait" waits some seconds for a
      direct connection, and then uses the relay. "allow" uses it at once. "refuse" raises ConfigError.
    - `deterministic`: training gives the same bits each time, even if servers fail, provided that the processors,
      threads and versions of the servers are alike. It is slower, older servers refuse it, and the codec has to be
      "raw". `torch.use_deterministic_algorithms(True)` does the same.
    - `report`: is called with a line before each slow step, such as a download.

    Raises ConfigError, AdapterError, PeerError or NoRoute.
    """
    policy = ClientPolicy(
        spot_checks=SpotCheckPolicy(spot_check),
        relayed=RelayedPolicy(prefill=relayed_prefill),
        deterministic=deterministic,
    )
    check_options(codec, dtype, policy)  # before the seconds that a search in the local network takes
    name, way_in = model_and_way_in(name, () if peers is None else peers, swarm_key)
    if peers is None:
        with open_portal() as portal:
            way_in = portal.call(partial(with_nearby, way_in))
    return open_as(
        DistributedModelForCausalLM,
        name,
        way_in,
        codec=codec,
        dtype=dtype,
        policy=policy,
        adapter=adapter,
        report=report,
    )


def open_as(
    kind: type[Model],
    name: str | None,
    way_in: Invite,
    *,
    codec: str,
    dtype: str,
    policy: ClientPolicy,
    adapter: str | None = None,
    report: Callable[[str], None] = lambda _line: None,
) -> Model:
    """Connect as `connect` does, with any `policy`, to a model of a class of ours. Raises as `connect` does."""
    check_options(codec, dtype, policy)  # before the seconds that loading takes
    check_way_in(way_in)
    folder = open_model(name, report)
    parts = load_parts(folder)
    adapter = adapter and downloaded(adapter, report)
    with ExitStack() as stack:
        portal = stack.enter_context(open_portal())
        client = stack.enter_context(
            portal.enter(aconnect(way_in, parts=parts, codec=codec, dtype=dtype, adapter=adapter, policy=policy))
        )
        return kind(Connection(folder, parts.ends, client, portal, stack.pop_all()))


def resume(
    path: str | Path,
    name: str | None = None,
    *,
    peers: str | Sequence[str] | Invite = (),
    swarm_key: str | Path | None = None,
    report: Callable[[str], None] = lambda _line: None,
) -> DistributedModelForCausalLM:
    """Go on with what `SessionCache.export` has saved in the file at `path`: it is the model's `resumed`.

    `name` and `report` are as for `connect`; codec and dtype are the session's. The swarm is that of the peers named in
    the file, and `peers`; `swarm_key` is as for `connect`. Raises as `connect`, ConfigError if the file is no session
    of this model, and SessionLost.
    """
    name, way_in = model_and_way_in(name, peers, swarm_key)
    folder = open_model(name, report)
    parts = load_parts(folder)
    with ExitStack() as stack:
        portal = stack.enter_context(open_portal())
        entered = stack.enter_context(portal.enter(aresume(path, peers=way_in, parts=parts)))
        connection = Connection(folder, parts.ends, entered.client, portal, stack.pop_all())
        model = DistributedModelForCausalLM(connection)
    model.resumed = SessionCache.resumed(portal, entered)
    return model


def model_and_way_in(
    name: str | None, peers: str | Sequence[str] | Invite, swarm_key: str | Path | None
) -> tuple[str | None, Invite]:
    """`name` is a model's, or an invite. Raises ConfigError."""
    if not isinstance(name, str | None):
        raise ConfigError(f"{name!r} is no name of a model: write peers=..., if these are the peers")
    invite, name = (name, None) if is_invite(name) else (None, name)
    way_in = entry(peers, swarm_key, invite)
    return name or way_in.hub_model, way_in
