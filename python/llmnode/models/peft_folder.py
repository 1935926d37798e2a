"""A LoRA adapter as PEFT saves it, in a folder or on the hub, as the parts that servers take. It reads no pickle.

The parts are byte for byte those of a client that loads the same folder by PEFT, so both have the same digest. Torch is
not imported: a server reads its adapters in a process that computes nothing.
"""

from __future__ import annotations

import os
import re
import reprlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmnode.core.adapters import MOST_RANK, NAME_PATTERN, AnnouncedAdapter
from llmnode.core.hub_names import HUB
from llmnode.core.model import FP32_BYTES
from llmnode.core.user_input import expand_path
from llmnode.errors import AdapterError, ConfigError, ModelError
from llmnode.models.families import FAMILIES
from llmnode.models.sources.checkpoint import ADAPTER_FILE, ADAPTER_PICKLE_FILE, ADAPTER_WEIGHTS_FILE
from llmnode.models.sources.damage import read_json, what_is_wrong_in_json
from llmnode.models.sources.hub_adapter import hub_adapter
from llmnode.models.sources.repository import HubName, parse_hub_name
from llmnode.wire.adapter import make_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llmnode.core.model import ModelInfo
    from llmnode.wire.adapter import Adapter

MOST_BYTES = 512 << 20
"""Servers hold this much of all adapters together (`BudgetPolicy.adapter_bytes`)."""
_PREFIXES = "|".join(sorted({re.escape(family.block_prefix) for family in FAMILIES.values()}))
_TENSOR = re.compile(rf"base_model\.model\.({_PREFIXES})([0-9]{{1,4}})\.([\w.]+)\.lora_([AB])\.weight")
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of LoRA",
    "modules_to_save": "modules beside LoRA (modules_to_save)",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "trained tokens",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "target_parameters": "LoRA of parameters (target_parameters)",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
"""Options of PEFT that servers do not compute, and what they are called."""
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""The values of `init_lora_weights` with which PEFT leaves the base model as it is. Others change its weights."""
_PATTERN = re.compile(r"\^?(?:[\w.]|\\\.)+\$?")
"""A module's name, as PEFT itself writes patterns. Others may take for ever to match."""
_MOST_PATTERNS = 4096
_LARGEST = float(np.finfo(np.float32).max)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class LocalAdapter:
    """An adapter that was read. `rank` is the largest of its layers, `base` the base model as its config names it.

    Only one of `read_named` has a `name` that may be announced.
    """

    name: str
    base: str
    rank: int
    adapter: Adapter

    @property
    def announced(self) -> AnnouncedAdapter:
        return AnnouncedAdapter(self.name, self.adapter.digest, self.rank)


def find_adapter(text: str) -> Path | HubName | None:
    """The folder of an adapter, or its name on the hub: `org/name`, and `@revision` may follow. Asks no hub.

    None if `text` is neither, as the name of an adapter that servers announce. After `hub:` it is never a path.
    """
    try:
        path = None if text.startswith(HUB) else expand_path(text)
        if path is not None and path.is_dir():
            return path
    except (ConfigError, OSError):
        return None
    return parse_hub_name(text.removeprefix(HUB))


def adapter_folder(text: str, report: Callable[[str], None] = lambda _line: None) -> Path:
    """The folder of the adapter `text`, as `find_adapter` takes it; one of the hub is downloaded. Blocks meanwhile.

    `report` gets a line before each slow step. Raises ConfigError if there is none, and otherwise as `hub_adapter`.
    """
    match find_adapter(text):
        case Path() as path:
            return path
        case HubName() as name:
            return hub_adapter(name, MOST_BYTES, report)
    raise ConfigError(
        f"the adapter {text!r} is no folder, and no name on the hub (org/name or org/name@revision): give one that "
        f"PEFT has saved, with {ADAPTER_FILE} and {ADAPTER_WEIGHTS_FILE}"
    )


def downloaded(text: str, report: Callable[[str], None]) -> str:
    """`text`; but the folder of the adapter, which is downloaded, if it is a name on the hub.

    `report` gets a line before each slow step. Raises as `adapter_folder`.
    """
    return str(adapter_folder(text, report)) if isinstance(find_adapter(text), HubName) else text


def read_named(text: str, model: ModelInfo, report: Callable[[str], None] = lambda _line: None) -> LocalAdapter:
    """The adapter for `model` of ADAPTER, a folder or a name on the hub, where `text` is ADAPTER or NAME=ADAPTER.

    Without NAME it has the folder's name, or that on the hub without the organization. Blocks while it reads; `report`
    gets a line before each slow step. Raises ConfigError for an adapter or a name that is none, and AdapterError for an
    adapter that servers cannot compute.
    """
    name, found, source = text.partition("=")
    if not found or find_adapter(text) is not None or not re.fullmatch(NAME_PATTERN, name):
        source, name = text, _own_name(text)
    if find_adapter(source) is not None and not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(
            f"{name!r} is no name for an adapter: give NAME=FOLDER, with letters, digits, '.', '_' and '-'"
        )
    return replace(read_adapter(source, model, report), name=name)


def _own_name(text: str) -> str:
    if isinstance(found := find_adapter(text), HubName):
        return found.repo.rpartition("/")[2]
    return Path(os.path.abspath(expand_path(text))).name  # a symlink's own


def read_adapter(text: str, model: ModelInfo, report: Callable[[str], None] = lambda _line: None) -> LocalAdapter:
    """The adapter for `model` of the folder, or of the name on the hub, that `text` is. Its path is its name.

    Blocks while it reads. `report` gets a line before each slow step. Raises as `read_named`.
    """
    path = adapter_folder(text, report)
    try:
        return _read(path, model)
    except (AdapterError, ModelError) as error:
        raise AdapterError(f"the adapter {text}: {error}") from error
    except OSError as error:
        why = f"{error.filename or path} cannot be read ({error.strerror})"
        raise ConfigError(f"the adapter {text}: {why}") from error


def _read(path: Path, model: ModelInfo) -> LocalAdapter:
    file = path / ADAPTER_FILE
    if not file.exists():
        raise AdapterError(f"it has no {ADAPTER_FILE}: give the folder that PEFT has saved the adapter in")
    if (fault := what_is_wrong_in_json(file)) is not None:
        raise AdapterError(f"{ADAPTER_FILE} {fault}")
    config = read_json(file)
    _check_config(config, model)
    alphas = _alphas(config)
    layers: dict[int, dict[str, dict[str, np.ndarray]]] = {}
    prefix = ""
    for tensor, values in _tensors(path).items():
        if (match := _TENSOR.fullmatch(tensor)) is None or int(match[2]) >= model.blocks:
            raise AdapterError(
                f"{reprlib.repr(tensor)} is no LoRA matrix of the {model.blocks} blocks of {model.name}: train it with "
                "target_modules in the blocks of this model alone"
            )
        prefix = match[1]
        layers.setdefault(int(match[2]), {}).setdefault(match[3], {})[match[4]] = values
    parts, rank, largest = {}, 0, 0.0
    for block, part in layers.items():
        for layer, halves in part.items():
            rank = max(rank, _rank_of(f"block {block}: {layer}", halves))
        scales = {layer: _scale(config, alphas, f"{prefix}{block}.{layer}", part[layer]["A"]) for layer in part}
        parts[block] = _packed(part, scales)
        matrices = [half for halves in part.values() for half in halves.values()]
        largest = max(largest, *map(abs, scales.values()), *(float(np.abs(each).max()) for each in matrices))
    if not parts:
        raise AdapterError(f"{ADAPTER_WEIGHTS_FILE} has no tensors: save the adapter again")
    base = config.get("base_model_name_or_path")
    base = base if isinstance(base, str) else ""
    return LocalAdapter(str(path), base, rank, make_adapter(model.digest, parts, largest))


def _check_config(config: Mapping[str, Any], model: ModelInfo) -> None:  # Any: JSON
    """Raises AdapterError for a config that is not of plain LoRA for this model."""
    if config.get("peft_type") != "LORA":
        raise AdapterError(
            f"servers compute LoRA, and it is {reprlib.repr(config.get('peft_type'))}: train one of LoRA"
        )
    more = [what for option, what in _REFUSED.items() if config.get(option)]
    if config.get("bias", "none") != "none":
        more.append("biases")
    init = config.get("init_lora_weights")
    if (init.lower() if isinstance(init, str) else init) not in _PLAIN_INITS:
        more.append(f"another base model, which {reprlib.repr(init)} (init_lora_weights) has changed")
    if more:
        raise AdapterError(f"servers compute plain LoRA, and it has {', '.join(more)}: train one without")
    base = config.get("base_model_name_or_path")
    names = [each for each in (base, model.name) if isinstance(each, str) and _HUB_NAME.fullmatch(each)]
    if len(names) > 1 and names[0].lower() != names[1].lower():
        raise AdapterError(
            f"it is for the base {names[0]}, and not for {names[1]}: serve it with its own base, or correct "
            f"base_model_name_or_path in {ADAPTER_FILE} if that is the same model"
        )


def _alphas(config: Mapping[str, Any]) -> list[tuple[re.Pattern[str], float]]:  # Any: JSON
    """Alphas of layers by patterns of their names, in PEFT's order: the first one counts. The last one is for all."""
    named = config.get("alpha_pattern") or {}
    if not isinstance(named, dict) or len(named) > _MOST_PATTERNS:
        raise AdapterError(
            f"alpha_pattern in {ADAPTER_FILE} is no map of {_MOST_PATTERNS} layers at most: save the adapter again"
        )
    for pattern in named:
        if not _PATTERN.fullmatch(pattern):
            what = reprlib.repr(pattern)
            raise AdapterError(f"alpha_pattern in {ADAPTER_FILE}: {what} is no layer's name: name each layer there")
    numbers = [*named.values(), config.get("lora_alpha")]
    if not all(isinstance(each, (int, float)) and abs(each) <= _LARGEST for each in numbers):
        raise AdapterError(f"{ADAPTER_FILE} has no number as lora_alpha: save the adapter again")
    patterns = [re.compile(rf"(.*\.)?({each})") for each in named]
    return list(zip([*patterns, re.compile(".*")], map(float, numbers), strict=True))


def _tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors in fp32, by their names."""
    from safetensors import SafetensorError, deserialize

    file = path / ADAPTER_WEIGHTS_FILE
    if not file.is_file():
        if (path / ADAPTER_PICKLE_FILE).exists():
            raise AdapterError(
                f"{ADAPTER_PICKLE_FILE} is a pickle, which runs code when it is read: save the adapter with "
                "save_pretrained(FOLDER, safe_serialization=True)"
            )
        raise AdapterError(f"there is no {ADAPTER_WEIGHTS_FILE} in {path}: give a folder that PEFT has saved")
    if (size_bytes := file.stat().st_size) > MOST_BYTES:
        raise AdapterError(
            f"{ADAPTER_WEIGHTS_FILE} has {size_bytes >> 20} MiB, and servers hold {MOST_BYTES >> 20}: use one of lower "
            "rank"
        )
    try:
        content = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]  # safetensors does not type it
        found = {name: _in_fp32(name, info) for name, info in content}
    except (SafetensorError, ValueError) as error:
        what = reprlib.repr(str(error))
        raise AdapterError(
            f"{ADAPTER_WEIGHTS_FILE} is no safetensors, or is damaged ({what}): save the adapter again"
        ) from error
    if FP32_BYTES * sum(each.size for each in found.values()) > MOST_BYTES:
        raise AdapterError(f"it has more than {MOST_BYTES >> 20} MiB in fp32: use one of lower rank")
    for name, values in found.items():
        if not np.isfinite(values).all():
            raise AdapterError(f"{reprlib.repr(name)} has numbers that are not finite: train it again")
    return found


def _in_fp32(name: str, info: Mapping[str, Any]) -> np.ndarray:  # Any: of safetensors, which is not typed
    match info["dtype"]:
        case "F32":
            values = np.frombuffer(info["data"], "<f4")
        case "F16":
            values = np.frombuffer(info["data"], "<f2").astype(np.float32)
        case "BF16":
            values = (np.frombuffer(info["data"], "<u2").astype(np.uint32) << 16).view(np.float32)
        case other:
            raise AdapterError(f"{reprlib.repr(name)} is of {other}: save the adapter in float32, float16 or bfloat16")
    return values.reshape(info["shape"])


def _rank_of(where: str, halves: Mapping[str, np.ndarray]) -> int:
    """The rank of one layer. Raises AdapterError for matrices that do not fit together."""
    if halves.keys() != {"A", "B"}:
        raise AdapterError(f"{where}: lora_A and lora_B belong together, and one is not there: save the adapter again")
    a, b = halves["A"], halves["B"]
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise AdapterError(f"{where}: matrices of shapes {a.shape} and {b.shape} do not fit: save the adapter again")
    if not 1 <= len(a) <= MOST_RANK:
        raise AdapterError(f"{where}: a rank of {len(a)}, and servers take 1 to {MOST_RANK}: train one of lower rank")
    return len(a)


def _scale(
    config: Mapping[str, Any],  # Any: JSON
    alphas: Sequence[tuple[re.Pattern[str], float]],
    layer: str,
    a: np.ndarray,
) -> float:
    """The factor of the layer of this name, whose first matrix is `a`."""
    alpha = next(alpha for pattern, alpha in alphas if pattern.fullmatch(layer))
    return alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))


def _packed(part: Mapping[str, Mapping[str, np.ndarray]], scales: Mapping[str, float]) -> tuple[bytes, int]:
    """The bytes of one block's part, as `models/lora.py: pack_part` makes them. And how many numbers it has."""
    from safetensors.numpy import save

    tensors = {}
    for layer, halves in part.items():
        tensors[f"{layer}.lora_A.weight"] = np.ascontiguousarray(halves["A"])
        tensors[f"{layer}.lora_B.weight"] = np.ascontiguousarray(halves["B"])
        tensors[f"{layer}.scale"] = np.array(scales[layer], np.float32)
    return save(tensors), sum(each.size for halves in part.values() for each in halves.values())
