"""A decoder process that does what a picture says behind its last exclamation mark, as a broken library might."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from pixelgate.media import decoder_process

decode_rows = decoder_process.decoder.decode_rows


def misbehave(data, policy, backend):
    match data.rpartition(b"!")[2]:
        case b"abort":
            os.abort()
        case b"segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case b"leave":
            os._exit(0)
        case b"hang":
            while True:
                pass
        case b"five channels":
            return np.zeros((1, 1, 5), np.uint8)
        case b"too many":
            return np.zeros((1, policy.max_pixels + 1, 3), np.uint8)
        case b"half":
            decoder_process.ANSWER = Cut()
        case b"tell":
            raise decoder_process.DecodeError(f"{[name for name in os.environ if name[0] == 'P']} {policy!r}")
        case b"slow":
            time.sleep(0.5)
            return np.full((2, 3, 3), 7, np.uint8)
    return decode_rows(data, policy, backend)


class Cut:
    """Says that there is a row, and leaves."""

    def pack(self, *_):
        os.write(int(decoder_process.sys.argv[1]), bytes((0, 3, 1, 0, 0, 0, 1, 0, 0, 0)))
        os._exit(0)


decoder_process.decoder.decode_rows = misbehave
decoder_process.main()
