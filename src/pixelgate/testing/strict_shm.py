"""Tensors in shared memory as a vLLM engine takes them: read once, and unlinked."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.testing.strict_layouts import Refused

_DIRECTORY = Path("/dev/shm")
_MIN_BYTES = 64 << 10


def namespace() -> str:
    """What an engine says of the /dev/shm that it sees."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot}:{_DIRECTORY.stat().st_dev}"


def take_in(mm: pb.MultimodalInputs) -> Iterator[str]:
    """Put the payloads of ``mm`` into the message itself; yields the names of the files that are gone.

    Raises Refused for a file that is not as it must be, OSError for one that cannot be read.
    """
    for tensor in (mm.pixel_values, *mm.model_specific_tensors.values()):
        if tensor.WhichOneof("payload") == "shm":
            name = tensor.shm.name
            tensor.inline = _read(tensor.shm)
            yield name


def _read(handle: common_pb2.ShmHandle) -> bytes:
    name, nbytes = handle.name, handle.nbytes
    if not name or "/" in name or name.startswith("."):
        raise Refused(f"{name!r} is no name of a file in {_DIRECTORY}")
    file = os.open(_DIRECTORY / name, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) != 0o600:
            raise Refused(f"{name} is no regular file of mode 0600")
        if nbytes < _MIN_BYTES or handle.offset or status.st_size != nbytes:
            raise Refused(f"{name} has {status.st_size} bytes, its handle {nbytes} from {handle.offset}")
        data = b""
        while chunk := os.read(file, nbytes):
            data += chunk
    finally:
        os.close(file)
    (_DIRECTORY / name).unlink()
    return data
