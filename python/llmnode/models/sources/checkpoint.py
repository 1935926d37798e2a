"""Finds the files of a folder that are the model: those that transformers' `from_pretrained` takes, and no other.

It looks for one file first, then for an index of several. Other files, such as an older index or a copy in another
precision, do not count. It knows file names and JSON, but neither tensors nor the origin of files.
"""

from __future__ import annotations

import os
import re
import reprlib
from functools import partial
from itertools import islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from llmnode.errors import ModelError
from llmnode.models.sources.damage import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_PICKLE_FILE = "adapter_model.bin"

_SAFE, _INDEX = ".safetensors", ".safetensors.index.json"
_NAMED = "transformers_weights"
"""The option of a config that names the one file, or the index, whatever else is there."""
_OTHER_CONFIGS = "configuration_files"
_VARIANTS = re.compile(r"model\.(?!safetensors)[\w.-]+\.safetensors|model\.safetensors\.index\.[\w.-]+\.json")
_DISTRIBUTED = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_PICKLES = re.compile(r"pytorch_model[\w.-]*\.bin(\.index[\w.-]*\.json)?|consolidated.*\.pth|model\.(bin|pt|pth|ckpt)")
_FOREIGN = (
    ".onnx",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".npz",
    ".pdparams",
    ".tflite",
    ".mlmodel",
    ".llamafile",
)
_MOST_NAMES = 10_000
_COUNTS = re.compile("(layer|expert|block|head)(?!.*size)")
_MOST_COUNTED = 1 << 16
"""The most layers, experts and the like of a model."""


def weights_file(config: Mapping[str, Any], has: Callable[[str], bool]) -> str | None:
    """The file of all tensors, or the index of those that have them; None if there is neither.

    `has` tells whether the folder has a file of a name. Raises ModelError if the config names an impossible file.
    """
    named = config.get(_NAMED)
    if named is None:
        return next((name for name in (SINGLE_FILE, INDEX_FILE) if has(name)), None)
    if not isinstance(named, str) or not named.endswith((_SAFE, _INDEX)) or not _is_inside(named):
        raise ModelError(
            f"{CONFIG_FILE} names {named!r} as {_NAMED}: it must be a file of safetensors, or an index, in the folder"
        )
    return named


def is_index(file: str) -> bool:
    """Whether `file`, which `weights_file` found, is an index."""
    return file.endswith(_INDEX)


def shard_names(path: Path, file: str) -> list[str]:
    """All files of the model in the folder `path`. `file` is the only one, or their index.

    Raises ModelError if transformers could not read the index either, or if it leads out of the folder.
    """
    if not is_index(file):
        return [file]
    names = sorted(set(promised(path, file).values()))
    for name in names:
        if not name.endswith(_SAFE):
            raise ModelError(f"{path / file} names the file {name!r}, which is not of safetensors: {_resave('it')}")
    return names


def promised(path: Path, index: str) -> dict[str, str]:
    """The file of each tensor, by the index. Raises ModelError, as `shard_names`."""
    described = read_json(path / index)
    weight_map = described.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(each, str) for each in weight_map.values()):
        raise ModelError(f"{path / index} is damaged: its weight_map does not name files: download it again")
    if outside := [each for each in weight_map.values() if not _is_inside(each)]:
        raise ModelError(
            f"{path / index} names the file {outside[0]!r}, which is outside of the model: do not use this model"
        )
    if not weight_map:
        raise ModelError(f"{path / index} is damaged: its weight_map is empty: download it again")
    if not isinstance(described.get("metadata"), dict):
        raise ModelError(
            f'{path / index} has no metadata, without which transformers reads no index: add "metadata": {{}} to it'
        )
    return weight_map


def check_options(config_file: Path, config: Mapping[str, Any], names: Collection[str]) -> None:
    """Raises ModelError for options with which transformers takes other files, in a way that we do not follow.

    `names` are those of the folder.
    """
    if ADAPTER_FILE in names:
        raise ModelError(
            f"{config_file.parent} holds a PEFT adapter ({ADAPTER_FILE}) beside the model, and llmnode runs none: "
            f"merge it with PEFT's merge_and_unload and save that, or move {ADAPTER_FILE} away"
        )
    if any(_DISTRIBUTED.fullmatch(name) for name in names):
        raise ModelError(f"{config_file.parent} holds a distributed checkpoint (shard-...): {_resave('the model')}")
    if _OTHER_CONFIGS in config:
        raise ModelError(
            f"{config_file} names other config files for some versions of transformers ({_OTHER_CONFIGS}): put the one "
            f"for yours in the place of {CONFIG_FILE}"
        )


def check_counts(config_file: Path, config: Mapping[str, Any]) -> None:  # Any: JSON
    """Raises ModelError for more layers or experts than any model has: transformers makes a list of them, however many
    the config says, and would fill the memory.
    """
    for name, value in config.items():
        if isinstance(value, dict):
            check_counts(config_file, value)
        elif isinstance(value, int | float) and value > _MOST_COUNTED and _COUNTS.search(name):
            raise ModelError(
                f"{config_file} says {name} = {reprlib.repr(value)}, and no model has as many: get it again"
            )


def names_in(path: Path) -> list[str]:
    """The names of the files in the folder, and of the configs of the models in its subfolders. Raises OSError."""
    with os.scandir(path) as entries:
        is_folder = {entry.name: entry.is_dir() for entry in islice(entries, _MOST_NAMES)}
    within = (f"{name}/{CONFIG_FILE}" for name in is_folder if is_folder[name])
    return sorted([*(name for name in is_folder if not is_folder[name]), *filter(partial(_is_file, path), within)])


def _is_file(path: Path, name: str) -> bool:
    return os.path.isfile(path / name)


def explain_lack(names: Sequence[str], base: Callable[[], object]) -> str:
    """Why files of these `names` are no model that we can run, with advice: the end of a sentence about the folder.

    `base` reads the name of the model that an adapter is for.
    """
    here = [name for name in names if "/" not in name]
    if ADAPTER_FILE in here:
        return (
            f"holds a PEFT adapter of the model {base()}, and llmnode runs no adapters: merge it into that with PEFT's "
            "merge_and_unload, save the result, and name its folder"
        )
    if variants := [name for name in here if _VARIANTS.fullmatch(name)]:
        first = next((name for name in variants if name.endswith(".json")), variants[0])
        to = INDEX_FILE if first.endswith(".json") else SINGLE_FILE
        return f"holds only the variant {first} of its weights: rename it to {to}, or link that to it"
    if gguf := _ending(here, ".gguf"):
        return f"holds its weights as GGUF: get one of the files ({gguf[0]}, say) and give its path"
    if pickles := [name for name in here if _PICKLES.fullmatch(name)]:
        return (
            f"holds its weights as pickles, which may run code when they are read ({pickles[0]}): "
            f"{_resave('the model')}, or take a revision with safetensors (on the hub, of a pull request: @refs/pr/N)"
        )
    if folders := [name for name in names if name.endswith(f"/{CONFIG_FILE}")]:
        return f"holds no model, but its folder {PurePosixPath(folders[0]).parent} does: give the path of that"
    if CONFIG_FILE not in here:
        return f"has no {CONFIG_FILE}: get the whole model, or name its folder"
    if tensors := _ending(here, _SAFE):
        return (
            f"holds neither {SINGLE_FILE} nor {INDEX_FILE}, by which transformers finds weights, but {tensors[0]}: "
            "get the index too, or rename a file that is all of the model"
        )
    if foreign := _ending(here, *_FOREIGN):
        return f"holds weights for other programs alone ({foreign[0]}): get the model in safetensors"
    return f"holds neither {SINGLE_FILE} nor {INDEX_FILE}: get the whole model, or choose another model or revision"


def _resave(what: str) -> str:
    return f"load {what} once with transformers and save it with save_pretrained"


def _ending(names: Sequence[str], *suffixes: str) -> list[str]:
    return [name for name in names if name.lower().endswith(suffixes)]


def _is_inside(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and not {"\\", ":", "\0"} & {*name}
