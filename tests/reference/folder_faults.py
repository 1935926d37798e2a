"""Faults of people's model folders, in files or beside them: a random source puts each into a folder.

A fault that cannot be done to a folder, as a shard to one that has none, does nothing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from llmnode.models.sources.checkpoint import ADAPTER_FILE, CONFIG_FILE, INDEX_FILE, SINGLE_FILE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

    Fault = Callable[[Path, Random], None]

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32\nsize 16\n"
PAGE = "<!DOCTYPE html>\n<html><body>Sign in</body></html>\n"
ODD: tuple[Any, ...] = (
    *(None, -1, 0, 1, 3, 2.5, "8", "x", True, [], {}, [1, 2], {"a": 1}),
    *(float("nan"), float("inf"), 1e30),
)
OPTIONS = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size"),
    *("num_hidden_layers", "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling"),
    *("tie_word_embeddings", "attention_bias", "dtype", "torch_dtype", "architectures", "model_type", "pad_token_id"),
    *("rope_parameters", "quantization_config", "auto_map", "sliding_window", "layer_types", "is_decoder", "n_head"),
    *("n_positions", "activation_function", "use_cache", "id2label", "num_local_experts"),
    *("num_experts_per_tok", "transformers_weights", "torchscript", "pruned_heads", "transformers_version"),
)
LARGE = {"hidden_size", "n_embd", "intermediate_size", "vocab_size"}
"""Without them transformers makes up gigabytes before it refuses."""
SIBLINGS = ("llama", "mistral", "qwen2", "mixtral")
DTYPES = {
    "harmless": (torch.float16, torch.bfloat16, torch.float64),
    "odd": (torch.int8, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
}


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.safetensors"))


def _shards(path: Path) -> list[Path]:
    return sorted(path.glob("model-*-of-*.safetensors"))


def _some_file(path: Path, random: Random) -> Path | None:
    present = [each for each in (*_files(path), path / CONFIG_FILE, path / INDEX_FILE) if each.is_file()]
    return random.choice(present) if present else None


def _changed(change: Callable[[dict[str, torch.Tensor], Random], None]) -> Fault:
    """A fault that changes the tensors of a file."""

    def fault(path: Path, random: Random) -> None:
        if not (files := [each for each in _files(path) if each.is_file()]):
            return
        file = random.choice(files)
        try:
            tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        except (SafetensorError, OSError):
            return
        if tensors:
            change(tensors, random)
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})

    return fault


def _json(file: str, change: Callable[[dict[str, Any], Random], None]) -> Fault:
    def fault(path: Path, random: Random) -> None:
        try:
            found = json.loads((path / file).read_bytes())
        except (OSError, ValueError, RecursionError):
            return
        if isinstance(found, dict):
            change(found, random)
            (path / file).write_text(json.dumps(found))

    return fault


def _replaced(content: Callable[[bytes, Random], bytes]) -> Fault:
    """A file by what the network or an editor made of it."""

    def fault(path: Path, random: Random) -> None:
        if (file := _some_file(path, random)) is not None:
            file.write_bytes(content(file.read_bytes(), random))

    return fault


def _of_shards(change: Callable[[list[Path], Random], None]) -> Fault:
    def fault(path: Path, random: Random) -> None:
        if len(shards := [each for each in _shards(path) if each.is_file()]) > 1:
            change(shards, random)

    return fault


def _swap(shards: list[Path], random: Random) -> None:
    one, other = random.sample(shards, 2)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _copy_over(shards: list[Path], random: Random) -> None:
    one, other = random.sample(shards, 2)
    other.write_bytes(one.read_bytes())


def _noise(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other weights of the same names."""
    return {name: 0.7 * tensor.float() + 0.01 for name, tensor in tensors.items()}


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        return dict(load_file(file))
    except (SafetensorError, OSError):
        return {}


def _all(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in _files(path) for name, tensor in _read(file).items()}


def _older_index(path: Path, _random: Random) -> None:
    """Beside what is there, with files of its own."""
    if tensors := _all(path):
        save_file(_noise(tensors), path / "old-00001-of-00001.safetensors", {"format": "pt"})
        if not (path / INDEX_FILE).exists():
            weight_map = dict.fromkeys(tensors, "old-00001-of-00001.safetensors")
            (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _newer_single(path: Path, _random: Random) -> None:
    """One file beside an index, which is then the older one."""
    if not (path / SINGLE_FILE).exists() and (tensors := _all(path)):
        save_file(_noise(tensors), path / SINGLE_FILE, {"format": "pt"})


def _variant(path: Path, _random: Random) -> None:
    for file in (SINGLE_FILE, INDEX_FILE):
        if (path / file).is_file():
            stem, _, suffix = file.rpartition(".")
            (path / f"{stem}.fp16.{suffix}").write_bytes((path / file).read_bytes())


def _only_variant(path: Path, random: Random) -> None:
    _variant(path, random)
    for file in (SINGLE_FILE, INDEX_FILE):
        if (path / file).is_file():
            (path / file).unlink()


def _leftovers(path: Path, random: Random) -> None:
    for name in random.sample(["README.md", "optimizer.pt", "training_args.bin", "model.onnx", "x.gguf", "a.bin"], 3):
        (path / name).write_bytes(b"\x80\x02 left over")
    save_file({"lm_head.weight": torch.ones(3)}, path / "model-99999-of-99999.safetensors")
    (path / "original").mkdir(exist_ok=True)
    (path / "original" / CONFIG_FILE).write_text("{")


def _in_a_folder(path: Path, random: Random) -> None:
    """A shard, which the index names there."""
    try:
        index = json.loads((path / INDEX_FILE).read_bytes())
        file = random.choice(sorted(set(index["weight_map"].values())))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return
    if (path / file).is_file():
        (path / "sub").mkdir(exist_ok=True)
        (path / file).rename(path / "sub" / file.replace("/", "-"))
        moved = {name: f"sub/{file.replace('/', '-')}" for name, each in index["weight_map"].items() if each == file}
        index["weight_map"].update(moved)
        (path / INDEX_FILE).write_text(json.dumps(index))


def _named(path: Path, random: Random) -> None:
    """By the config, whatever else is there."""
    if present := [each for each in (*_files(path), path / INDEX_FILE) if each.is_file()]:
        name = random.choice(present).relative_to(path).as_posix()
        _json(CONFIG_FILE, lambda config, _random: config.update(transformers_weights=name))(path, random)


def _unlisted(index: dict[str, Any], random: Random) -> None:
    """Some tensors of files that it names for others: they are read all the same."""
    weight_map = index.get("weight_map")
    if isinstance(weight_map, dict) and len(weight_map) > 2:
        for name in random.sample(sorted(weight_map), 2):
            if list(weight_map.values()).count(weight_map[name]) > 1:
                del weight_map[name]


def _without_a_file(index: dict[str, Any], random: Random) -> None:
    weight_map = index.get("weight_map")
    if isinstance(weight_map, dict) and weight_map:
        gone = random.choice(sorted(map(str, weight_map.values())))
        index["weight_map"] = {name: file for name, file in weight_map.items() if file != gone}


def _gone(then: Callable[[Path], None]) -> Fault:
    def fault(path: Path, random: Random) -> None:
        if (file := _some_file(path, random)) is not None:
            file.unlink()
            then(file)

    return fault


def _pickled(path: Path, _random: Random) -> None:
    if tensors := _all(path):
        for file in (*_files(path), path / INDEX_FILE):
            if file.is_file():
                file.unlink()
        torch.save(tensors, path / "pytorch_model.bin")


def _adapter(path: Path, _random: Random) -> None:
    (path / ADAPTER_FILE).write_text(json.dumps({"base_model_name_or_path": "org/base", "peft_type": "LORA"}))


def _prefix(name: str) -> str:
    """With or without what comes before the decoder."""
    first, _, rest = name.partition(".")
    return rest if first in ("model", "transformer") else f"model.{name}"


def _renamed(tensors: dict[str, torch.Tensor], random: Random) -> None:
    for name in random.sample(sorted(tensors), min(3, len(tensors))):
        tensors[_prefix(name)] = tensors.pop(name)


def _twice(tensors: dict[str, torch.Tensor], random: Random) -> None:
    """Under another name too, with other values: one of them is taken."""
    for name in random.sample(sorted(tensors), min(3, len(tensors))):
        tensors.setdefault(_prefix(name), tensors[name].float() + 1)


def _dropped(tensors: dict[str, torch.Tensor], random: Random) -> None:
    del tensors[random.choice(sorted(tensors))]


def _reshaped(tensors: dict[str, torch.Tensor], random: Random) -> None:
    name = random.choice(sorted(tensors))
    tensor = tensors[name]
    made = (tensor[:-1], tensor.t() if tensor.ndim == 2 else tensor[:1], tensor[None], tensor.flatten(), tensor[:0])
    tensors[name] = random.choice(made)


def _extra(tensors: dict[str, torch.Tensor], random: Random) -> None:
    name = random.choice(
        ["model.layers.7.mlp.up_proj.weight", "value_head", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    )
    tensors.setdefault(name, torch.ones(4))


def _recast(kind: str) -> Callable[[dict[str, torch.Tensor], Random], None]:
    def change(tensors: dict[str, torch.Tensor], random: Random) -> None:
        for name in random.sample(sorted(tensors), min(4, len(tensors))):
            tensors[name] = tensors[name].to(random.choice(DTYPES[kind]))

    return change


def _not_a_number(tensors: dict[str, torch.Tensor], random: Random) -> None:
    tensor = tensors[random.choice(sorted(tensors))]
    if tensor.numel() and tensor.is_floating_point() and tensor.element_size() > 1:
        tensor.view(-1)[0] = random.choice([float("nan"), float("inf")])


def _again_in_another(shards: list[Path], random: Random) -> None:
    """A tensor in two shards, of other values: that of the later one is taken."""
    one, other = random.sample(shards, 2)
    if (given := _read(one)) and (taking := _read(other)):
        name = random.choice(sorted(given))
        save_file({**taking, name: given[name].float() + 1}, other, {"format": "pt"})


def _head(tensors: dict[str, torch.Tensor], random: Random) -> None:
    """Stored beside the embedding, or missing."""
    if tensors.pop("lm_head.weight", None) is None and (names := [each for each in tensors if "emb" in each]):
        tensors["lm_head.weight"] = tensors[random.choice(names)] * random.choice([1, 2])


def _odd_option(config: dict[str, Any], random: Random) -> None:
    config[random.choice(OPTIONS)] = random.choice(ODD)


def _no_option(config: dict[str, Any], random: Random) -> None:
    if options := sorted(config.keys() - LARGE):
        del config[random.choice(options)]


def _other_option(config: dict[str, Any], random: Random) -> None:
    """A part that a model might have."""
    rope = {
        "rope_theta": random.choice([100.0, 5e5]),
        "rope_type": random.choice(["default", "linear", "dynamic", "yarn"]),
    }
    change: dict[str, Any] = random.choice(
        [
            {"tie_word_embeddings": not config.get("tie_word_embeddings")},
            {"rms_norm_eps": 0.1},
            {"hidden_act": "gelu"},
            {"rope_parameters": {**rope, "factor": random.choice([2, 4.0]), "original_max_position_embeddings": 16}},
            {"rope_scaling": {**rope, "factor": 2.0, "type": rope.pop("rope_type")}},
            {"num_hidden_layers": random.choice([1, 3])},
            {"head_dim": 16},
            {"num_key_value_heads": 4},
            {"dtype": "bfloat16"},
            {"architectures": ["LlamaForSequenceClassification"]},
            {"quantization_config": {"quant_method": random.choice(["gptq", "awq", "fp8", "new"]), "bits": 4}},
            {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}},
            {"model_type": random.choice(["t5", "mpt", "new9", "", *(SIBLINGS if "hidden_size" in config else ())])},
            {"sliding_window": 4},
        ]
    )
    config.update(change)


def _twice_in_json(path: Path, random: Random) -> None:
    """An option, of which JSON takes the last."""
    try:
        text = (path / CONFIG_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return
    key = random.choice(["rms_norm_eps", "vocab_size", "tie_word_embeddings", "model_type"])
    (path / CONFIG_FILE).write_text(text.replace("{", f'{{"{key}": 1, ', 1))


HARMLESS: dict[str, Fault] = {
    "an older index": _older_index,
    "a newer single file": _newer_single,
    "a variant beside it": _variant,
    "leftovers": _leftovers,
    "a shard in a folder": _in_a_folder,
    "named by the config": _named,
    "not all in the index": _json(INDEX_FILE, _unlisted),
    "swapped shards": _of_shards(_swap),
    "tensors without the prefix": _changed(_renamed),
    "tensors under two names": _changed(_twice),
    "tensors in two shards": _of_shards(_again_in_another),
    "extra tensors": _changed(_extra),
    "another precision": _changed(_recast("harmless")),
    "not a number": _changed(_not_a_number),
}
"""With these, and no others, what transformers loads must be loaded, and be the same."""

FAULTS: dict[str, Fault] = HARMLESS | {
    "only a variant": _only_variant,
    "a pointer of git-lfs": _replaced(lambda _content, _random: POINTER.encode()),
    "a web page": _replaced(lambda _content, _random: PAGE.encode()),
    "cut off": _replaced(lambda content, random: content[: int(len(content) * random.random())]),
    "empty": _replaced(lambda _content, _random: b""),
    "longer": _replaced(lambda content, random: content + random.randbytes(9)),
    "changed bytes": _replaced(lambda content, random: random.randbytes(4) + content[4:]),
    "a byte order mark": _replaced(lambda content, _random: b"\xef\xbb\xbf" + content),
    "of UTF-16": _replaced(lambda content, _random: content.decode("latin-1").encode("utf-16")),
    "a list": _replaced(lambda content, _random: b"[" + content + b"]"),
    "deep": _replaced(lambda _content, _random: b"[" * 100_000),
    "gone": _gone(lambda _file: None),
    "a link to nothing": _gone(lambda file: file.symlink_to("blobs/gone")),
    "a folder in place of a file": _gone(lambda file: file.mkdir()),
    "a shard twice": _of_shards(_copy_over),
    "not all files in the index": _json(INDEX_FILE, _without_a_file),
    "promised in vain": _json(INDEX_FILE, lambda index, _: index.update(weight_map={"x": "model-9.safetensors"})),
    "an index without metadata": _json(INDEX_FILE, lambda index, _: index.pop("metadata", None)),
    "pickled": _pickled,
    "an adapter": _adapter,
    "a tensor dropped": _changed(_dropped),
    "another shape": _changed(_reshaped),
    "another type": _changed(_recast("odd")),
    "a head more or less": _changed(_head),
    "an odd option": _json(CONFIG_FILE, _odd_option),
    "an option less": _json(CONFIG_FILE, _no_option),
    "another option": _json(CONFIG_FILE, _other_option),
    "an option twice": _twice_in_json,
}
