"""A checkpoint by its id on the Hugging Face hub: its small files, in huggingface_hub's own cache."""

from __future__ import annotations

import re
from pathlib import Path

from pixelgate._version import __version__
from pixelgate.errors import CheckpointError
from pixelgate.models.checkpoint import ADDITIONAL_TEMPLATES, FILES

# namespace/name, as the hub allows it
_ID = re.compile(r"(?=.{3,96}\Z)(?!.*(--|\.\.))\w([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)


def is_id(checkpoint: str | Path) -> bool:
    """Whether ``checkpoint`` is meant as a hub id: it is shaped like one, and no directory is called so."""
    return isinstance(checkpoint, str) and _ID.fullmatch(checkpoint) is not None and not Path(checkpoint).is_dir()


def find(checkpoint: str | Path, revision: str | None = None) -> Path:
    """The directory of a checkpoint that is given by its path or its hub id; ``revision`` goes with an id only.

    Of an id the files that are read here are downloaded, unless the cache has them; never weights.
    Raises CheckpointError.
    """
    if is_id(checkpoint):
        return _download(str(checkpoint), revision)
    if revision is not None:
        found = "a directory" if Path(checkpoint).is_dir() else "neither that nor a directory"
        raise CheckpointError(f"revision {revision!r} goes with a hub id; {checkpoint} is {found}")
    return Path(checkpoint)


def _download(model: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{model} is no directory here, and the Hugging Face hub is not asked without huggingface_hub: "
            "pip install 'pixelgate[hub]'"
        ) from None
    of_revision = f" at revision {revision!r}" if revision else ""
    # The library's own texts hold addresses, which may be signed: not one of them is passed on.
    try:
        folder = Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=[*FILES, f"{ADDITIONAL_TEMPLATES}/*.jinja"],
                library_name="pixelgate",
                library_version=__version__,
            )
        )
    except errors.GatedRepoError:
        raise CheckpointError(
            f"access to {model} is restricted on the hub: ask for it there, and log in by HF_TOKEN or `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"there is no directory {model} here, and no such model on the hub; if it is private, log in by HF_TOKEN "
            "or `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{model} has no branch, tag or commit {revision!r} on the hub") from None
    except errors.LocalEntryNotFoundError as failure:
        offline = isinstance(failure.__cause__, errors.OfflineModeIsEnabled)
        trouble = "HF_HUB_OFFLINE is set" if offline else "the Hugging Face hub cannot be reached or fails"
        raise CheckpointError(f"{trouble}, and the cache lacks files of {model}{of_revision}") from None
    except errors.HfHubHTTPError as failure:
        status = failure.response.status_code
        hint = "; it does not accept the token of HF_TOKEN or `hf auth login`" if status == 401 else ""
        raise CheckpointError(f"the hub answered with HTTP status {status} when asked for {model}{hint}") from None
    except Exception as failure:  # it lets through those of the HTTP client and of the storage client below it
        reason = f": {failure.strerror}" if isinstance(failure, OSError) and failure.strerror else ""
        raise CheckpointError(f"the files of {model}{of_revision} could not be downloaded{reason}") from None
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{model}{of_revision} has no config.json on the hub, so it is no checkpoint of a model")
    return folder
