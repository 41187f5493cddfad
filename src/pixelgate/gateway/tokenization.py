"""POST /tokenize and /detokenize, as vLLM has them: nothing is sent to an engine."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from pixelgate.errors import RequestError, TooLargeError
from pixelgate.gateway.chat import Chat, plan_pictures, render_prompt
from pixelgate.gateway.endpoint import Endpoint, Exchange
from pixelgate.gateway.pictures import Pictures
from pixelgate.gateway.replies import as_json
from pixelgate.gateway.services import Held
from pixelgate.gateway.wire import decoded
from pixelgate.prompt.tokens import Tokenizer

MAX_PROMPT_CHARACTERS = 4 << 20
MAX_TOKENS = 1 << 20


class TokenizeRequest(msgspec.Struct, frozen=True):
    """The body of POST /tokenize: a prompt, or a chat request with ``messages``."""

    model: str
    prompt: str | None = None
    messages: msgspec.Raw = msgspec.Raw()
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True):
    """The body of POST /detokenize."""

    model: str
    tokens: list[int]


_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


class Tokenize(Endpoint):
    """Text to token ids. Of messages they are what an engine would get, pictures expanded."""

    path = "/tokenize"

    def begin(self, exchange: Exchange, body: bytes, held: Held) -> Coroutine[Any, Any, int]:
        """Read the body."""
        request = decoded(_TOKENIZE, body)
        has_messages = bytes(request.messages) not in (b"", b"null")
        if has_messages == (request.prompt is not None):
            raise RequestError("give either prompt or messages", param="prompt")
        if request.prompt is None:
            return self._messages(exchange, request, self.open_chat(exchange, body, held))
        if len(request.prompt) > MAX_PROMPT_CHARACTERS:
            raise TooLargeError(f"prompt may have at most {MAX_PROMPT_CHARACTERS} characters", param="prompt")
        return self._prompt(exchange, request, request.prompt)

    async def _messages(self, exchange: Exchange, request: TokenizeRequest, chat: Chat) -> int:
        await plan_pictures(chat, Pictures(self.services, chat.processor, chat.facts, chat.held))
        prompt = await render_prompt(chat, self.services)
        return await self._reply(exchange, request, prompt.token_ids, framed=bool(request.add_special_tokens))

    async def _prompt(self, exchange: Exchange, request: TokenizeRequest, prompt: str) -> int:
        model, _ = self.model(exchange, request.model)
        ids = await self.services.errands.run(exchange.owner, whole_prompt, model.tokenizer, prompt)
        return await self._reply(exchange, request, ids, framed=request.add_special_tokens is not False)

    async def _reply(self, exchange: Exchange, request: TokenizeRequest, ids: Sequence[int], *, framed: bool) -> int:
        model, facts = self.model(exchange, request.model)
        before, after = model.tokenizer.framing if framed else ((), ())
        tokens = [*before, *ids, *after]
        texts = None
        if request.return_token_strs:
            texts = await self.services.errands.run(exchange.owner, lambda: [*map(model.tokenizer.token_text, tokens)])
        answer = {"count": len(tokens), "max_model_len": facts.max_context, "tokens": tokens, "token_strs": texts}
        await exchange.reply(as_json(answer))
        return 200


class Detokenize(Endpoint):
    """Token ids to text, special tokens included."""

    path = "/detokenize"

    def begin(self, exchange: Exchange, body: bytes, held: Held) -> Coroutine[Any, Any, int]:
        """Read the body."""
        request = decoded(_DETOKENIZE, body)
        model, _ = self.model(exchange, request.model)
        if len(request.tokens) > MAX_TOKENS:
            raise TooLargeError(f"tokens may hold at most {MAX_TOKENS} ids", param="tokens")
        return self._text(exchange, model.tokenizer, request.tokens)

    async def _text(self, exchange: Exchange, tokenizer: Tokenizer, ids: Sequence[int]) -> int:
        text = await self.services.errands.run(exchange.owner, text_of, tokenizer, ids)
        await exchange.reply(as_json({"prompt": text}))
        return 200


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids, special tokens included. Raises RequestError for one outside the vocabulary."""
    size = tokenizer.vocab_size
    if (wrong := next((i for i, id_ in enumerate(ids) if not 0 <= id_ < size), None)) is not None:
        raise RequestError(f"tokens[{wrong}] must be from 0 to {size - 1}", param=f"tokens[{wrong}]")
    return tokenizer.decode(ids, skip_special_tokens=False)


def whole_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a prompt that somebody has written whole: special tokens in it are tokens. Raises RequestError."""
    pieces = tokenizer.specials.split(prompt)
    try:
        return tokenizer.encode(tokenizer.special_ids[piece] if i % 2 else piece for i, piece in enumerate(pieces))
    except RequestError as error:
        error.param = "prompt"
        raise
