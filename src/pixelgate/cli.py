"""The command line: pixelgate process | tokens | parity | serve | doctor | demo."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pixelgate._version import __version__
from pixelgate.errors import ConfigError, PixelgateError, RequestError
from pixelgate.gateway.configure import Explaining, add_flags, configure
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.models.backend import Backend

if TYPE_CHECKING:  # what each command needs it imports; the one that serves stays small
    from pixelgate.processor import ImageInputs, Processor

_CHECKPOINT = "the checkpoint: a directory, or an id on the Hugging Face hub"
_OF_HTTP = ("engine_model", "engine_api_key", "resize")
_REVISION = "branch, tag or commit of a hub id (default: the main branch)"
_OF_A_MODEL = (
    "checkpoint",
    "revision",
    "engine",
    "name",
    "mm_processor_kwargs",
    "backend",
    "bos",
    "balance",
    *_OF_HTTP,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 on success, 1 with a message on standard error for what pixelgate refuses."""
    parsed = _parsed(_parser(), arguments)
    try:
        return parsed.run(parsed) or 0
    except PixelgateError as error:
        print(f"pixelgate: {error.message}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        return 130


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes no pictures after an option if it could have taken none before it."""
    parsed, left = parser.parse_known_args(arguments)
    if left and (not hasattr(parsed, "images") or any(argument.startswith("-") for argument in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        parsed.images += left
    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pixelgate", description="Pictures to tensors for vision-language models.")
    parser.add_argument("--version", action="version", version=f"pixelgate {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    process = commands.add_parser("process", help="write a checkpoint's input arrays for pictures to an .npz file")
    process.add_argument("checkpoint", help=_CHECKPOINT)
    process.add_argument("images", nargs="+", metavar="IMAGE", help="picture files, in the order of the arrays")
    process.add_argument("-o", "--output", required=True, metavar="OUT.npz", help="where to write the arrays")
    process.add_argument("--dtype", help="float32, bfloat16, float16 or uint8 (default: what transformers returns)")
    _processor_flags(process)
    process.set_defaults(run=_process)

    tokens = commands.add_parser("tokens", help="count the embedded tokens of pictures, or those of a conversation")
    tokens.add_argument("checkpoint", help=_CHECKPOINT)
    tokens.add_argument("images", nargs="*", metavar="IMAGE")
    tokens.add_argument("--size", action="append", default=[], metavar="WxH", help="a size instead of a picture")
    tokens.add_argument(
        "--messages", metavar="FILE", help="a JSON list of messages, or a chat request; pictures relative to the file"
    )
    tokens.add_argument("--ids", action="store_true", help="with --messages: the token ids of the prompt as well")
    _processor_flags(tokens)
    tokens.set_defaults(run=_tokens)

    parity = commands.add_parser(
        "parity", help="compare with the checkpoint's own processor, in installed transformers"
    )
    parity.add_argument("checkpoint", help=_CHECKPOINT)
    parity.add_argument("images", nargs="+", metavar="IMAGE", help="pictures, given to both as Pillow opens them")
    parity.add_argument("--engine", metavar="URL", help="compare with a running vLLM instead: its /render, over HTTP")
    parity.add_argument("--engine-api-key", default="", metavar="KEY", help="sent to it")
    _processor_flags(parity)
    parity.set_defaults(run=_parity)

    serve = commands.add_parser("serve", help="run the gateway in front of engines", formatter_class=Explaining)
    serve.add_argument("checkpoint", nargs="?", help=f"{_CHECKPOINT} (default: the engine's own files)")
    serve.add_argument("--revision", help=_REVISION)
    serve.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="vllm+grpc://HOST:PORT, vllm+http://, sglang+grpc://, sglang+http://, openai+http://, local:transformers, "
        "local:reader; dns+vllm+grpc://NAME:PORT for each address of a name, file:PATH for those in a file",
    )
    _http_flags(serve)
    serve.add_argument(
        "--resize",
        action="store_true",
        help="send engines that prepare pictures themselves theirs in the size that is used",
    )
    serve.add_argument(
        "--name", default="", help="the model's name for clients (default: the id, the directory's or the engine's)"
    )
    _options_flag(serve)
    _backend_flag(serve)
    serve.add_argument("--bos", help="the token before a prompt as engine (default) or transformers would have it")
    serve.add_argument(
        "--balance",
        choices=["least-load", "round-robin", "image-affinity"],
        help="which of several engines gets a request (default: the one with the fewest under way)",
    )
    serve.add_argument("--config", metavar="pixelgate.toml", help="a file instead of CHECKPOINT and --engine")
    add_flags(serve)
    serve.set_defaults(run=_serve)

    doctor = commands.add_parser("doctor", help="examine engines, and send each one picture the whole way")
    doctor.add_argument("checkpoint", nargs="?", help=f"{_CHECKPOINT} (default: the engine's own files)")
    doctor.add_argument(
        "--engine",
        action="append",
        required=True,
        metavar="URL",
        help="vllm+grpc://HOST:PORT, vllm+http://, sglang+grpc://, ...; may be given several times",
    )
    _http_flags(doctor)
    doctor.add_argument("--revision", help=_REVISION)
    _options_flag(doctor)
    doctor.set_defaults(run=_doctor)

    demo = commands.add_parser("demo", help="show the whole way of a picture, with an engine that reads text")
    demo.add_argument("picture", nargs="?", help="a picture with text (default: one that comes with pixelgate)")
    demo.set_defaults(run=_demo)
    return parser


def _processor_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", help=_REVISION)
    _backend_flag(parser)
    _options_flag(parser)
    parser.add_argument("--rgb", choices=["pixelgate", "hf"], default="pixelgate", help="whose conversion to 8-bit RGB")


def _http_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine-model", default="", metavar="NAME", help="the model's name at engines behind HTTP")
    parser.add_argument("--engine-api-key", default="", metavar="KEY", help="a key for engines behind HTTP")


def _backend_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", choices=list(get_args(Backend)), help="whose numbers (default: the first there is)"
    )


def _options_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mm-processor-kwargs",
        type=_options,
        default={},
        metavar="JSON",
        help="options, such as '{\"max_pixels\": 500000}'",
    )


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f'a JSON object is needed, such as {{"max_pixels": 500000}}, not {text!r}')
    return options


def _processor(parsed: argparse.Namespace) -> Processor:
    from pixelgate.processor import load

    processor = load(parsed.checkpoint, revision=parsed.revision, backend=parsed.backend, rgb=parsed.rgb)
    return processor.with_options(**parsed.mm_processor_kwargs)


def _process(parsed: argparse.Namespace) -> None:
    import numpy as np

    processor = _processor(parsed)
    for image in parsed.images:
        with _about(image):
            processor.header(image)
    inputs = processor(parsed.images, dtype=parsed.dtype)
    # npz knows no bfloat16: its bits are kept as uint16, as is common
    arrays = {name: a.view(np.uint16) if a.dtype.name == "bfloat16" else a for name, a in inputs.items()}
    try:
        with Path(parsed.output).open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
    except OSError as failure:
        raise ConfigError(f"{parsed.output} cannot be written: {failure.strerror}") from None
    _print_arrays(inputs)


@contextmanager
def _about(image: str) -> Iterator[None]:
    """Errors raised inside name the picture."""
    try:
        yield
    except RequestError as error:
        if image not in error.message:
            error.message = f"{image}: {error.message}"
        raise


def _print_arrays(inputs: ImageInputs) -> None:
    for name, array in inputs.items():
        stored = ", its bits stored as uint16" if array.dtype.name == "bfloat16" else ""
        print(f"{name}  {array.dtype}{list(array.shape)}{stored}")
    print(f"tokens  {' '.join(map(str, inputs.token_counts))}")


def _tokens(parsed: argparse.Namespace) -> None:
    if bool(parsed.images or parsed.size) == bool(parsed.messages):
        raise ConfigError("give pictures, --size WIDTHxHEIGHT, or --messages FILE")
    if parsed.ids and not parsed.messages:
        raise ConfigError("--ids goes with --messages")
    processor = _processor(parsed)
    if parsed.messages:
        _tokens_of_messages(processor, parsed)
    for size in parsed.size:
        match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", size)
        if match is None:
            raise ConfigError(f"--size is written WIDTHxHEIGHT, such as 1920x1080, not {size!r}")
        plan = processor.plan(height=int(match[2]), width=int(match[1]))
        print(f"{plan.tokens}\t{size}")
    for image in parsed.images:
        with _about(image):
            header = processor.header(image)
            print(f"{processor.plan(height=header.height, width=header.width).tokens}\t{image}")


def _tokens_of_messages(processor: Processor, parsed: argparse.Namespace) -> None:
    with _gateway_installed():
        from pixelgate.conversation import count
    counted = count(processor, Path(parsed.messages))
    for name, tokens in (("prompt", len(counted.token_ids)), *counted.images):
        print(f"{tokens}\t{name}")
    if parsed.ids:
        print(*counted.token_ids)


def _parity(parsed: argparse.Namespace) -> int:
    from pixelgate.parity import against_engine, against_transformers

    if parsed.engine:
        with _gateway_installed():
            asked = against_engine(_processor(parsed), parsed.images, parsed.engine, parsed.engine_api_key)
            verdicts = asyncio.run(asked)
    else:
        verdicts = against_transformers(_processor(parsed), parsed.images)
    for verdict in verdicts:
        print(f"{'equal    ' if verdict.equal else 'NOT EQUAL'}  {verdict.name}  {verdict.words}")
    return 0 if all(verdict.equal for verdict in verdicts) else 1


@contextmanager
def _gateway_installed() -> Iterator[None]:
    """Say what to install where an import inside fails."""
    try:
        yield
    except ImportError as failure:
        raise ConfigError(f"this needs {failure.name}: pip install 'pixelgate[gateway]'") from None


def _serve(parsed: argparse.Namespace) -> None:
    from pixelgate.gateway.supervisor import run

    run(lambda: _settings(parsed))


def _settings(parsed: argparse.Namespace) -> GatewaySettings:
    if parsed.config and any(getattr(parsed, name) for name in _OF_A_MODEL):
        raise ConfigError("give either --config or a checkpoint with its own flags, not both")
    models: tuple[ModelSettings, ...] = ()
    if parsed.checkpoint == "":
        raise ConfigError("the checkpoint is an empty text; leave it out to take the engine's own files")
    if parsed.checkpoint or parsed.engine:
        model = ModelSettings(
            parsed.checkpoint or "",
            tuple(parsed.engine),
            parsed.name,
            revision=parsed.revision,
            mm_processor_kwargs=parsed.mm_processor_kwargs,
            backend=parsed.backend,
            bos=parsed.bos or "engine",
            balance=parsed.balance or "least-load",
            **{name: getattr(parsed, name) for name in _OF_HTTP},
        )
        models = (model,)
    elif not parsed.config:
        raise ConfigError("give --engine URL, with a checkpoint (a directory or hub id) or without, or --config FILE")
    return configure(file=parsed.config, models=models, flags=vars(parsed), environment=os.environ)


def _doctor(parsed: argparse.Namespace) -> int:
    with _gateway_installed():
        from pixelgate.gateway.doctor import run
    with_key = [url for url in parsed.engine if "+http" in url] or parsed.engine
    return run(
        [
            ModelSettings(
                parsed.checkpoint or "",
                (url,),
                revision=parsed.revision,
                mm_processor_kwargs=parsed.mm_processor_kwargs,
                engine_model=parsed.engine_model,
                engine_api_key=parsed.engine_api_key if url in with_key else "",
            )
            for url in parsed.engine
        ]
    )


def _demo(parsed: argparse.Namespace) -> None:
    try:
        from pixelgate.demo.run import run
    except ImportError as failure:
        raise ConfigError(f"the demo needs {failure.name}: pip install 'pixelgate[gateway,reader]'") from None
    run(parsed.picture)


if __name__ == "__main__":
    sys.exit(main())
