"""Petals' names and arguments over ours, for programs that were written for Petals.

`client/PETALS.md` maps the names. An argument that has no counterpart raises ConfigError, which names what to do here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from llmnode.client.causal_lm import DistributedModelForCausalLM as _Model
from llmnode.client.model import model_and_way_in, open_as
from llmnode.client.petals_options import ELSEWHERE, OF_MODELS, OPTIONS, check_options, dtype_of, policy_of
from llmnode.client.released import releasing
from llmnode.client.remote_blocks import RemoteBlocks
from llmnode.client.token_session import InferenceSession
from llmnode.errors import ConfigError
from llmnode.models.peft_folder import find_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


__all__ = [
    "AutoDistributedConfig",
    "AutoDistributedModel",
    "AutoDistributedModelForCausalLM",
    "AutoDistributedModelForSequenceClassification",
    "AutoDistributedSpeculativeModel",
    "DistributedModelForCausalLM",
    "InferenceSession",
    "RemoteSequential",
]

ABSENT = {
    "ClientConfig": "AutoDistributedModelForCausalLM.from_pretrained takes its options as arguments",
    "RemoteSequenceManager": "a connected model chooses servers, by allowed_servers and blocked_servers",
    "SpendingPolicyBase": "servers share themselves equally among clients, without points",
    "NoSpendingPolicy": "servers share themselves equally among clients, without points",
    "declare_active_modules": "a server announces its blocks itself: llmnode serve, or llmnode.node.Node",
    "get_remote_module_infos": "read model.route, or run `llmnode status`",
}
"""Names of Petals that are not here, and what there is instead."""

_active: ContextVar[tuple[tuple[object, InferenceSession | None], ...]] = ContextVar("_active", default=())
"""Models and their active sessions; the last one of a model counts."""


class AutoDistributedModelForCausalLM:
    """A causal LM whose blocks are in the swarm."""

    @staticmethod
    def from_pretrained(name: str | None = None, **options: Any) -> DistributedModelForCausalLM:
        """The model `name`, as `llmnode.connect` gives it, with the sessions of Petals. The `options` are:

        - `initial_peers`: addresses of peers of the swarm.
        - `allowed_servers`, `blocked_servers`: ids of the only servers to use, and of those not to use.
        - `active_adapter`: a LoRA adapter that PEFT has saved; servers compute with it. Or the name or the digest of
          one that they announce.
        - `max_retries`: how many servers a step may lose. `request_timeout`: the longest time for an answer.
          `connect_timeout`, `ban_timeout`: those of peers. All in seconds.
        - `use_server_to_server`: whether servers push to each other.
        - `tuning_mode`, `pre_seq_len`: trainable prompts, see `DistributedModelForCausalLM.tune_prompts`.
        - `torch_dtype`, or `dtype` and `codec` as `llmnode.connect` has them.

        Raises ConfigError for any other argument, and the errors of `llmnode.connect`.
        """
        return _open(name, options)


class AutoDistributedModelForSequenceClassification:
    """A model with a head for sequences, whose blocks are in the swarm. The head is new."""

    @staticmethod
    def from_pretrained(name: str | None = None, **options: Any) -> Any:  # Any: transformers' class of the family
        """The options are those of `AutoDistributedModelForCausalLM`, and attributes of the config, as `num_labels`.

        Raises ConfigError as `DistributedModelForCausalLM.with_head` does too.
        """
        ours = {option: options.pop(option) for option in [*options] if option in {*OPTIONS, *ELSEWHERE}}
        of_head = {option: ours.pop(option) for option in OF_MODELS if option in ours}
        if _is_served(of_head.get("active_adapter")):
            ours["active_adapter"] = of_head.pop("active_adapter")
        model = _open(name, ours)
        try:
            head = model.with_head("sequence-classification", **options)
            _equip(head, of_head)
        except BaseException:
            model.close()
            raise
        return head


class _Absent:
    """A class of Petals that is not here."""

    instead: str

    @classmethod
    def from_pretrained(cls, *_args: object, **_options: object) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"there is no {cls.__name__}: {cls.instead}")


class AutoDistributedConfig(_Absent):
    """Not here: `from_pretrained` raises ConfigError."""

    instead = "use AutoDistributedModelForCausalLM.from_pretrained, which takes its options; the model has a `config`"


class AutoDistributedModel(_Absent):
    """Not here: `from_pretrained` raises ConfigError."""

    instead = "use AutoDistributedModelForCausalLM, whose `decoder` is the model without its head"


class AutoDistributedSpeculativeModel(_Absent):
    """Not here: `from_pretrained` raises ConfigError."""

    instead = "use AutoDistributedModelForCausalLM, and give its `generate` an `assistant_model`"


class DistributedModelForCausalLM(_Model):
    """Our model with the sessions of Petals: `generate(session=)`, `inference_session`, `use_session`."""

    @property
    def active_session(self) -> InferenceSession | None:
        """The session of this model of the `with` around us."""
        return next((session for model, session in reversed(_active.get()) if model is self), None)

    @contextmanager
    def inference_session(  # type: ignore[override]  # Petals opens it with the first rows
        self, max_length: int
    ) -> Iterator[InferenceSession]:
        """A session of `max_length` positions, which is active within the `with`."""
        with InferenceSession(self, max_length) as session, self.use_session(session):
            yield session

    @contextmanager
    def use_session(self, session: InferenceSession | None) -> Iterator[InferenceSession | None]:
        """Have `session` be active within the `with`, or none. Raises ConfigError for a session of another model."""
        if session is not None and session.model is not self:
            raise ConfigError("this session is of another model: open one with this model's inference_session")
        token = _active.set((*_active.get(), (self, session)))
        try:
            yield session
        finally:
            _active.reset(token)

    @releasing
    def __call__(self, *args: Any, **options: Any) -> Any:
        """transformers' forward. Raises ConfigError within a session, which takes `generate` and `step`."""
        _check_outside(self)
        return super().__call__(*args, **options)

    def generate(
        self, inputs: torch.Tensor | None = None, *args: Any, session: InferenceSession | None = None, **options: Any
    ) -> Any:
        """transformers' `generate`. In a session, `inputs` are the tokens that follow those before; it needs none.

        Then it returns the tokens after those of former calls, `inputs` and new ones, as Petals does.
        """
        inputs = options.pop("input_ids", None) if inputs is None else inputs
        if session is not None:
            with self.use_session(session):
                return self.generate(inputs, *args, **options)
        if (session := self.active_session) is None:
            return super().generate(inputs, *args, **options)
        _check_one_text(options, [options.get("generation_config"), *args[:1], self.generation_config])
        before = 0 if session.output_ids is None else session.output_ids.shape[1]
        whole, mask, cache = session.tokens_with(inputs, options.get("attention_mask"))
        with self.use_session(None):
            result = super().generate(whole, *args, **{**options, "attention_mask": mask, "cache": cache})
        is_plain = isinstance(result, torch.Tensor)
        session.output_ids = sequences = result if is_plain else result.sequences
        new = sequences[:, before:].clone()
        if is_plain:
            return new
        result.sequences = new
        return result


class RemoteSequential(torch.nn.Module):
    """Blocks of a model as a module of torch, called as Petals' are: `blocks(hidden, prompts)`."""

    def __init__(
        self, model: Any, start_block: int | None = None, end_block: int | None = None, **options: object
    ) -> None:
        """`model` is one of ours, or its `remote_blocks`. Raises ConfigError for anything else, as a config, and for
        `options` such as `dht`.
        """
        super().__init__()
        self._of = (model,)  # in a tuple it is no child of ours
        blocks = model if isinstance(model, RemoteBlocks) else getattr(model, "remote_blocks", None)
        if not isinstance(blocks, RemoteBlocks):
            raise ConfigError(
                "RemoteSequential takes a model of llmnode, which is connected, and no config: open one by "
                "AutoDistributedModelForCausalLM.from_pretrained(name, initial_peers=...)"
            )
        if options:
            names = ", ".join(options)
            raise ConfigError(f"{names} of RemoteSequential: its model is connected, and chooses servers. Leave it out")
        self.blocks = blocks[start_block:end_block]

    def forward(self, inputs: torch.Tensor, prompts: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states (rows, tokens, hidden_size), and deep prompts; see `RemoteBlocks.forward`.

        Raises ConfigError within a session of its model, which takes `step`.
        """
        _check_outside(self._of[0])
        output: torch.Tensor = self.blocks(inputs, prompts=prompts)
        return output

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, which: int | slice) -> RemoteSequential:
        made = RemoteSequential(*self._of)
        made.blocks = self.blocks[which]
        return made

    def inference_session(self, max_length: int) -> AbstractContextManager[InferenceSession]:
        """That of its model. Raises ConfigError for some of the blocks only: sessions go through all of them."""
        model = self._of[0]
        if not isinstance(model, DistributedModelForCausalLM):
            raise ConfigError("a session is one of a model: use RemoteSequential(model), or model.inference_session")
        if len(self) < model.info.blocks:
            raise ConfigError(
                "sessions go through all blocks: use model.inference_session(max_length=...), or call these blocks "
                "with all positions at once, which takes no session"
            )
        return model.inference_session(max_length)


def _check_outside(model: object) -> None:
    """Raises ConfigError within a `with` of one of its sessions."""
    if getattr(model, "active_session", None) is not None:
        raise ConfigError(
            "a forward does not go on in the active session: call generate, or session.step; or put the forward "
            "within `with model.use_session(None):`"
        )


def _check_one_text(options: dict[str, Any], configs: Sequence[object]) -> None:  # Any: whatever a caller gives
    """Raises ConfigError for a call whose rows are not one text each. The first of `configs` that says it counts."""
    for name in ("num_beams", "num_return_sequences"):
        said = [options.get(name), *(getattr(config, name, None) for config in configs)]
        if (number := next((each for each in said if each), 1)) > 1:
            raise ConfigError(
                f"{name}={number}: each row of a session goes on as one text. Leave it out, or put the call within "
                "`with model.use_session(None):`"
            )
    if options.get("inputs_embeds") is not None:
        raise ConfigError("a session goes on from tokens: give inputs, and no inputs_embeds")


def _open(name: str | None, options: dict[str, Any]) -> DistributedModelForCausalLM:
    check_options(options)
    policy, dtype, codec = policy_of(options), dtype_of(options), options.get("codec", "raw")
    name, way_in = model_and_way_in(name, options.get("initial_peers", ()), None)
    served = options.pop("active_adapter") if _is_served(options.get("active_adapter")) else None
    model = open_as(DistributedModelForCausalLM, name, way_in, codec=codec, dtype=dtype, policy=policy, adapter=served)
    try:
        _equip(model, options)
    except BaseException:
        model.close()
        raise
    return model


def _is_served(adapter: object) -> bool:
    """Whether it is the name or the digest of an adapter that servers announce, and nothing that PEFT could load."""
    return isinstance(adapter, str) and "/" not in adapter and find_adapter(adapter) is None


def _equip(model: Any, options: dict[str, Any]) -> None:  # Any: with any head
    """Give a model its adapter, which stays as it is, and its prompts. A head goes on being trained."""
    if (adapter := options.get("active_adapter")) is not None:
        trained = [each for each in model.parameters() if each.requires_grad]
        model.load_adapter(adapter)
        for each in trained:  # PEFT freezes all but adapters
            each.requires_grad_()
    model.tune_prompts(options.get("tuning_mode"), options.get("pre_seq_len", 0))


_KINDS = {
    "Config": AutoDistributedConfig,
    "Model": AutoDistributedModel,
    "ForCausalLM": AutoDistributedModelForCausalLM,
    "ForSequenceClassification": AutoDistributedModelForSequenceClassification,
    "ForSpeculativeGeneration": AutoDistributedSpeculativeModel,
}
_OF_FAMILIES = {
    f"Distributed{family}{kind}": of_any
    for family in ("Bloom", "Falcon", "Llama", "Mixtral")
    for kind, of_any in _KINDS.items()
}
"""Petals' classes of families: those of any family stand for them."""

if not TYPE_CHECKING:  # or each name would be one of this module to type checkers

    def __getattr__(name: str) -> object:
        if (instead := ABSENT.get(name)) is not None:
            raise ConfigError(f"there is no {name}: {instead}")
        if (kind := _OF_FAMILIES.get(name)) is not None:
            return kind
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
