"""`python -m llmnode.node`."""

from llmnode.node.cli import run

run()
