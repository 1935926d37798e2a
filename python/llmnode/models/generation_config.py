"""How a model generates, by its folder: which tokens end an answer, and all else that its publisher has said of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.errors import ModelError
from llmnode.models.sources.damage import one_line

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from llmnode.models.sources.folder import ModelFolder


def generation_config(folder: ModelFolder) -> GenerationConfig:
    """The same as transformers' `from_pretrained`: from its file or, without one, from the model's config.

    Raises ModelError if transformers refuses the file.
    """
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder.path, local_files_only=True)
    except OSError:
        return GenerationConfig.from_pretrained(
            folder.path, config_file_name=folder.config_file.name, _from_model_config=True, local_files_only=True
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{folder.path / 'generation_config.json'} cannot be used: {one_line(error)}") from error
