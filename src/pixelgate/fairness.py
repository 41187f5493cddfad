"""Who waits for something, and whose turn is next: clients take turns, and so do the requests of each client."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

_T = TypeVar("_T")


class Owner(NamedTuple):
    """Whose work something is: the digest of a key or an address, and the request's id."""

    client: str = ""
    request: str = ""


NOBODY = Owner()


class FairQueue(Generic[_T]):
    """First in, first out for each request; a request with two hundred pictures waits for its turn after each."""

    def __init__(self) -> None:
        # Whose turn is next stands first, among the clients and among the requests of each.
        self._clients: dict[str, dict[str, deque[_T]]] = {}

    def __bool__(self) -> bool:
        return bool(self._clients)

    def push(self, owner: Owner, item: _T) -> None:
        """Let an item wait."""
        self._clients.setdefault(owner.client, {}).setdefault(owner.request, deque()).append(item)

    def peek(self) -> _T:
        """The item whose turn is next; the same until it is popped."""
        requests = next(iter(self._clients.values()))
        return next(iter(requests.values()))[0]

    def pop(self) -> _T:
        """Take the item whose turn it is; its client and its request then stand behind all others."""
        client, requests = next(iter(self._clients.items()))
        request, items = next(iter(requests.items()))
        item = items.popleft()
        del self._clients[client], requests[request]
        if items:
            requests[request] = items
        if requests:
            self._clients[client] = requests
        return item

    def remove(self, owner: Owner, item: _T) -> None:
        """Take out an item that waits no more, if it is still there."""
        requests = self._clients.get(owner.client, {})
        items = requests.get(owner.request, deque())
        with suppress(ValueError):
            items.remove(item)
        if not items:
            requests.pop(owner.request, None)
        if not requests:
            self._clients.pop(owner.client, None)

    def is_full_for(self, owner: Owner, most: int) -> bool:
        """Whether the owner's client has as many requests waiting as it may: ``most`` alone, else its share of them.

        A request that is waiting already may wait for more.
        """
        own = self._clients.get(owner.client, {})
        clients = len(self._clients) + (not own)
        return owner.request not in own and len(own) >= max(1, most // clients)
