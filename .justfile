# Short names for the commands of daily work; node/llmnode and tests/run need no just.

python := env("LLMNODE_VENV", justfile_directory() / ".venv") / "bin/python"

_default:
    @just --list

# Make or update .venv, with the tools
setup:
    node/llmnode setup --dev

# Lint, types, layers, Rust and Python tests; with arguments: pytest alone
test *args:
    tests/run {{args}}

# Everything but the tests
lint:
    tests/run --lint

# Put the code in its format, and mend what can be mended
fmt: setup
    {{python}} -m ruff check --fix .
    {{python}} -m ruff format .
    cargo fmt

# A benchmark, e.g. `just bench swarm --json`
bench name *args:
    tests/bench/run {{name}} {{args}}

# Pages of the public API, by default in target/docs
docs *args:
    tests/docs/run {{args}}
