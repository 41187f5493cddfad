#!/usr/bin/env bash
# set_up_sglang.sh DIRECTORY ENGINES: an environment with SGLang for the CPU, beside ENGINES, which set_up.sh has made and
# of which it uses torch, transformers and the gRPC servicer. Half a minute and 1.4 GB.
#
#   PYTHON    the interpreter, the same as that of ENGINES (default: python3.11)
#   PIP_ARGS  more options for pip
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: $0 DIRECTORY ENGINES" >&2; exit 2; }
target=$1
engines=$(cd "$2" && pwd)
[ ! -e "$target" ] || { echo "$target exists" >&2; exit 1; }
trap 'rm -rf "$target"; echo "the environment could not be made" >&2' ERR

"${PYTHON:-python3.11}" -m venv "$target"
python=$target/bin/python
where='import sysconfig; print(sysconfig.get_path("purelib"))'
site=$("$python" -c "$where")
"$engines/bin/python" -c "$where" > "$site/engines.pth"
# Without what its requirements ask for on a GPU; triton is imported and not used.
# shellcheck disable=SC2086
"$python" -m pip install -q --disable-pip-version-check ${PIP_ARGS:-} --no-deps sglang==0.5.23 triton==3.9.0 \
  IPython asttokens blobfile decorator distro executing gguf jedi matplotlib_inline openai-harmony orjson outlines==0.1.11 \
  parso pexpect prompt_toolkit ptyprocess pure_eval py-spy python-dateutil soundfile stack_data traitlets uvloop wcwidth \
  xxhash zstandard
"$python" - <<'PYTHON'
"""SGLang looks up the names of its compiled kernels at import. The tiny models need none, so the names are enough."""
import re
import sysconfig
from pathlib import Path

site = Path(sysconfig.get_path("purelib"))
name = re.compile(r"torch\.ops\.sgl_kernel\.(\w+_cpu|init_cpu_threads_env)\b")
found = {match for file in (site / "sglang").rglob("*.py") for match in name.findall(file.read_text("utf-8"))}
package = site / "sgl_kernel"
package.mkdir()
package.joinpath("__init__.py").write_text(f'''"""Names of kernels that are not here."""
import torch

__version__ = "0.4.10"
KERNELS = {sorted(found)!r}


def _missing(name):
    def kernel(*arguments, **named):
        raise NotImplementedError(f"the kernel {{name}} is not installed")

    return kernel


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)


for _name in KERNELS:
    if not hasattr(torch.ops.sgl_kernel, _name):
        setattr(torch.ops.sgl_kernel, _name, _missing(_name))
''')
PYTHON
HF_HUB_OFFLINE=1 SGLANG_USE_CPU_ENGINE=1 FLASHINFER_DISABLE_VERSION_CHECK=1 "$python" -c 'import sgl_kernel, sglang'
