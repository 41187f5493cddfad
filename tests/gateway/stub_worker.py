"""A worker that needs no engine and starts in no time: `worker.py` as it is, with a server of its own.

A connection sends a letter and gets a line of JSON: for ``w`` who answers, the process' id, the name of its first model
and how many threads it may have; for ``m`` the metrics of all. A name of a model may be what is to happen: "refuses",
"refuses-late", "slow", "lacks" or "dies" in the midst of starting, "serves-and-dies", "stubborn" for one that no polite
word ends, "stuck" for one that takes long to report. ``h`` holds its event loop for a while.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import types

from pixelgate.errors import ConfigError
from pixelgate.gateway import worker


def run(settings, line, sockets, admin):
    match settings.models[0].name:
        case "refuses":
            raise ConfigError("no such model")
        case "lacks":
            raise ImportError("nothing", name="uvicorn")
        case "refuses-late":
            time.sleep(0.3)
            raise ConfigError("it was too late")
        case "slow":
            time.sleep(60)
        case "dies":
            os._exit(7)
    asyncio.run(serve(settings, line, [*sockets, *admin]))


def hold_the_loop():
    time.sleep(60)


async def serve(settings, line, sockets):
    name, end, counted = settings.models[0].name, asyncio.Event(), 0

    async def answer(reader, writer):
        nonlocal counted
        while letter := await reader.read(1):
            counted += 1
            if letter == b"h":
                hold_the_loop()
            said = [os.getpid(), name, settings.threads] if letter == b"w" else await line.summed()
            writer.write(json.dumps(said).encode() + b"\n")
        writer.close()

    def report():
        if name == "stuck":
            time.sleep(0.5)
        return [
            {"name": "answers", "words": "", "kind": "counter", "mode": "sum", "samples": [["answers", {}, counted]]},
            {"name": "up", "words": "", "kind": "gauge", "mode": "sum", "samples": [["up", {"a": "b"}, 1]]},
        ]

    async def drain():
        for server in servers:
            server.close()
        await asyncio.sleep(0.1)
        end.set()

    await line.ready()
    async with line.obeyed(report, drain):
        servers = [await asyncio.start_server(answer, sock=each) for each in sockets]
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: None if name == "stubborn" else end.set())
        line.say("serving")
        if name == "serves-and-dies":
            os._exit(9)
        await end.wait()
        line.say("report", families=report())


if __name__ == "__main__":
    sys.modules["pixelgate.gateway.serve"] = types.SimpleNamespace(run=run)
    sys.exit(worker.main(int(sys.argv[-1])))
