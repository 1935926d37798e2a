"""transformers' own tests of `generate` and of its text pipeline, run against a small Llama through two served spans.

They need `pip install parameterized`. They are not in transformers' wheel: name a checkout of about the installed
version. It prints the number of tests that passed, and those that do not apply; `tests/bench/FIGURES.md` has them.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from bench.kit.options import Options

NOT_APPLICABLE = {
    "attentions are with the servers": ["test_generate_compilation_all_outputs"],
    "torch.compile of a client has nothing to compile": ["test_generate_compile_model_forward_fullgraph"],
    "servers compute causal attention, so that trees and packed rows are refused": ["test_custom_4d_attention_mask"],
}
RENAMED = {'"dynamic_full"': '"dynamic"'}
"""Names that a checkout of 5.2 has for those of 5.24."""
SHARED = {
    "test_modeling_common.py": ("floats_tensor", "ids_tensor"),
    "pipelines/test_pipelines_common.py": ("ANY",),
}
"""The names that these tests use of modules that import everything else."""
SERVED = """
import tempfile
import unittest
from contextlib import ExitStack

import torch
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM
from transformers.pipelines import TextGenerationPipeline

import llmnode
from llmnode.client.causal_lm import DistributedModelForCausalLM
from llmnode.models.embedded import open_embedded
from llmnode.node import Node

from .generation.test_utils import GenerationTesterMixin
from .pipelines.test_pipelines_text_generation import TextGenerationPipelineTests as PipelineTests
from .test_modeling_common import ids_tensor

OPEN = ExitStack()


def serve(config, **_options):
    torch.manual_seed(0)
    folder = OPEN.enter_context(tempfile.TemporaryDirectory())
    LlamaForCausalLM(config).save_pretrained(folder)
    options = {"worker": "thread", "threads": 1, "kv_tokens": 4000}
    first = OPEN.enter_context(Node(folder, blocks="0:1", **options))
    OPEN.enter_context(Node(folder, blocks="1:2", peers=first.addresses, **options))
    model = OPEN.enter_context(llmnode.connect(folder, peers=first.addresses))
    model.to = lambda *_args, **_options: model  # tests ask for devices and dtypes: those of blocks are the servers'
    return model


class Served(DistributedModelForCausalLM, GenerationMixin):
    _can_compile_fullgraph = True  # or no test of a static cache runs

    def __new__(cls, config, **options):
        return serve(config)

    _from_config = classmethod(lambda cls, config, **options: serve(config))


class Tester:
    batch_size, seq_length = 13, 7

    def prepare_config_and_inputs_for_common(self):
        sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        ids = ids_tensor([self.batch_size, self.seq_length], 99)
        config = LlamaConfig(**sizes, **heads, max_position_embeddings=512, pad_token_id=0)
        return config, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class ServedTest(GenerationTesterMixin, unittest.TestCase):
    all_generative_model_classes = (Served,)
    has_attentions = False
    model_tester = Tester()

    def tearDown(self):
        OPEN.close()

    def _check_hidden_states_for_generate(
        self, batch_size, hidden_states, prompt_length, output_length, config, **_more
    ):
        self.assertEqual(len(hidden_states), output_length - prompt_length)
        for layers in hidden_states:
            self.assertEqual(len(layers), config.num_hidden_layers + 1)
            for layer in (layers[0], layers[-1]):  # the client has these
                self.assertEqual((layer.shape[0], layer.shape[2]), (batch_size, config.hidden_size))

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        held = past_key_values.get_seq_length(), past_key_values.batch_size
        self.assertEqual(held, (seq_length, batch_size))


class PaddingTest(ServedTest):
    has_attentions = True  # or no test of padding and masks runs


for name in dir(PaddingTest):
    if name.startswith("test_") and "padding" not in name and "4d" not in name:
        setattr(PaddingTest, name, None)


class PipelineTest(unittest.TestCase):
    def test_text_generation_pipeline(self):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(open_embedded().path, model_max_length=100_000)
        with ExitStack() as stack:
            first = stack.enter_context(Node(blocks="0:15", worker="thread"))
            stack.enter_context(Node(blocks="15:30", worker="thread", peers=first.addresses))
            model = stack.enter_context(llmnode.connect(peers=first.addresses))
            pipeline = TextGenerationPipeline(model=model, tokenizer=tokenizer, max_new_tokens=5)
            RUN_PIPELINE_TEST(self, pipeline, None)


RUN_PIPELINE_TEST = PipelineTests.run_pipeline_test
del GenerationTesterMixin, PipelineTests  # else pytest would run them as they are
"""


def add(parser: argparse.ArgumentParser) -> None:
    what = "a checkout of transformers, of about the installed version"
    parser.add_argument("checkout", type=_checkout, metavar="CHECKOUT", help=what)


def _checkout(text: str) -> Path:
    if not (Path(text) / "tests" / "generation").is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no checkout of transformers: it has no tests/generation")
    return Path(text)


def run(options: Options) -> int:
    """Run the tests and print their results. Returns the exit status."""
    checkout = options.checkout
    with tempfile.TemporaryDirectory() as made:
        tests = Path(made, "tests")
        for folder in ("generation", "pipelines"):
            shutil.copytree(checkout / "tests" / folder, tests / folder)
        (tests / "__init__.py").touch()
        utils = tests / "generation" / "test_utils.py"
        text = utils.read_text()
        for former, name in RENAMED.items():
            text = text.replace(former, name)
        utils.write_text(text)
        for module, used in SHARED.items():
            (tests / module).write_text(shared((checkout / "tests" / module).read_text(), used))
        (tests / "test_served.py").write_text(SERVED)
        Path(made, "pytest.ini").write_text("[pytest]\naddopts = -W ignore -p no:cacheprovider\n")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "tests/test_served.py",
            "-q",
            "-rsfE",
            "--tb=line",
            "--show-capture=no",
        ]
        environment = {**os.environ, "LLMNODE_CONFIG": os.devnull}
        ran = subprocess.run(command, check=False, cwd=made, env=environment, text=True, stdout=subprocess.PIPE)
    print(ran.stdout)
    failed = set(re.findall(r"^(?:FAILED|ERROR) \S*?(test_\w+)(?: |$)", ran.stdout, re.MULTILINE))
    for reason, names in NOT_APPLICABLE.items():
        print(f"do not apply, as {reason}: {', '.join(failed.intersection(names)) or 'none'}")
    left = failed.difference(*NOT_APPLICABLE.values())
    if ran.returncode not in (0, 1):
        left.add("pytest itself")
    print(f"failed: {', '.join(sorted(left)) or 'none'}")
    return 1 if left else 0


def shared(source: str, names: Collection[str]) -> str:
    """A module with the `names` that are used of another module."""
    kept = ["import random", "import torch", "from transformers.testing_utils import torch_device"]
    kept.append("global_rng = random.Random()")
    for node in ast.parse(source).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in names:
            kept.append(ast.get_source_segment(source, node) or "")
    return "\n\n".join(kept) + "\n"
