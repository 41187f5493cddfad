"""A model without a checkpoint of its own takes the files that its engine runs with."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pixelgate.engines.connect import remote, takes_chat
from pixelgate.engines.discovery import addresses
from pixelgate.engines.engine import EngineWithFiles
from pixelgate.errors import CheckpointError, ConfigError, EngineError, EngineUnavailableError, PixelgateError
from pixelgate.gateway.passthrough import chat_fleet
from pixelgate.gateway.settings import ModelSettings
from pixelgate.gateway.waiting import until_available
from pixelgate.models.archive import unpack

MAX_ARCHIVE_BYTES = 64 << 20
_GIVE = "give CHECKPOINT, a directory or hub id"

log = logging.getLogger(__name__)


@contextmanager
def complete(model: ModelSettings, wait: float) -> Iterator[ModelSettings]:
    """The settings of ``model`` with a checkpoint and a name, asking its engines for up to ``wait`` seconds.

    What they give is in a directory that only this user can read, and that exists no longer than the block.
    Raises ConfigError or CheckpointError, also those of the block, which speak of the engine then.
    """
    urls = [url for url in model.engines if not takes_chat(url)]
    if model.checkpoint or (not urls and model.name):
        yield model
        return
    if not urls:
        yield replace(model, name=asyncio.run(_name(model, wait)))
        return
    log.info("asking %s for the files of the model", ", ".join(urls))
    url, name, archive = asyncio.run(_received(urls, wait))
    if not (model.name or name):
        raise ConfigError(f"{url} does not say what its model is called: give it a name (--name)")
    with TemporaryDirectory(prefix="pixelgate-") as folder:
        try:
            found = unpack(archive, Path(folder))
            if found.isdisjoint(("preprocessor_config.json", "processor_config.json")):
                raise CheckpointError(f"{folder} lacks preprocessor_config.json; {_GIVE}")
            yield replace(model, checkpoint=folder, name=model.name or name)
        except PixelgateError as failure:
            failure.message = f"{url}: {failure.message.replace(folder, 'its archive')}"
            raise


async def _name(model: ModelSettings, wait: float) -> str:
    """What a model is called by the first of its engines that is up, where all prepare pictures themselves."""
    fleet = chat_fleet(model)
    try:
        facts = await until_available(fleet.connect, wait, f"engine at {', '.join(model.engines)}")
    finally:
        await fleet.close()
    return facts.model_name


async def _received(entries: Sequence[str], wait: float) -> tuple[str, str, bytes]:
    """The address, the model's name and the files of the first engine that is up."""
    return await until_available(lambda: _first(entries), wait, f"engine at {', '.join(entries)}")


async def _first(entries: Sequence[str]) -> tuple[str, str, bytes]:
    for entry in entries:
        try:
            urls = await addresses(entry)
        except EngineUnavailableError:
            continue
        for engine in map(remote, urls):
            try:
                facts = await engine.describe()
                return engine.url, facts.model_name, await _archive(engine)
            except EngineUnavailableError:
                continue
            finally:
                await engine.close()
    raise EngineUnavailableError("No engine can be reached.")


async def _archive(engine: EngineWithFiles) -> bytes:
    try:
        return await engine.archive(MAX_ARCHIVE_BYTES)
    except EngineUnavailableError:
        raise
    except EngineError as failure:
        raise ConfigError(
            f"{engine.url} does not give the files of its model: {failure.message} An engine can only if it was "
            f"started with a directory; {_GIVE}"
        ) from None
