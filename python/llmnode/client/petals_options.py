"""The arguments with which Petals opens a model, as options of ours. Petals' names are in `llmnode.petals`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmnode.core.model import AUTO
from llmnode.core.policy import ClientPolicy
from llmnode.errors import ConfigError
from llmnode.net.addresses import parse_peer_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from llmnode.core.ids import PeerId

ELSEWHERE = {
    "dht_prefix": "a model is named by the digest of its weights: leave it out",
    "daemon_startup_timeout": "there is no daemon: leave it out",
    "show_route": "read model.route",
    "update_period": "news of servers come as they are: leave it out",
    "min_backoff": "set RoutePolicy.retry_s in a ClientPolicy for llmnode.aconnect",
    "max_backoff": "set RoutePolicy.longest_pause_s in a ClientPolicy for llmnode.aconnect",
    "max_pinged": "set StandingPolicy in a ClientPolicy for llmnode.aconnect",
    "ping_timeout": "set LinkPolicy.silence_s for llmnode.aconnect",
    "use_auth_token": "log in with `hf auth login`, or set HF_TOKEN",
    "token": "log in with `hf auth login`, or set HF_TOKEN",
    "revision": "write it after the name: org/name@REVISION",
    "trust_remote_code": "no code of the hub is run: leave it out",
    "quantization_config": 'servers choose the form of their weights: say dtype="float32+int8"',
    "device_map": "the client's part of the model stays on the CPU: leave it out",
    "low_cpu_mem_usage": "only the ends of the model are read: leave it out",
}
"""Arguments of Petals, and of transformers, that have no counterpart, and what there is instead."""

OF_MODELS = "active_adapter", "tuning_mode", "pre_seq_len"
"""Arguments that are about one model of a connection, with its head."""

OPTIONS = frozenset(
    {
        "initial_peers",
        "allowed_servers",
        "blocked_servers",
        "max_retries",
        "request_timeout",
        "connect_timeout",
        "ban_timeout",
        "use_server_to_server",
        *OF_MODELS,
        "torch_dtype",
        "dtype",
        "codec",
    }
)


def check_options(options: Iterable[str]) -> None:
    """Raises ConfigError for an argument that is not here, with what there is instead."""
    for option in options:
        if option in ELSEWHERE:
            raise ConfigError(f"{option} has no counterpart: {ELSEWHERE[option]}")
        if option not in OPTIONS:
            raise ConfigError(f"there is no argument {option!r}: there are {', '.join(sorted(OPTIONS))}")


def policy_of(options: Mapping[str, Any]) -> ClientPolicy:  # Any: whatever a caller gives
    """Petals' limits as ours. Raises ConfigError."""
    policy = ClientPolicy()
    route, recovery, passes, push = policy.route, policy.recovery, policy.passes, policy.push
    if (allowed := options.get("allowed_servers")) is not None:
        route = replace(route, allowed=_peers("allowed_servers", allowed))
    if (blocked := options.get("blocked_servers")) is not None:
        route = replace(route, blocked=_peers("blocked_servers", blocked))
    if (connect_s := _seconds(options, "connect_timeout")) is not None:
        route = replace(route, connect_timeout_s=connect_s)
    if (ban_s := _seconds(options, "ban_timeout")) is not None:
        route = replace(route, ban_s=ban_s, longest_ban_s=max(ban_s, route.longest_ban_s))
    if (retries := options.get("max_retries")) is not None:
        if type(retries) is not int or retries < 0:
            raise ConfigError(f"max_retries is {retries!r}: give a number of servers that a step may lose, or None")
        recovery = replace(recovery, replacements=retries)
    if (request_s := _seconds(options, "request_timeout")) is not None:
        passes, policy = replace(passes, longest_s=request_s), replace(policy, step_timeout_s=request_s)
    if not options.get("use_server_to_server", True):
        push = replace(push, enabled=False)
    return replace(policy, route=route, recovery=recovery, passes=passes, push=push)


def _peers(name: str, given: Iterable[str]) -> frozenset[PeerId]:
    if isinstance(given, str):
        raise ConfigError(f"{name} is one text: give a list of peer ids")
    try:
        return frozenset(parse_peer_id(str(each)) for each in given)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _seconds(options: Mapping[str, Any], name: str) -> float | None:
    if (given := options.get(name)) is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < float("inf"):
        raise ConfigError(f"{name} is {given!r}: give seconds")
    return float(given)


def dtype_of(options: Mapping[str, Any]) -> str:
    """`dtype`, or the name of a `torch_dtype`."""
    if (given := options.get("torch_dtype")) is None:
        return str(options.get("dtype", AUTO))
    if "dtype" in options:
        raise ConfigError("torch_dtype and dtype: leave out one of them")
    return str(given).removeprefix("torch.")
