"""From the address of a peer to a client that can generate."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from llmnode.client.ends import SharedEnds
from llmnode.client.generate import Answer, TextRequest, check_length, most_new_tokens
from llmnode.client.sampling import ChoiceTerms, Sampling
from llmnode.client.stopping import Limits
from llmnode.core.identity import how_other
from llmnode.core.model import AUTO, wish_named
from llmnode.core.operations import NO_PROMPTS, DeepPrompts
from llmnode.core.policy import ClientPolicy, LinkPolicy
from llmnode.errors import ConfigError, single_error
from llmnode.models.generation_config import generation_config
from llmnode.models.load import load_ends
from llmnode.models.open_model import open_model
from llmnode.models.peft_folder import find_adapter, read_adapter
from llmnode.models.text.tokenizer import find_tokenizer
from llmnode.net.addresses import parse_peer
from llmnode.net.invite import Invite
from llmnode.net.swarm_key import entry
from llmnode.session.found_precision import find_router
from llmnode.session.pass_batch import check_repeatable
from llmnode.session.peer_finder import PeerFinder
from llmnode.session.relay_gate import check_choice
from llmnode.session.router import Router
from llmnode.session.saved import read
from llmnode.session.served_adapter import with_served_adapter
from llmnode.swarm.join import join_swarm
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from transformers import GenerationConfig

    from llmnode.core.model import ModelInfo, PrecisionWish
    from llmnode.core.priority import Priority
    from llmnode.core.route import Route
    from llmnode.core.traffic import Traffic
    from llmnode.models.load import Ends
    from llmnode.models.sources.folder import ModelFolder
    from llmnode.models.text.tokenizer import Tokenizer
    from llmnode.session.rows import Rows
    from llmnode.session.saved import SavedSession
    from llmnode.session.session import InferenceSession
    from llmnode.swarm.membership import Swarm
    from llmnode.wire.adapter import Adapter

log = logging.getLogger(__name__)

GIVE = "give peers, the addresses of servers or relays, or an invite that names some"
MOST_LOGPROBS = 20
"""The most log probabilities of likeliest tokens that one may ask for, for each token."""


@dataclass(frozen=True, slots=True)
class ClientParts:
    """The parts of a model that a client reads from disk: the ends and the tokenizer, no block.

    A model may be without a tokenizer. Then calls that need one raise its error.
    """

    model: ModelInfo
    ends: Ends
    tokenizer: Tokenizer
    generation_config: GenerationConfig


class Client:
    """A model whose blocks are elsewhere, for trio programs. Made by `aconnect`.

    `generate` is its token loop. `model` says what it is, `tokenizer` makes token ids of text and text of token ids,
    and `generation_config` is transformers'. Several tasks may use it at once.
    """

    def __init__(
        self, parts: ClientParts, router: Router, codec: Codec, policy: ClientPolicy, adapter: Adapter | None = None
    ) -> None:
        """`adapter` is that of its sessions that have no other."""
        self.model = parts.model
        self.tokenizer = parts.tokenizer
        self.router = router
        self.ends = SharedEnds(parts.ends, parts.tokenizer.token)
        self.generation_config = parts.generation_config
        self.codec = codec
        self.policy = policy
        self.adapter = adapter

    @property
    def swarm(self) -> Swarm:
        """Our view of the peers that serve this model, and others."""
        return self.router.swarm

    @property
    def traffic(self) -> Traffic:
        """Bytes of hidden states that have crossed our links until now."""
        return self.router.traffic

    @property
    def route(self) -> Route:
        """The hops of the session that was opened last; before that, those that one would take."""
        return self.router.route

    @asynccontextmanager
    async def inference_session(
        self,
        max_length: int,
        beside: InferenceSession | None = None,
        *,
        priority: Priority | None = None,
        waits: bool = True,
        adapter: Adapter | None = None,
        prompts: DeepPrompts = NO_PROMPTS,
        rows: Rows | None = None,
    ) -> AsyncIterator[InferenceSession]:
        """A session with KV for `max_length` positions: `async with client.inference_session(64) as session`.

        It goes through the peers of `beside` if they have free KV: to become a copy of it costs least then. `priority`
        is what it is for, None as the policy has it. If servers have no free KV, it `waits` for some, as long as the
        policy says: not for KV that the caller's other sessions hold. The blocks have `adapter`, if there is one,
        and add the deep `prompts` of all blocks to the first positions. Sessions of the same `rows` wait for each
        other, as those of a batch do: while one waits for KV, the others free theirs. By default they are those of
        `beside`. Raises NoRoute, or the PeerError of a peer without which there is no route.
        """
        policy = self.policy if priority is None else replace(self.policy, priority=priority)
        policy = policy if waits else replace(policy, route=replace(policy.route, kv_patience_s=0))
        own = self.adapter if adapter is None else adapter
        async with self.router.open_session(max_length, self.codec, beside, policy, own, prompts, rows) as session:
            yield session

    async def transcript(self, session: InferenceSession) -> dict[str, Any]:  # Any: JSON
        """The receipts of the hops of `session`, checked now, and signed by us: `llmnode verify` reads them."""
        assert session.receipts is not None, "a router's sessions have a book"
        await session.verify()
        return session.receipts.export(self.router.sign)

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int | None = None,
        *,
        sampling: Sampling | None = None,
        number: int = 0,
        logprobs: int | None = None,
        stop_at_eos: bool = True,
        session: InferenceSession | None = None,
    ) -> Answer:
        """Generate the text after `prompt`, token ids of `client.tokenizer`: loop over it, or `await` all of it.

        - `max_new_tokens`: without it the text may fill the model's context, or the `session`.
        - `sampling`: how tokens are chosen. Without it the model's generation config says it, and most say the
          likeliest token.
        - `number`: texts of one seed differ by it.
        - `logprobs`: asks for the log probability of each token, and of this many of the likeliest ones, 0 to 20.
        - `stop_at_eos`: whether the tokens that end an answer of this model end the text.
        - `session`: it holds the first tokens of `prompt`, fewer than all, and stays open. The text goes on from there.
          After each token the session holds all tokens but that one.

        Nothing is sent yet. Raises ConfigError if the arguments do not fit together, or transformers refuses a setting;
        see `Answer` for the errors of the swarm. Example:

        ```python
        sampling = llmnode.Sampling(temperature=0.8, seed=1, settings={"stop_strings": ["\\n\\n"]})
        async with client.generate(prompt, 64, sampling=sampling, logprobs=3) as answer:
            async for token in answer:
                print(token.text, end="", flush=True)
        whole = await client.generate(prompt, 64)
        print(whole.text, whole.finish.reason, whole.finish.usage.new_tokens)
        ```
        """
        self.ends.check(prompt)
        if logprobs is not None and not 0 <= logprobs <= MOST_LOGPROBS:
            raise ConfigError(f"logprobs={logprobs}: ask for 0 to {MOST_LOGPROBS}")
        most = most_new_tokens(len(prompt), self.model)
        length = check_length(len(prompt), most if max_new_tokens is None else max_new_tokens, self.model)
        if session is not None:
            length = _length_within(session, len(prompt), length, is_fixed=max_new_tokens is not None)
        sampler = (sampling or Sampling()).of(self.generation_config)
        limits = Limits(
            max_new_tokens=length - len(prompt),
            fills_context=max_new_tokens is None,
            end_tokens=sampler.end_tokens if stop_at_eos else frozenset(),
            stop_strings=sampler.stop_strings,
            max_time_s=sampler.config.max_time,
        )
        terms = ChoiceTerms(self.ends.vocabulary, number, logprobs, ends=stop_at_eos)
        chooser = sampler.chooser(prompt, limits.max_new_tokens, terms)

        def opened() -> AbstractAsyncContextManager[InferenceSession]:
            return self.inference_session(length) if session is None else nullcontext(session)

        return Answer(TextRequest(tuple(prompt), chooser, limits, opened), self.ends, self.tokenizer)


@dataclass(frozen=True, slots=True)
class ResumedSession:
    """A session that goes on, and its client. `token_ids` are those that it was exported with. Made by `aresume`."""

    client: Client
    session: InferenceSession
    token_ids: tuple[int, ...]


def load_parts(model: ModelFolder | str | None = None) -> ClientParts:
    """Read the ends and the tokenizer of a `model`, by default the embedded one. Blocks for seconds.

    It is named as for `connect`: a folder, a GGUF file, or `org/name` on the hub. A model may be without a tokenizer.
    Then calls that need one raise its error. Raises ConfigError for any other name, and ModelError.
    """
    folder = open_model(model) if model is None or isinstance(model, str) else model
    return ClientParts(folder.info, load_ends(folder), find_tokenizer(folder), generation_config(folder))


@asynccontextmanager
async def aconnect(
    peers: str | Sequence[str] | Invite | None = None,
    *,
    swarm_key: str | Path | None = None,
    parts: ClientParts | None = None,
    codec: str = "raw",
    dtype: str | PrecisionWish = AUTO,
    adapter: str | None = None,
    link_policy: LinkPolicy | None = None,
    policy: ClientPolicy | None = None,
) -> AsyncIterator[Client]:
    """Connect to a swarm. The context has a `Client` for trio programs.

    - `peers`: one or several addresses of servers or relays, which know the others. Or an invite, the line that
      `llmnode invite` prints: it names the peers, and perhaps the model and the key. Without peers, mDNS finds a public
      swarm in the local network. A logged warning names it, since anybody there may run its servers.
    - `swarm_key`: the key of a private swarm, as an invite or as the file of the key.
    - `parts`: the client's part of a model, from `load_parts`. By default that of the invite's model, or else of the
      embedded one.
    - `codec`: the format of hidden states on the wire. "raw" is exact; "fp16", "bf16" and "int8" are lossy and smaller.
    - `dtype`: only servers that compute in this precision are used. Exact is "float32". With
      "float32+int8" weights are quantized, and with "float32+kv-int8" KV. With "auto" it is "float32" if the swarm
      serves the whole model in it, and else the precision with the most throughput, which a logged warning names.
      A precision of servers at a single address comes after those of servers at several.
      `client.model.precision` is the chosen one.
    - `adapter`: a LoRA adapter with which all blocks compute. It is a folder that PEFT has saved or a name on the hub
      (`org/name`), which goes to the servers. Or it is the name or digest of an adapter that servers announce: a logged
      warning says which of them do, since its content cannot be checked.
    - `policy`, `link_policy`: limits and deadlines of sessions, and of links.

    Give `trio.run` the option `restrict_keyboard_interrupt_to_checkpoints=True`: without it, Ctrl-C may leave a program
    that never ends.

    Raises ConfigError (an address, a name, an invite, a key, a lossy codec that is to be deterministic), AdapterError,
    PeerError (no peer can be reached) or NoRoute (blocks that nobody holds).
    Example:

    ```python
    async with llmnode.aconnect([address]) as client:
        prompt = client.tokenizer.encode("Once upon a time")
        async for token in client.generate(prompt, 64):
            print(token.text, end="", flush=True)
    ```
    """
    policy = policy or ClientPolicy()
    wish = check_options(codec, dtype, policy)
    way_in = entry(() if peers is None else peers, swarm_key)
    if peers is None:
        way_in = await with_nearby(way_in)
    way_in = check_way_in(way_in)  # a typing error is told before the seconds that loading takes
    parts = parts or await _load_parts(way_in.hub_model)
    joining = join_swarm(way_in.peers, link_policy or LinkPolicy(), swarm_key=way_in.key, is_near=way_in.is_near)
    async with joining as (pool, swarm):
        with single_error():
            router = await find_router(parts.model, wish, pool, swarm, policy)
            own: Adapter | None = None
            if adapter is not None and find_adapter(adapter) is not None:
                own = (await trio.to_thread.run_sync(read_adapter, adapter, router.finder.model)).adapter
            elif adapter is not None:
                router = await with_served_adapter(router, adapter)
        yield Client(replace(parts, model=router.finder.model), router, Codec(codec), policy, own)


def _length_within(session: InferenceSession, prompt_tokens: int, length: int, *, is_fixed: bool) -> int:
    """`length`; or the session's KV if that is less and `length` is not fixed. Raises ConfigError.

    The last token of a text needs no KV.
    """
    if session.position >= prompt_tokens:
        raise ConfigError(f"the session holds {session.position} tokens: give a prompt that goes on from them")
    most = session.max_length + 1
    if most <= prompt_tokens or (is_fixed and most < length):
        raise ConfigError(
            f"{prompt_tokens} prompt tokens and {length - prompt_tokens} new ones exceed the session's "
            f"{session.max_length} positions: open a longer one"
        )
    return min(length, most)


@asynccontextmanager
async def aresume(
    path: str | Path,
    *,
    peers: str | Sequence[str] | Invite = (),
    swarm_key: str | Path | None = None,
    parts: ClientParts | None = None,
    link_policy: LinkPolicy | None = None,
    policy: ClientPolicy | None = None,
) -> AsyncIterator[ResumedSession]:
    """Go on with the session that `InferenceSession.export` has saved in the file at `path`, where it stood.

    The file has the session's key. So servers that still have its KV give it to us; the rest is replayed. The
    swarm is that of the peers named in the file, and `peers`; its key, if it is private, is not in the file: see
    `aconnect` for `swarm_key`, `policy` and `link_policy`. `parts` must be those of the session's model. Raises
    ConfigError (the file, another model), PeerError, NoRoute or SessionLost; the file stays as it is.
    """
    policy = policy or ClientPolicy()
    saved = await trio.to_thread.run_sync(read, Path(path))
    way_in = entry(peers, swarm_key)
    way_in = check_way_in(replace(way_in, peers=tuple(dict.fromkeys((*way_in.peers, *saved.contacts)))))
    parts = parts or await _load_parts(way_in.hub_model)
    profile = saved.profile
    parts = replace(parts, model=replace(parts.model, precision=profile.precision, adapter=profile.adapter))
    _check_model(saved, parts.model)
    async with join_swarm(way_in.peers, link_policy or LinkPolicy(), saved.key, way_in.key) as (pool, swarm):
        router = Router(PeerFinder(parts.model, pool, swarm, policy))
        with single_error():
            async with router.resume_session(saved) as session:
                yield ResumedSession(Client(parts, router, saved.codec, policy), session, saved.token_ids)


def check_options(codec: str, dtype: str | PrecisionWish, policy: ClientPolicy) -> PrecisionWish:
    """The precision that is wished for. Raises ConfigError for an option of `aconnect` that no connection can have.

    Nothing has to be loaded or reached to tell.
    """
    if codec not in list(Codec):
        raise ConfigError(f"there is no codec {codec!r}: choose one of {', '.join(Codec)}")
    check_repeatable(Codec(codec), deterministic=policy.deterministic)
    if not 0 <= policy.spot_checks.share <= 1:
        raise ConfigError(f"spot_check={policy.spot_checks.share:g}: give a share from 0 to 1")
    check_choice(policy.relayed.prefill, "relayed_prefill")
    return wish_named(dtype) if isinstance(dtype, str) else dtype


async def with_nearby(found: Invite) -> Invite:
    """With the peers of the local network, if there are none and no key. Raises ConfigError if none is there."""
    if found.peers or found.key is not None:
        return found
    from llmnode.swarm.found_nearby import find_nearby  # zeroconf takes a while to import

    with single_error():
        return replace(await find_nearby(log.warning, GIVE), model=found.model)


def check_way_in(found: Invite) -> Invite:
    """Raises ConfigError for an address that is malformed, and if there is none."""
    if not found.peers:
        raise ConfigError(f"no peers are named: {GIVE}")
    for address in found.peers:
        parse_peer(address)
    return found


async def _load_parts(model: str | None) -> ClientParts:
    # Abandoned: the first run converts the model, and Ctrl-C must not wait for that.
    return await trio.to_thread.run_sync(lambda: load_parts(model), abandon_on_cancel=True)


def _check_model(saved: SavedSession, model: ModelInfo) -> None:
    """Raises ConfigError if the session is of another one."""
    if saved.profile.model_digest != model.digest:
        how = how_other(model.digest, saved.profile.model_digest, saved.model)
        raise ConfigError(f"the session is of {saved.model} {how}, not of {model.name} as it is here: name its model")
    if (saved.blocks, saved.hidden_size) != (model.blocks, model.hidden_size):
        raise ConfigError(f"the session is of {saved.blocks} blocks, and {model.name} has {model.blocks}")
    if saved.max_length > model.context_tokens:
        raise ConfigError(f"the session has {saved.max_length} positions, more than the model's context")
