"""A folder of picture files with expected results, through the library and through a running gateway.

    python tests/media/check_cases.py FOLDER [--hostile SERVER.py]

FOLDER has a manifest.json: {"cases": [{"file", "kind", "how": "file" | "data_url", "mime", "expect": {"outcome",
"size", "points"}, "also_ok", "ok_if", "must_not", "limits"}, ...]}. With --hostile the recipes below run against that
server too, a program that listens on the loopback port it is given. Ends with 1 if anything is not as expected.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from running import error_of, gateway, image, picture, strict_engine

import pixelgate
from pixelgate.errors import PixelgateError
from pixelgate.media import decode, source
from pixelgate.media.policy import MediaPolicy

DEADLINE = 6.0  # the endless body arrives with 12 MB a second
LEAKS = re.compile(r"\b0x[0-9a-f]{6,}|object at|Traceback|127\.0\.0\.1|PIL|aiohttp")
# path, status, and words of the message
RECIPES = [
    ("/redirect?to=http://169.254.169.254/", 400, "not allowed"),
    ("/redirect?to=file:///etc/hostname", 400, "not allowed"),
    ("/redirect?to=http://127.0.0.1:22/", 400, ""),
    ("/redirect?to=http://127.0.0.2:{closed}/", 400, "not allowed"),
    ("/chain/3", 200, ""),
    ("/relative", 200, ""),
    ("/chain/50", 400, "redirects more than 5"),
    ("/loop", 400, "redirects more than 5"),
    ("/need-ua.png", 200, ""),
    ("/404.png", 400, "404"),
    ("/429.png", 400, "429"),
    ("/500.png", 400, "500"),
    ("/204", 400, "204"),
    ("/html200.jpg", 400, "HTML"),
    ("/empty200.png", 400, "empty"),
    ("/flaky.png", 200, ""),
    ("/ok.png", 200, ""),
    ("/octet.png", 200, ""),
    ("/no-type.png", 200, ""),
    ("/chunked.png", 200, ""),
    ("/until-close.png", 200, ""),
    ("/gzip.png", 200, ""),
    ("/cut.png", 400, "broke off"),
    ("/lie-small.png", 400, "no proper HTTP answer"),
    ("/endless.png", 413, "limit of"),
    ("/huge-length.png", 413, "limit of"),
    ("/gzip-bomb.png", 413, "limit of"),
    ("/drip.png", 400, "in time"),
    ("/stall-headers", 400, "in time"),
    ("/stall-body.png", 400, "in time"),
    ("/Case.png", 200, ""),
    ("/case.png", 200, ""),
    ("/changing.png", 200, ""),
]
# whole references; {spy} is a port of loopback that must never be connected to, {port} the allowed host's
REFERENCES = [
    "http://127.0.0.2:{spy}/x.png",
    "http://[::ffff:127.0.0.2]:{spy}/x.png",
    "http://2130706434:{spy}/x.png",
    "http://0.0.0.0:{spy}/",
    "http://localhost:{spy}/",
    "http://[::1]:{spy}/",
    "http://[fe80::1]/",
    "http://169.254.169.254/",
    "http://100.64.0.1/",
    "http://127.0.0.2:{spy}\\@example.com/x.png",
    "http://127.0.0.2:{spy}%5C@example.com/x.png",
    "http://example.com\t@127.0.0.2:{spy}/",
    "http://user:pw@127.0.0.2:{spy}/",
    "file:///etc/passwd",
    "file://localhost/etc/passwd",
    "file:/etc/passwd",
    "/etc/passwd",
]


class Report:
    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.count = 0

    def check(self, what: str, good: bool, found: object) -> None:
        self.count += 1
        if not good:
            self.wrong.append(f"{what}: {found}")
            print("WRONG", self.wrong[-1], flush=True)


def looks_right(pixels, expected) -> str | None:
    if expected.get("size") and [pixels.shape[1], pixels.shape[0]] != expected["size"]:
        return f"size {pixels.shape[1]}x{pixels.shape[0]}"
    for point in expected.get("points") or []:
        x, y = point["xy"]
        found = [int(value) for value in pixels[y, x]]
        if max(abs(a - b) for a, b in zip(found, point["rgb"], strict=True)) > point["tol"]:
            return f"at {x},{y}: {found} instead of {point['rgb']}"
    return None


def by_library(case: dict, path: Path, report: Report) -> None:
    policy = MediaPolicy()
    outcomes = {case["expect"]["outcome"], *case.get("also_ok", [])}
    start = time.monotonic()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    try:
        if case["how"] == "data_url":
            data = source.payload(source.parse(path.read_text(), policy), policy)
            pixels = decode.decode(data, policy)
        else:
            pixels = pixelgate.decode(path.read_bytes(), policy)
    except PixelgateError as error:
        report.check(case["file"], any(o.startswith("reject") for o in outcomes), error.message)
        report.check(case["file"] + " status", 400 <= error.status < 500, error.status)
    else:
        expected = case["expect"] if case["expect"]["outcome"] == "ok" else case.get("ok_if")
        report.check(case["file"], "ok" in outcomes, "accepted")
        report.check(case["file"] + " pixels", expected is None or not looks_right(pixels, expected), expected)
    growth = (memory("VmHWM") - before) / 1024
    most = case.get("limits", {}).get("rss_growth_mb")
    report.check(case["file"] + " memory", not isinstance(most, int) or growth < most, f"{growth:.0f} MB")
    taken = time.monotonic() - start
    report.check(case["file"] + " time", taken < case.get("limits", {}).get("seconds", 10), f"{taken:.1f} s")


def memory(field: str) -> int:
    """A figure of this process in KB."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


async def by_gateway(case: dict, path: Path, running, report: Report) -> None:
    outcomes = {case["expect"]["outcome"], *case.get("also_ok", [])}
    if case["how"] == "data_url":
        url = await asyncio.to_thread(path.read_text)
    else:
        data = await asyncio.to_thread(path.read_bytes)
        url = f"data:{case['mime']};base64,{base64.b64encode(data).decode()}"
    response = await running.ask([image(url)])
    name = case["file"]
    # A model may refuse what decodes well: too long a strip, for one.
    good = response.status_code == 200 if outcomes == {"ok"} else response.status_code in (200, 400, 413)
    if response.status_code == 422:
        good = "ok" in outcomes and "times as long" in response.text
    if outcomes == {"reject_4xx"}:
        good = response.status_code in (400, 413)
    report.check(name + " by gateway", good, (response.status_code, response.text[:300]))
    if response.status_code != 200:
        error = error_of(response)
        report.check(name + " words", not LEAKS.search(error["message"]) and len(error["message"]) < 300, error)
        report.check(name + " place", error["param"] == "messages[0].content[0].image_url", error)
    report.check(name + " healthy", await healthy(running), "not healthy")


async def healthy(running) -> bool:
    good = await running.ask([image(picture(56, 56))])
    return good.status_code == 200 and (await running.client.get("/health")).status_code == 200


class Spy:
    """Listens on all of loopback and counts who comes."""

    def __init__(self) -> None:
        self.seen = 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.count, ["127.0.0.2", "::1"], 0)
        port = self.server.sockets[0].getsockname()[1]
        self.more = await asyncio.start_server(self.count, ["127.0.0.3"], port)
        self.port = port
        return self

    async def __aexit__(self, *_):
        self.server.close()
        self.more.close()

    async def count(self, reader, writer):
        self.seen += 1
        writer.close()


async def recipes(running, port: int, report: Report, spy: Spy) -> None:
    host = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(timeout=60) as client:
        await client.get(host + "/gzip-bomb.png", headers={"Accept-Encoding": "identity"})  # made at the first request
    for path, status, words in RECIPES:
        start = time.monotonic()
        url = host + path.format(closed=spy.port)
        response = await running.ask([image(url)])
        taken = time.monotonic() - start
        found = (response.status_code, response.text[:300])
        good = response.status_code == status and (status == 200 or words in error_of(response)["message"])
        report.check(path, good and not (status != 200 and LEAKS.search(response.text)), found)
        report.check(path + " time", taken < DEADLINE + 1, taken)
    for reference in REFERENCES:
        url = reference.format(spy=spy.port)
        response = await running.ask([image(url)])
        report.check(reference, response.status_code == 400, (response.status_code, response.text[:300]))
    report.check("nothing else on loopback was contacted", spy.seen == 0, f"{spy.seen} connections")
    async with httpx.AsyncClient() as client:
        before = len((await client.get(host + "/log")).json())
        await running.ask([{"type": "text", "text": f"![a]({host}/ok.png)"}])
        after = len((await client.get(host + "/log")).json())
    report.check("links in text are not fetched", after == before + 1, after - before)
    two = [image(picture(56, 56)), image(f"{host}/404.png")]
    for stream in (False, True):
        response = await running.ask(two, stream=stream)
        report.check("the second picture is named", "content[1]" in response.text, response.text)
    report.check("healthy after the host", await healthy(running), "not healthy")


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hostile", type=Path)
    parser.add_argument("--port", type=int, default=8911)
    arguments = parser.parse_args()
    report = Report()
    cases = json.loads((arguments.folder / "manifest.json").read_text())["cases"]
    for case in cases:
        by_library(case, arguments.folder / case["file"], report)
    print(f"{len(cases)} cases through the library: {report.count} checks, {len(report.wrong)} wrong")
    policy = MediaPolicy(allow_private=("127.0.0.1",), fetch_timeout=DEADLINE)
    async with strict_engine() as engine, gateway(engine.url, media=policy) as running:
        for case in cases:
            await by_gateway(case, arguments.folder / case["file"], running, report)
        print(f"and through the gateway: {report.count} checks, {len(report.wrong)} wrong")
        if arguments.hostile:
            command = (sys.executable, str(arguments.hostile), str(arguments.port))
            server = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            try:
                await server.stdout.readline()
                async with Spy() as spy:
                    await recipes(running, arguments.port, report, spy)
            finally:
                server.kill()
                await server.wait()
            print(f"and the hostile host: {report.count} checks, {len(report.wrong)} wrong")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
