"""Which models SGLang answers right when pictures come to it as tensors. Of others nothing would be said."""

from __future__ import annotations

# By model_type and image processor: what has been compared with SGLang's own HTTP, token for token. A LLaVA of another
# image processor than Pixtral's ends the engine with its first picture.
_SERVED = {
    ("llava", "PixtralImageProcessor"),
    ("llava_next", "LlavaNextImageProcessor"),
    ("mistral3", "PixtralImageProcessor"),
    ("pixtral", "PixtralImageProcessor"),
}
_MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_INSTEAD = "Give it sglang+http://HOST:PORT instead, where SGLang prepares pictures itself."


def not_served_beside(model_type: str) -> str:
    """Why a model cannot be served by our own server beside SGLang's engine; empty where it can, or is not known.

    SGLang's engine takes prepared pictures where its own processor of a family has been written for them.
    """
    if model_type in ("", *_MROPE):
        return ""
    return f"The server beside SGLang's engine is for {', '.join(_MROPE)}, and not for {model_type}. {_INSTEAD}"


def not_served(model_type: str, image_processor: str = "") -> str:
    """Why a model cannot be served over SGLang's own gRPC; empty where it can. An empty argument is not known."""
    if model_type in _MROPE:
        return (
            f"SGLang's gRPC protocol cannot serve {model_type}: the model needs rows and columns of its pictures as "
            f"positions (M-RoPE), and they get lost on this way: answers would be wrong without any sign. {_INSTEAD} "
            "Or sglang+engine://HOST:PORT, for pixelgate's own server beside SGLang's engine."
        )
    for kind, processor in _SERVED:
        if model_type in ("", kind) and image_processor in ("", processor):
            return ""
    name = f"{model_type} with {image_processor}" if image_processor else model_type
    return f"That SGLang's gRPC protocol serves {name} right is not known: it has not been tried. {_INSTEAD}"
