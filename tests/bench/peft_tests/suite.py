"""PEFT's tests, out of its source package of the installed version, and the model that they are run with.

They are kept in the user's cache, and are no part of this repository.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from llmnode.errors import ConfigError
from llmnode.machine.cache_folder import cache_folder, make_in_cache

LLAMA = "trl-internal-testing/tiny-random-LlamaForCausalLM"
"""The name by which PEFT's tests ask the hub for their Llama. A folder of this name in the working folder is found
instead."""
MODELS = {
    "llama": LLAMA,
    "gpt2": "peft-internal-testing/tiny-random-GPT2LMHeadModel",
    "qwen2": "peft-internal-testing/tiny-dummy-qwen2",
}
"""The families that servers can have here, and PEFT's models of them. Tests without a model of their own are run with
the Llama."""
_OTHERS = re.compile(r'"((?:hf|peft|trl)-internal-testing/[\w.-]+)"')
"""The names of all models in the tests."""
_FILES = ("test_decoder_models.py", "testing_common.py", "testing_utils.py")
_DOWNLOAD_S = 300


def unpacked(sdist: Path | None = None) -> Path:
    """The folder with the tests of the installed PEFT, out of `sdist` or the cache, or else downloaded.

    Raises ConfigError if they cannot be got.
    """
    installed = version("peft")
    kept = cache_folder("peft-tests", installed)
    if sdist is None and all((kept / name).is_file() for name in _FILES):
        return kept
    make_in_cache(kept)
    with tempfile.TemporaryDirectory() as made:
        file = sdist or _downloaded(installed, Path(made))
        try:
            with tarfile.open(file) as opened:
                for name in _FILES:
                    member = opened.extractfile(f"peft-{installed}/tests/{name}")
                    assert member is not None, "it is a file"
                    (kept / name).write_bytes(member.read())
        except (OSError, KeyError, tarfile.TarError) as error:
            raise ConfigError(f"{file} has no tests of PEFT {installed} ({error}): name its source package") from error
    return kept


def _downloaded(installed: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    try:
        subprocess.run(
            [*command, "--dest", str(folder), f"peft=={installed}"],
            check=True,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_S,
        )
    except (subprocess.SubprocessError, OSError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise ConfigError(
            f"the source package of PEFT {installed} cannot be downloaded ({said[-1] if said else error}): name a file "
            "with --sdist"
        ) from error
    (file,) = folder.glob("peft-*")
    return file


def copy_tests(tests: Path, folder: Path) -> None:
    """A package `tests` in `folder`, in which pytest can run."""
    shutil.copytree(tests, folder / "tests")
    (folder / "tests" / "__init__.py").touch()
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -W ignore -p no:cacheprovider\nmarkers =\n  regression\n")


def name_all(folder: Path, model: str) -> None:
    """Let the `model` in `folder` be found by the name of every model that the tests in it name."""
    served = folder / model
    for name in {each for file in _FILES for each in _OTHERS.findall((folder / "tests" / file).read_text())}:
        if not (link := folder / name).exists():
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(served)


def save_model(folder: Path, family: str, blocks: int) -> None:
    """A small random model with this many `blocks`, whose blocks matter, with the tokenizer of the embedded model.

    The smaller sides of its matrices are 32, since a test adds an adapter of rank 20.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from llmnode.models.embedded import open_embedded

    tokenizer = AutoTokenizer.from_pretrained(open_embedded().path)
    sizes = {"hidden_size": 64, "num_hidden_layers": blocks, "num_attention_heads": 4, "max_position_embeddings": 512}
    if family == "gpt2":  # blocks on servers drop nothing out
        sizes |= {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
    else:
        sizes |= {"intermediate_size": 128, "num_key_value_heads": 2}
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(family, **sizes, **tokens, initializer_range=0.2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
