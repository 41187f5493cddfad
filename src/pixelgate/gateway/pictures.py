"""One picture's way: reference -> file -> header -> plan -> tensor, as far as nobody has gone it before."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.engines.engine import EngineFacts
from pixelgate.errors import ImageRefusedError, NotKeptError
from pixelgate.gateway.memory import Known
from pixelgate.gateway.messages import Reference
from pixelgate.gateway.services import SMALL_FILE, Held, Services, naming, together
from pixelgate.media import structure
from pixelgate.pixels.outgoing import outgoing
from pixelgate.pixels.plan import ImagePlan, execute
from pixelgate.processor import Processor


@dataclass(frozen=True)
class Picture:
    """A picture of a request: its file, what it will become, and its identity.

    Without ``data`` the client has only named it: then there is a tensor, or the picture is refused.
    """

    param: str
    data: bytes | None
    known: Known
    plan: ImagePlan
    identity: str


@dataclass(frozen=True)
class Pictures:
    """The pictures of one request, for the engines that ``facts`` are of."""

    services: Services
    processor: Processor
    facts: EngineFacts
    held: Held

    async def obtain_all(self, references: Sequence[Reference]) -> list[Picture]:
        """The pictures of the request in their order, those that it only names when it has brought all others."""
        found: dict[str, Picture] = {}
        for named in (False, True):
            some = [reference for reference in references if (reference.url is None) == named]
            found |= {picture.param: picture for picture in await together(map(self.obtain, some))}
        return [found[reference.param] for reference in references]

    async def tensors(self, pictures: Sequence[Picture], room: int = 0) -> list[NDArray[Any]]:
        """Their finished tensors; those that are only named are looked for when all others have been begun.

        One that is made now has ``room`` bytes before it.
        """
        begun = sorted(pictures, key=lambda picture: picture.data is None)
        tensors = await together(self.tensor(picture, room) for picture in begun)
        found = {picture.param: tensor for picture, tensor in zip(begun, tensors, strict=True)}
        return [found[picture.param] for picture in pictures]

    async def obtain(self, reference: Reference) -> Picture:
        """Fetch a picture and plan it from its header; no pixel is decoded."""
        with naming(reference.param), self.held.phases.span("picture", picture=reference.param):
            data = None if reference.url is None else await self.services.file(reference.url, self.held)
            known = await self._known(data, reference.uuid)
            plan = self.processor.plan(height=known.header.height, width=known.header.width)
            largest = self.facts.max_embeddings_per_image
            if largest is not None and plan.tokens > largest:
                raise ImageRefusedError(
                    f"a picture of {plan.width}x{plan.height} takes {plan.tokens} tokens; "
                    f"the engine accepts at most {largest} for one picture"
                )
            return Picture(reference.param, data, known, plan, self._identity(known, plan))

    async def tensor(self, picture: Picture, room: int) -> NDArray[Any]:
        """A picture's finished tensor: kept from before, or made, once for all who want it now."""
        with naming(picture.param):
            make = None if picture.data is None else partial(self._made, picture, picture.data, room)
            tensor = await self.services.memory.tensor(picture.identity, make)
            if tensor is None:
                raise _forgotten()
        plan = picture.plan
        self.services.metrics.picture(self.held.phases.model, pixels=plan.height * plan.width, tokens=plan.tokens)
        return tensor

    async def _known(self, data: bytes | None, uuid: str | None) -> Known:
        """What is known of a picture from before, or else from its header."""
        memory, owner, decoding = self.services.memory, self.held.owner, self.processor.decoding
        if data is not None:
            small = len(data) <= SMALL_FILE and structure.plain_jpeg(data)
            known = await self.services.errand(owner, self._look, data, at_once=small)
            if isinstance(known, str):  # its digest: only a process of its own may look at the file
                header = await self.services.apart(owner, self.services.isolation.header, data, decoding)
                known = Known(known, header, isolated=True)
                memory.remember(known, decoding)
            if uuid is not None:
                memory.call(owner.client, uuid, known, decoding)
            return known
        called = memory.called(owner.client, uuid, decoding) if uuid is not None else None
        if called is None:
            raise _forgotten()
        return called

    def _look(self, data: bytes) -> Known | str:
        digest, decoding = hashlib.sha256(data).hexdigest(), self.processor.decoding
        known = self.services.memory.known(digest, decoding)
        if known is None:
            if self.services.isolation.takes(data):
                return digest
            known = Known(digest, self.processor.header(data), isolated=False)
            self.services.memory.remember(known, decoding)
        return known

    def _identity(self, known: Known, plan: ImagePlan) -> str:
        """64 hex digits that cover the pixels and everything that is done to them."""
        facts = (self.processor.fingerprint, self.facts.pixel_dtype, plan.height, plan.width, plan.views, known.digest)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    async def _made(self, picture: Picture, data: bytes, room: int) -> NDArray[Any]:
        """Decode a picture and run its plan, on one thread."""
        plan, owner, services = picture.plan, self.held.owner, self.services
        phases = self.held.phases
        about: dict[str, str | int] = {
            "picture": picture.param,
            "width": plan.width,
            "height": plan.height,
            "bytes": len(data),
        }

        def work(isolated: NDArray[np.uint8] | None) -> NDArray[Any]:
            dtype = self.facts.pixel_dtype
            image = isolated
            if image is None:
                with phases.measure("decode", **about):
                    image = self.processor.rgb(data)
            with phases.measure("execute", **about, tokens=plan.tokens):
                return execute(plan, image, outgoing(plan.shape, dtype, room), dtype=dtype)

        with services.pixels.share(owner, phases.waiting("pixels")) as pixels:
            await pixels.take(plan.height * plan.width)
            rows = None
            if picture.known.isolated:
                with phases.measure("decode", **about):
                    rows = await services.apart(owner, services.isolation.rows, data, self.processor.decoding)
            made = await services.threads.run(owner, work, rows)
        services.metrics.tensor_bytes.labels(phases.model).inc(made.nbytes)
        return made


def _forgotten() -> NotKeptError:
    return NotKeptError("the gateway keeps no picture of this uuid, or not any more: send it with its image_url")
