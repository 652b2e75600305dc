"""What a Hugging Face model directory says of itself."""

import json
from pathlib import Path


def model_vocabulary(directory: Path) -> int | None:
    """Size of the model's vocabulary; None where the directory, its configuration or the number is not there.

    Raises:
        ValueError: a configuration that is no JSON object.
    """
    path = directory / "config.json"
    if not path.is_file():
        return None
    try:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
        described = config.get("text_config") or config
        return described.get("vocab_size")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: give a complete model directory") from error
