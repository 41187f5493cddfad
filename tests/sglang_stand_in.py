"""An ``sglang.Engine`` that stands in for one, for our server beside it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np

REPLY = (10, 11, 999)


class StandIn:
    """An ``sglang.Engine`` whose answer is REPLY, each part with all tokens so far."""

    def __init__(self, *, ending=None, failure=None, delay=0.0, model_type="qwen2_5_vl"):
        self.calls, self.aborted = [], []
        self.ending, self.failure, self.delay = ending or {"type": "stop", "matched": 999}, failure, delay
        self.server_args = SimpleNamespace(model_path="/m", served_model_name="m")
        config = SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type))
        self.tokenizer_manager = SimpleNamespace(
            model_config=config, max_req_input_len=777, abort_request=lambda rid: self.aborted.append(rid)
        )
        self.closed = False

    async def async_generate(self, **arguments):
        self.calls.append(arguments)
        if self.failure:
            raise self.failure
        return self._parts(arguments)

    async def _parts(self, arguments):
        for count in range(1, len(REPLY) + 1):
            await asyncio.sleep(self.delay)
            last = count == len(REPLY)
            meta = {"prompt_tokens": len(arguments["input_ids"]), "finish_reason": self.ending if last else None}
            if arguments["return_logprob"]:
                meta["output_token_logprobs"] = [(-0.5, id_, None) for id_ in REPLY[:count]]
                tops = [[(-0.5, id_, None)] for id_ in REPLY[:count]]
                meta |= {"output_top_logprobs": tops} if arguments["top_logprobs_num"] else {}
            yield {"output_ids": list(REPLY[:count]), "meta_info": meta}

    def shutdown(self):
        self.closed = True


def array(data, shape, dtype):
    return np.frombuffer(data, dtype).reshape(shape)
