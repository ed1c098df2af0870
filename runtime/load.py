"""An engine for a model, ready to serve: one call from a source and settings."""

from __future__ import annotations

from runtime.engine import Engine
from runtime.local_executor import LocalExecutor
from runtime.model_files import LoadFormat, ModelFiles, open_model, torch_dtype
from runtime.rank_executor import RankExecutor
from runtime.rank_process import place
from runtime.settings import EngineSettings
from runtime.shard import Shard, check_tp, stages
from runtime.worker import Worker

DEFAULTS = EngineSettings()


def load_engine(
    source: str,
    settings: EngineSettings = DEFAULTS,
    load_format: LoadFormat = "auto",
) -> Engine:
    """Return an engine that serves the model that `source` means (see `runtime.model_files.open_model`).

    One rank runs in this process; several are processes of their own, ended by `Engine.close`. Raises InputError for
    what cannot be served, OutOfMemoryError for what does not fit, RankDiedError when a rank does not come up.
    """
    return load_serving(source, settings, load_format)[0]


def load_serving(
    source: str, settings: EngineSettings, load_format: LoadFormat = "auto"
) -> tuple[Engine, LocalExecutor | RankExecutor]:
    """Return an engine and its executor, which also hands KV over. Raises as `load_engine` does."""
    files = open_model(source, torch_dtype(settings.dtype), load_format)
    executor = load_executor(files, source, settings, load_format)
    return Engine(files.config, executor, settings, files.tokenizer), executor


def load_executor(
    files: ModelFiles, source: str, settings: EngineSettings, load_format: LoadFormat
) -> LocalExecutor | RankExecutor:
    """Return the ranks of an instance, `files` being what `source` means. Raises as `load_engine` does."""
    check_tp(files.config, settings.tp)
    stages(files.config, settings.pp, settings.stage_layers)
    if settings.ranks > 1:
        return RankExecutor(source, load_format, settings)
    whole = Shard(range(files.config.layers), files.config.layers)
    worker = Worker(files.config, files.weights, whole, settings, place(settings, 0))
    return LocalExecutor(worker, settings.kv_blocks, settings.host_blocks)
