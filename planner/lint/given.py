"""What the file does not say itself: the GPU, the model and the degree it is of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from planner.specs.base import Document, load_preset, preset_names, resolve, validate
from planner.specs.gpu import Gpu
from planner.specs.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Given:
    """GPU, model and tensor-parallel degree where the file is silent."""

    gpu: Gpu | None = None
    model: ModelSpec | None = None
    tp: int = 1

    @classmethod
    def of(cls, gpu: str | None, model: str | None, tp: int = 1) -> Given:
        """Return what flags mean: a preset's name or alias, or a file. Raises InputError."""
        return cls(
            (find_gpu(gpu) or validate(Gpu, resolve("gpus", Document(gpu, "--gpu")))) if gpu else None,
            (find_model(model) or validate(ModelSpec, resolve("models", Document(model, "--model"))))
            if model
            else None,
            tp,
        )

    def gpu_called(self, name: str) -> Gpu | None:
        """Return the GPU that a file names; what was given where no preset is called so."""
        return find_gpu(name) or self.gpu

    def model_called(self, name: str) -> ModelSpec | None:
        """Return the model that a file names; what was given where no preset is called so."""
        return find_model(name) or self.model


def find_gpu(name: str) -> Gpu | None:
    """Return the shipped GPU of that name or alias, `_` and blanks for `-`; None when there is none."""
    return _find("gpus", Gpu, name.strip().replace("_", "-"))


def find_model(name: str) -> ModelSpec | None:
    """Return the shipped model of that name or alias; None when there is none."""
    return _find("models", ModelSpec, name.strip())


@lru_cache(maxsize=256)
def _find(family: str, kind: Any, name: str) -> Any:
    return next((preset for preset in _presets(family, kind) if preset.is_called(name)), None)


@lru_cache(maxsize=8)
def _presets(family: str, kind: Any) -> tuple[Any, ...]:
    documents = (load_preset(family, name) for name in preset_names(family))
    return tuple(validate(kind, document) for document in documents if document is not None)
