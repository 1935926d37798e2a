"""Called by `node/llmnode` with any Python >= 3.11, which may have no package but its own: standard library only."""

import sys
from pathlib import Path

sys.dont_write_bytecode = True  # the launcher sums up the files of this folder
sys.path.insert(0, str(Path(__file__).parents[1]))  # `python -I` adds no folder by itself

from bootstrap.setup import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
